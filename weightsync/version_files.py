"""What a version is made of, wherever it lies: its files, its manifest, what goes beside weights, and the chain of parents that a delta needs."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import orjson
import xxhash

from protocol.codec import to_json
from protocol.errors import DecodeError, ManifestError
from protocol.fields import reader
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync import delta
from weightsync.manifests import check_manifest
from weightsync.safetensors_file import cut
from weightsync.snapshot import ITEM_BYTES, Snapshot, TensorBytes, weights_digest
from weightsync.spread import spread

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"
DELTA_FILE = "delta.safetensors"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_MAX_ASSET_BYTES = 256 << 20
_MOST_OF_FULL = 0.5
"""A delta that is larger than this share of the whole version saves nobody anything worth its chain."""


class Form(NamedTuple):
    """A tensor of an entry, as far as a file's layout must know it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Draft(NamedTuple):
    """A version that can be written: its manifest, and what goes into each of its files."""

    manifest: Manifest
    files: Mapping[str, Mapping[str, TensorBytes]]


def draft_full(snapshot: Snapshot, location: str, bucket_bytes: int) -> Draft:
    """All of `snapshot`."""
    tensors = snapshot.tensors
    names = sorted(tensors)
    sums = dict(zip(names, spread(lambda name: xxhash.xxh3_64_hexdigest(tensors[name].data), names), strict=True))
    return _full(snapshot, sums, location, bucket_bytes)


def draft_delta(snapshot: Snapshot, parent: Manifest, base: Mapping[str, TensorBytes], location: str, bucket_bytes: int) -> Draft:
    """What differs from `parent`, whose bytes are `base`; all of `snapshot` where that is hardly more.

    Raises: `ManifestError` naming the tensor where they do not belong together; if `parent` is not an earlier version of the same incarnation (rule W7).
    """
    version, tensors = snapshot.version, snapshot.tensors
    if parent.version.incarnation != version.incarnation or parent.version.n >= version.n:
        raise ManifestError(f"version {version}: a delta on {parent.version} is refused: its parent is an earlier version of the same incarnation")
    changes = delta.encode(parent, base, tensors)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    if changes.nbytes > whole * _MOST_OF_FULL:
        return _full(snapshot, changes.checksums, location, bucket_bytes)
    manifest = Manifest(
        version=version,
        kind="delta",
        parent=parent.digest,
        parent_version=parent.version,
        tensors=tuple(
            TensorEntry(name=name, dtype=one.dtype, shape=one.shape, file=DELTA_FILE if name in changes.blobs else "", checksum=changes.checksums[name])
            for name, one in sorted(tensors.items())
        ),
        digest=snapshot.digest or weights_digest(tensors),
        transport="store",
        location=location,
        total_bytes=changes.nbytes,
        created_at=time.time(),
        elements=changes.elements,
        changed_elements=changes.changed,
    )
    return Draft(manifest, {DELTA_FILE: changes.blobs} if changes.blobs else {})  # a file is named by the tensors that are in it


def _full(snapshot: Snapshot, sums: Mapping[str, str], location: str, bucket_bytes: int) -> Draft:
    tensors = snapshot.tensors
    files = cut(tensors, bucket_bytes)
    places = {name: file for file, names in files.items() for name in names}
    manifest = Manifest(
        version=snapshot.version,
        kind="full",
        parent="",
        tensors=tuple(
            TensorEntry(name=name, dtype=one.dtype, shape=one.shape, file=places[name], checksum=sums[name]) for name, one in sorted(tensors.items())
        ),
        digest=snapshot.digest or weights_digest(tensors),
        transport="store",
        location=location,
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        created_at=time.time(),
    )
    return Draft(manifest, {file: {name: tensors[name] for name in names} for file, names in files.items()})


def made_whole(manifest: Manifest, location: str, bucket_bytes: int) -> tuple[Manifest, Mapping[str, Mapping[str, Form]]]:
    """The manifest of a full copy of any version, and the layout of its files. Raises: `ManifestError` naming a tensor whose type nobody knows."""
    for entry in manifest.tensors:
        if entry.dtype not in ITEM_BYTES or any(extent < 0 for extent in entry.shape):
            raise ManifestError(f"version {manifest.version}: tensor {entry.name} is {entry.dtype} {list(entry.shape)}, which is no tensor")
    forms = {entry.name: Form(entry.dtype, entry.shape) for entry in manifest.tensors}
    files = cut(forms, bucket_bytes)
    places = {name: file for file, names in files.items() for name in names}
    whole = dataclasses.replace(
        manifest,
        kind="full",
        parent="",
        parent_version=None,
        elements=0,
        changed_elements=0,
        tensors=tuple(dataclasses.replace(entry, file=places[entry.name]) for entry in manifest.tensors),
        location=location,
        total_bytes=sum(form.nbytes for form in forms.values()),
    )
    return whole, {file: {name: forms[name] for name in names} for file, names in files.items()}


