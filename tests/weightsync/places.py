"""Every kind of store of versions, and a small policy to put into it. For tests, and for the processes that they start."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.object_versions import ObjectVersions
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore, VersionStore

KINDS = ("directory", "memory", "objects", "url")
BUCKET = 4000


def weights(n: int, *, share: float = 0.02) -> Snapshot:
    """Version 1:n of a small policy: each differs from the one before in some elements of two of its four tensors."""
    rng = np.random.default_rng(0)
    embed, layer = rng.integers(0, 1 << 16, 1500, np.uint16), rng.integers(0, 1 << 16, 1500, np.uint16)
    norm, steps = rng.bytes(4 * 100), rng.bytes(8)
    for one in range(1, n + 1):
        chosen = np.random.default_rng(one).random((2, 1500)) < share
        embed[chosen[0]] += 1
        layer[chosen[1]] += 2
    tensors = {
        "model.embed.weight": TensorBytes(dtype="BF16", shape=(100, 15), data=embed.tobytes()),
        "model.layer.weight": TensorBytes(dtype="BF16", shape=(1500,), data=layer.tobytes()),
        "model.norm.weight": TensorBytes(dtype="F32", shape=(100,), data=norm),
        "model.steps": TensorBytes(dtype="I64", shape=(), data=steps),
    }
    return Snapshot(version=Version(1, n), tensors=tensors)


def raw(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: bytes(one.data) for name, one in snapshot.tensors.items()}


class Place:
    """One store, as its kind has it."""

    def __init__(self, kind: str, where: str, model: Path) -> None:
        self.kind, self.where, self._model = kind, where, model

    def open(self, *, writer: bool = True) -> VersionStore:
        model = self._model if writer else None
        made = DirectoryStore if self.kind in ("directory", "memory") else ObjectVersions
        return made(self.where, model, bucket_bytes=BUCKET)

    def path(self, manifest: Manifest, file: str) -> Path:
        return Path(manifest.location) / file


@contextlib.contextmanager
def place_of(kind: str, tmp_path: Path, model_path: Path) -> Iterator[Place]:
    """A folder on disk, shared memory, objects in a folder, objects behind an fsspec URL."""
    where = {
        "directory": str(tmp_path / "store"),
        "memory": f"/dev/shm/rollstream-test-{uuid.uuid4().hex}",
        "objects": str(tmp_path / "objects"),
        "url": f"memory://{uuid.uuid4().hex}/run",
    }[kind]
    try:
        yield Place(kind, where, model_path)
    finally:
        if kind == "memory":
            shutil.rmtree(where, ignore_errors=True)
