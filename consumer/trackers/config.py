"""The [trackers] section."""

from __future__ import annotations

import importlib.util
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from protocol.config import Section
from protocol.errors import ConfigError

TrackerName: TypeAlias = Literal["tensorboard", "wandb"]
_PACKAGES: dict[str, str] = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class TrackersConfig(Section):
    names: tuple[TrackerName, ...] = Field(
        (), strict=False, description='Trackers that get the numbers of metrics.jsonl, which is written in any case: "tensorboard", "wandb".'
    )
    tensorboard_dir: str = Field(
        "", description="Folder with a folder of TensorBoard's event files for each run, by its name. Default: tensorboard in run.dir."
    )
    wandb_project: str = Field("rollstream", min_length=1, description="Project of Weights & Biases; the run there has the name of this one.")
    wandb_mode: Literal["offline", "online"] = Field(
        "offline", description="offline: into the folder wandb in run.dir, for `wandb sync`; online: to the server as it trains."
    )

    @model_validator(mode="after")
    def _each_once(self) -> TrackersConfig:
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"names {list(self.names)}: name each tracker once")
        return self

    def check(self) -> None:
        """Raises: `ConfigError` for a tracker whose package is not installed."""
        for name in self.names:
            if importlib.util.find_spec(_PACKAGES[name]) is None:
                raise ConfigError(f"trackers.names {name}: {_PACKAGES[name]} is not installed here: pip install 'rollstream[{name}]', or leave {name} out")
