"""The [weights] section, and where its store lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import xxhash
from pydantic import Field

from protocol.config import RunConfig, Section

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it carries the user's id and is made with mode 700


class WeightsConfig(Section):
    store: str = Field(
        "", description="Folder for published versions, seen by trainer and engines. Empty: shared memory of this machine, or run.dir without it."
    )
    publish_every: int = Field(1, ge=1, description="Publish the weights of every n-th step. On-policy runs (pipeline_depth 0) need 1.")
    pause_mode: Literal["in_place", "abort"] = Field(
        "in_place",
        description="How an engine pauses for new weights. in_place: requests go on over the update; abort: they end there and are sampled again.",
    )
    max_paused: int = Field(1, ge=1, description="Engines that may be paused at the same time; the others keep decoding.")
    keep: int = Field(2, ge=1, description="Newest versions kept on disk beyond those an engine serves or takes.")
    min_interval_s: float = Field(0.0, ge=0, description="Seconds an engine serves at least between two updates; raise it when pauses cost throughput.")
    apply_deadline_s: float = Field(60.0, gt=0, description="Seconds one engine may take from pause to verified; past it the engine is unfit.")


def store_folder(weights: WeightsConfig, run: RunConfig) -> Path:
    """The folder of this run's versions; never shared by two runs on one machine.

    With `weights.store` set, it is that folder's child named after the run, so machines with different run folders agree on it.
    """
    if weights.store:
        return Path(weights.store).absolute() / run.name
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        mark = xxhash.xxh3_64_hexdigest(os.fsencode(run.folder))[:8]
        return _SHARED_MEMORY / f"rollstream-{os.getuid()}" / f"{run.name}-{mark}"
    return run.folder / "weights"
