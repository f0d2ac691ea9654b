"""The [teacher] section."""

from __future__ import annotations

import os
import re

from pydantic import Field, field_validator

from protocol.config import RolloutConfig, Section
from protocol.errors import ConfigError

_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
TEACHER_VARIABLE = "ROLLSTREAM_TEACHER_KEY"


class TeacherConfig(Section):
    urls: tuple[str, ...] = Field(
        (), strict=False, description="http://host:port of servers with SGLang's API that score sampled tokens; each may be asked. Empty: no teacher."
    )
    concurrency: int = Field(64, ge=1, description="Rollouts that one producer has scored at once.")
    timeout_seconds: float = Field(120.0, gt=0, description="A server that takes longer for one rollout rests, and is asked again.")

    @field_validator("urls")
    @classmethod
    def _are_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not _URL.fullmatch(url):
                raise ValueError(f"urls has {url!r}: give http://host:port")
        plain = tuple(url.rstrip("/") for url in urls)
        if len(set(plain)) < len(plain):
            raise ValueError(f"urls names a server twice: {', '.join(plain)}")
        return plain

    def check(self, rollout: RolloutConfig) -> None:
        """Raises: `ConfigError` where the logprobs of policy and teacher could not be compared."""
        if self.urls and rollout.temperature != 1:
            raise ConfigError(
                f"teacher.urls with rollout.temperature {rollout.temperature:g}: a server scores at temperature 1, and the policy is compared with it at its "
                "own; set rollout.temperature = 1, or leave teacher.urls empty"
            )


def teacher_key() -> str:
    """What teachers ask of whoever asks them: in the environment, so that no file shows it. Empty: they answer everybody."""
    return os.environ.get(TEACHER_VARIABLE, "")
