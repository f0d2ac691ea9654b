"""Weights & Biases. Its own step counter never goes back, so a step is a figure like the others, and the axis of all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from protocol.messages import JsonValue

_NOT_IN_AN_ID = re.compile(r"[^A-Za-z0-9._-]")


class WandB:
    """See `consumer.trackers.aside.Tracker`. A resumed run goes on as the same one."""

    def __init__(self, folder: Path, *, project: str, mode: Literal["offline", "online"], run: str, settings: Mapping[str, JsonValue]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            name=run,
            id=_NOT_IN_AN_ID.sub("-", run),
            resume="allow",
            mode=mode,
            dir=str(folder),
            config=dict(settings),
            reinit="create_new",
            settings={"console": "off", "silent": True},
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
