"""The [weights] section, and where its store lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

import xxhash
from pydantic import Field, field_validator, model_validator

from protocol.config import RunConfig, Section
from protocol.errors import ConfigError

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it carries the user's id and is made with mode 700
_FOLDER_SCHEMES = ("file", "local")
_NCCL_BUCKET_MB = 256


class WeightsConfig(Section):
    store: str = Field(
        "",
        description="Folder or fsspec URL for published versions, seen by trainer and engines. Empty: shared memory of this machine, or run.dir without it.",
    )
    transport: Literal["store", "delta", "gloo", "nccl", "ipc"] = Field(
        "store",
        description="How versions reach engines. store: each loads the files; delta: changed elements go to a relay on each machine; gloo, nccl: a weight "
        "server sends them; ipc: a weight server on the engine's GPU hands them over. What breaks falls back to store.",
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field("", description="Type that floats are published in. Empty: as trained.")
    full_every: int = Field(20, ge=1, description="With transport delta, every n-th version is published whole; the others hold what changed.")
    relay: str = Field("", description="Folder of this machine's whole copies, for delta and for a store behind a URL. Empty: shared memory, or run.dir.")
    bucket_mb: int = Field(256, ge=1, description="Megabytes sent or written at a time. nccl needs 256: below, it spends more time on calls than on bytes.")
    publish_every: int = Field(1, ge=1, description="Publish the weights of every n-th step. On-policy runs (pipeline_depth 0) need 1.")
    pause_mode: Literal["in_place", "retract", "abort"] = Field(
        "in_place",
        description="How an engine pauses for new weights. in_place: requests go on over the update with the keys and values they have; retract: they go on, "
        "and what they have so far is computed anew under the new weights; abort: they end there and go on elsewhere.",
    )
    max_paused: int = Field(1, ge=1, description="Engines that may be paused at the same time; the others keep decoding.")
    min_serving_share: float = Field(0.0, ge=0, lt=1, description="Share of the engines that must go on decoding while others are paused; idle ones count.")
    keep: int = Field(2, ge=1, description="Newest versions kept on disk beyond those an engine serves or takes.")
    min_interval_s: float = Field(0.0, ge=0, description="Seconds an engine serves at least between two updates; raise it when pauses cost throughput.")
    group_deadline_s: float = Field(30.0, gt=0, description="Seconds a process group of one engine and its weight server may take to form.")
    apply_deadline_s: float = Field(60.0, gt=0, description="Seconds one engine may take from pause to verified; past it the engine is unfit.")

    @field_validator("relay")
    @classmethod
    def _check_relay(cls, relay: str) -> str:
        if is_url(relay):
            raise ValueError("is a URL, and engines load from there: give a folder of this machine")
        return relay

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.transport == "nccl" and self.bucket_mb < _NCCL_BUCKET_MB:
            raise ValueError(f'bucket_mb {self.bucket_mb} is below {_NCCL_BUCKET_MB}, which transport = "nccl" needs: raise weights.bucket_mb')
        return self


def is_url(store: str) -> bool:
    """Whether `weights.store` is something that no engine can load from: versions behind it are fetched first. A file:// URL is a folder."""
    scheme, found, _ = store.partition("://")
    return bool(found) and scheme not in _FOLDER_SCHEMES


def store_folder(weights: WeightsConfig, run: RunConfig) -> Path:
    """The folder of this run's versions; never shared by two runs on one machine.

    With `weights.store` set, it is that folder's child named after the run, so machines with different run folders agree on it.
    Raises: `ConfigError` for a URL: ask `is_url` first.
    """
    if is_url(weights.store):
        raise ConfigError(f"weights.store {weights.store}: a URL has no folder; engines load from weights.relay")
    return _folder(weights.store, run, "") or run.folder / "weights"


def relay_folder(weights: WeightsConfig, run: RunConfig) -> Path:
    """The folder of this machine's whole copies of this run's versions; its processes agree on it, and it is not the store's."""
    return _folder(weights.relay, run, "-relay") or run.folder / "relay"


def _folder(chosen: str, run: RunConfig, suffix: str) -> Path | None:
    if chosen:
        path = chosen.partition("://")[2] if chosen.startswith(tuple(f"{scheme}://" for scheme in _FOLDER_SCHEMES)) else chosen
        if path != chosen and not path.startswith("/"):
            raise ConfigError(f"{chosen}: a file URL needs an absolute path, file:///folder")
        return Path(path).absolute() / f"{run.name}{suffix}"
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        mark = xxhash.xxh3_64_hexdigest(os.fsencode(run.folder))[:8]
        return _SHARED_MEMORY / f"rollstream-{os.getuid()}" / f"{run.name}-{mark}{suffix}"
    return None