def by_file(manifest: Manifest) -> dict[str, list[TensorEntry]]:
    """The tensors that each file of a version holds; of a delta, the changed ones.

    Raises: `ManifestError` naming the tensor: of a full version, one that is in no file; one that is listed twice.
    """
    files: dict[str, list[TensorEntry]] = {}
    seen: set[str] = set()
    for entry in manifest.tensors:
        if entry.name in seen:
            raise ManifestError(f"version {manifest.version}: tensor {entry.name} is listed twice")
        seen.add(entry.name)
        if entry.file:
            files.setdefault(entry.file, []).append(entry)
        elif manifest.kind != "delta":
            raise ManifestError(f"version {manifest.version}: tensor {entry.name} is in no file")
    return files


def held(manifest: Manifest, file: str, entries: Sequence[TensorEntry], tensors: Mapping[str, TensorBytes]) -> Mapping[str, TensorBytes]:
    """What a file holds of a version. Raises: `ManifestError` naming a tensor that is not in it, or that an engine would load from it unchecked."""
    for entry in entries:
        if entry.name not in tensors:
            raise ManifestError(f"version {manifest.version}: tensor {entry.name} is not in {file}")
    if unlisted := sorted(tensors.keys() - {entry.name for entry in entries}):
        raise ManifestError(f"version {manifest.version}: tensor {unlisted[0]} in {file} is not in the manifest")
    return tensors


def check_tensors(manifest: Manifest, tensors: Mapping[str, TensorBytes]) -> None:
    """Return once every one of `tensors`, all that the version's files hold (`held`), is known to be right.

    Raises: `ManifestError` naming the first that is not.
    """
    check = delta.check if manifest.kind == "delta" else _check
    entries = [entry for entries in by_file(manifest).values() for entry in entries]
    spread(lambda entry: check(manifest.version, entry, tensors[entry.name]), sorted(entries, key=lambda entry: -tensors[entry.name].nbytes))


def _check(version: Version, entry: TensorEntry, tensor: TensorBytes) -> None:
    if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        raise ManifestError(f"version {version}: tensor {entry.name} is {tensor.dtype} {tensor.shape}, expected {entry.dtype} {entry.shape}")
    if (checksum := xxhash.xxh3_64_hexdigest(tensor.data)) != entry.checksum:
        raise ManifestError(f"version {version}: tensor {entry.name} has checksum {checksum}, expected {entry.checksum}: its bytes are damaged")


def manifest_bytes(manifest: Manifest) -> bytes:
    """As `manifest.json` has it."""
    return orjson.dumps(to_json(manifest), option=orjson.OPT_INDENT_2)


def read_manifest(where: str, content: bytes) -> Manifest:
    """Raises: `ManifestError` if it is none."""
    try:
        found = cast("Manifest", reader(Manifest)(orjson.loads(content), "manifest"))
    except (ValueError, DecodeError) as problem:
        raise ManifestError(f"{where} is no manifest: {problem}") from problem
    check_manifest(found)
    return found


def with_parents(known: Collection[Version], parent_of: Callable[[Version], Version | None]) -> frozenset[Version]:
    """`known` and every version that they need, by their chains of parents."""
    needed: set[Version] = set()
    for version in known:
        at: Version | None = version
        while at is not None and at not in needed:
            needed.add(at)
            at = parent_of(at)
    return frozenset(needed)


class Clearable(Protocol):
    """What `drop` needs of a store."""

    def manifest(self, version: Version) -> Manifest:
        """Raises: `ManifestError` if it cannot be had."""

    def delete(self, version: Version) -> None:
        """Removing what is not there is fine."""


def drop(store: Clearable, versions: Iterable[Version], known: Collection[Version]) -> tuple[Version, ...]:
    """Delete those of `versions` that are neither known nor parents of what is; which they were."""

    def parent(version: Version) -> Version | None:
        try:
            return store.manifest(version).parent_version
        except ManifestError:
            return None

    needed = with_parents(known, parent)
    dropped = tuple(version for version in versions if version not in needed)
    for version in dropped:
        store.delete(version)
    return dropped


def parse_name(name: str) -> Version | None:
    """The version of a folder called `v2-7`."""
    incarnation, _, n = name.removeprefix("v").partition("-")
    return Version(int(incarnation), int(n)) if name.startswith("v") and incarnation.isdecimal() and n.isdecimal() else None


def is_weights(path: Path) -> bool:
    """Whether a loader of model folders may take it for weights."""
    return path.suffix in _WEIGHT_SUFFIXES


def asset_files(model: Path) -> list[Path]:
    """What goes beside the weights of a starting model: configuration and tokenizer. Raises: `ManifestError` for a folder that holds no model."""
    found = sorted(path for path in model.iterdir() if path.is_file() and _is_asset(path))
    if not any(path.name == "config.json" for path in found):
        raise ManifestError(f"{model} has no config.json: model.path must be a Hugging Face model folder")
    return found


def assets_mark(files: Iterable[Path]) -> str:
    """Equal for the same files, unchanged."""
    mark = xxhash.xxh3_64()
    for path in files:
        stat = path.stat()
        mark.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return str(mark.hexdigest())


def _is_asset(path: Path) -> bool:
    return (
        path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json") and path.name != MANIFEST_FILE and path.stat().st_size <= _MAX_ASSET_BYTES
    )
