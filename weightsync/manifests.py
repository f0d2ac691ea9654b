"""What a manifest may say: checked whole before any of it is believed, so that nothing that follows meets a number or a name it cannot hold."""

from __future__ import annotations

import math

from protocol.errors import DecodeError, ManifestError
from protocol.frames import brief
from protocol.messages import Manifest, TensorEntry
from protocol.objects import check_name
from weightsync.snapshot import ITEM_BYTES

_KINDS = ("full", "delta", "adapter")
_MAX_BYTES = 1 << 46
"""64 TiB: no version has a tensor so large."""
_MAX_PLACE = 4096


def check_manifest(manifest: Manifest) -> None:
    """Return if every name, type, size and place in it is one that a version can have.

    Raises: `ManifestError` naming the tensor.
    """
    where = f"version {manifest.version}"
    if manifest.kind not in _KINDS:
        raise ManifestError(f"{where} is of kind {brief(manifest.kind)}, expected one of {', '.join(_KINDS)}")
    if not manifest.location or "\0" in manifest.location or len(manifest.location) > _MAX_PLACE:
        raise ManifestError(f"{where}: {brief(manifest.location)} is no place")
    if (manifest.parent_version is None) == (manifest.kind == "delta"):
        raise ManifestError(f"{where} is {manifest.kind} and names {manifest.parent_version} as its parent: a delta has one, any other version none")
    if manifest.parent_version is not None and not manifest.parent_version < manifest.version:
        raise ManifestError(f"{where} is a delta of {manifest.parent_version}, which is not older")
    for entry in manifest.tensors:
        _check(where, entry)


def _check(where: str, entry: TensorEntry) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise ManifestError(f"{where}: tensor {entry.name} has dtype {brief(entry.dtype)}, expected one of {', '.join(sorted(ITEM_BYTES))}")
    if any(extent < 0 for extent in entry.shape) or math.prod(max(1, extent) for extent in entry.shape) * ITEM_BYTES[entry.dtype] > _MAX_BYTES:
        raise ManifestError(f"{where}: tensor {entry.name} has shape {brief(list(entry.shape))}, which no version holds")
    if entry.file:
        try:
            check_name(entry.file)
        except DecodeError as problem:
            raise ManifestError(f"{where}: tensor {entry.name} is said to lie in {brief(entry.file)}, which is no file of a version") from problem
