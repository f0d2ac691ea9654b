"""What changed between two versions, tensor by tensor: indices and differences of the elements whose bits differ, zstd.

A changed tensor is one blob; an unchanged one has none::

    blob    b"RSD1", 3 zeros, item bytes u8, changed u64, xxh3-64 of the parent's tensor u64, xxh3-64 of the rest u64, one record a slab of 2^20 elements
    record  form u8, 3 zeros, changed u32, bytes u32, that many bytes of one zstd frame: index, then differences
    form    0: nothing changed; 1 to 3: gaps between indices, so many planes of one byte each; 8: one bit an element, lowest bit first

A difference is new minus old of the elements' bits as integers, wrapped and zigzagged, one plane a byte: an optimizer step moves most bf16 elements that it
changes by a few units in the last place, so all but the lowest plane are nearly all zeros. It only makes sense on the parent's very bytes: the blob names their
checksum, and the result is checked against the manifest's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from protocol.errors import ManifestError
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync.snapshot import ITEM_BYTES, TensorBytes
from weightsync.spread import THREADS, spread

SLAB = 1 << 20
"""Elements that are compared, compressed and applied as one: a few megabytes, which a core's cache holds."""
_MAGIC = b"RSD1\0\0\0"
_BLOB = struct.Struct("<7sBQQQ")
_RECORD = struct.Struct("<B3xII")
_MOST_PLANES = 3
"""Bytes that a gap within a slab may take."""
_BITS = 8
_SPARSE = 16
"""Where less than one element in so many changed, gaps are smaller than bits."""
_LEVEL = 1
_UNSIGNED: dict[int, Any] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_SIGNED: dict[int, Any] = {1: np.dtype("i1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}
Elements: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """From a parent to a version."""

    blobs: Mapping[str, TensorBytes]
    """By tensor name, type U8; none for a tensor that did not change."""
    checksums: Mapping[str, str]
    """xxh3-64, hex, of every tensor of the version."""
    elements: int
    changed: int

    @property
    def nbytes(self) -> int:
        return sum(blob.nbytes for blob in self.blobs.values())


class Step(NamedTuple):
    """One delta of a chain: its manifest, and the blobs of its files by tensor name."""

    manifest: Manifest
    blobs: Mapping[str, TensorBytes]


class _Record(NamedTuple):
    """What changed in one slab."""

    form: int
    changed: int
    frame: memoryview | bytes


class _Compared(NamedTuple):
    """Two tensors: their checksums, and a record a slab."""

    old: str
    new: str
    records: list[_Record]


class _Opened(NamedTuple):
    base: str
    records: list[_Record]


def encode(parent: Manifest, base: Mapping[str, TensorBytes], tensors: Mapping[str, TensorBytes], *, threads: int = THREADS) -> Changes:
    """What makes `tensors` of `base`, the bytes of `parent`.

    Raises: `ManifestError` naming the tensor where names, types, shapes or bytes of `base` are not the parent's, or `tensors` has other names, types or shapes.
    """
    entries = {entry.name: entry for entry in parent.tensors}
    for whose, those in (("the version", tensors), ("the base", base)):
        _same_form(f"delta on {parent.version}: {whose}", entries, {name: (tensor.dtype, tensor.shape) for name, tensor in those.items()})
    names = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    compared = spread(lambda name: _compare(base[name], tensors[name]), names, threads=threads)
    found = dict(zip(names, compared, strict=True))
    for name, entry in entries.items():
        if found[name].old != entry.checksum:
            raise ManifestError(f"delta on {parent.version}: tensor {name} of the base has checksum {found[name].old}, expected {entry.checksum}")
    return Changes(
        blobs={name: _blob(one.old, tensors[name], one.records) for name, one in found.items() if one.new != one.old},
        checksums={name: one.new for name, one in found.items()},
        elements=sum(_count(tensor) for tensor in tensors.values()),
        changed=sum(record.changed for one in compared for record in one.records),
    )


def check(version: Version, entry: TensorEntry, blob: TensorBytes | None) -> None:
    """Return if the blob of a changed tensor is whole. Raises: `ManifestError` naming the tensor."""
    _open(version, entry, blob)


def apply(
    parent: Manifest,
    base: Mapping[str, TensorBytes],
    chain: Sequence[Step],
    into: Mapping[str, memoryview],
    *,
    threads: int = THREADS,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Write the last version of `chain` into `into`, which has as many bytes for each tensor; `base` are the bytes of `parent`, where the chain begins.

    Raises: `ManifestError` naming the tensor: a delta that is not of the version before it, has other names, types or shapes, is damaged, or gives other bytes
    than its manifest says. `InterruptedError` soon after `stopped()` is true. After either, what is in `into` is no version.
    """
    form = {entry.name: (entry.dtype, entry.shape) for entry in parent.tensors}
    _same_form(f"base {parent.version}", {entry.name: entry for entry in parent.tensors}, {name: (one.dtype, one.shape) for name, one in base.items()})
    changes: dict[str, list[tuple[TensorEntry, Version, _Opened]]] = {name: [] for name in form}
    before = parent
    for step in chain:
        for entry, opened in _of_parent(before, step):
            changes[entry.name].append((entry, step.manifest.version, opened))
        before = step.manifest
    names = sorted(form, key=lambda name: -base[name].nbytes)

    def make(name: str) -> str:
        checksum = xxhash.xxh3_64()
        for start in range(0, _count(base[name]), SLAB):
            if stopped():
                raise InterruptedError(f"version {before.version}: told to stop")
            slab = _writable(into[name], base[name], start)
            slab[:] = _elements(base[name], start)
            for entry, version, opened in changes[name]:
                _apply_slab(version, entry, opened.records[start // SLAB], slab)
            checksum.update(slab.data)  # while the cache has it
        return str(checksum.hexdigest())

    sums = dict(zip(names, spread(make, names, threads=threads), strict=True))
    for entry in before.tensors:
        if sums[entry.name] != entry.checksum:
            raise ManifestError(f"version {before.version}: tensor {entry.name} has checksum {sums[entry.name]} after its delta, expected {entry.checksum}")


# -- chains --------------------------------------------------------------------------------------------------------------------------------------


def _of_parent(before: Manifest, step: Step) -> list[tuple[TensorEntry, _Opened]]:
    """The opened blobs of a delta that is one of `before` (rule W7)."""
    manifest, old = step.manifest, {entry.name: entry for entry in before.tensors}
    if manifest.kind != "delta":
        raise ManifestError(f"version {manifest.version} is {manifest.kind}, expected a delta on {before.version}")
    _same_form(f"version {manifest.version}", old, {entry.name: (entry.dtype, entry.shape) for entry in manifest.tensors})
    opened = [(entry, _open(manifest.version, entry, step.blobs.get(entry.name))) for entry in manifest.tensors if entry.file]
    for entry, blob in opened:
        if blob.base != old[entry.name].checksum:
            raise ManifestError(
                f"version {manifest.version}: the delta of tensor {entry.name} is on bytes with checksum {blob.base}, "
                f"and {before.version} has {old[entry.name].checksum}: it is of another parent"
            )
    for entry in manifest.tensors:
        if not entry.file and entry.checksum != old[entry.name].checksum:
            raise ManifestError(
                f"version {manifest.version}: tensor {entry.name} is said to be as in its parent, with checksum {entry.checksum}, "
                f"and {before.version} has {old[entry.name].checksum}: it is of another parent"
            )
    if manifest.parent != before.digest:  # every tensor agrees, so it is the digest that is wrong
        name = manifest.tensors[0].name if manifest.tensors else ""
        raise ManifestError(
            f"version {manifest.version} is a delta on {manifest.parent_version} with digest {manifest.parent}, "
            f"and {before.version} has {before.digest}: it is of another parent (from tensor {name} on)"
        )
    return opened


def _same_form(whose: str, entries: Mapping[str, TensorEntry], found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    for name in sorted(entries.keys() ^ found.keys()):
        raise ManifestError(f"{whose} {'has no' if name in entries else 'has another'} tensor {name}: a delta has the tensors of its parent")
    for name, entry in entries.items():
        if found[name] != (entry.dtype, entry.shape):
            dtype, shape = found[name]
            raise ManifestError(f"{whose} has tensor {name} as {dtype} {list(shape)}, expected {entry.dtype} {list(entry.shape)}")


# -- blobs ---------------------------------------------------------------------------------------------------------------------------------------


def _blob(base: str, tensor: TensorBytes, records: Sequence[_Record]) -> TensorBytes:
    parts: list[bytes | memoryview] = []
    for record in records:
        parts += [_RECORD.pack(record.form, record.changed, len(record.frame)), record.frame]
    body = b"".join(parts)
    changed = sum(record.changed for record in records)
    content = _BLOB.pack(_MAGIC, ITEM_BYTES[tensor.dtype], changed, int(base, 16), xxhash.xxh3_64_intdigest(body)) + body
    return TensorBytes(dtype="U8", shape=(len(content),), data=content)


def _open(version: Version, entry: TensorEntry, blob: TensorBytes | None) -> _Opened:
    """The records of a blob, each within it; frames are checked as they are unpacked."""

    def damaged(why: str) -> ManifestError:
        return ManifestError(f"version {version}: the delta of tensor {entry.name} {why}")

    if blob is None:
        raise damaged(f"is not in {entry.file}")
    if blob.dtype != "U8":
        raise damaged(f"is {blob.dtype}, expected U8: it is no delta")
    view = memoryview(blob.data).cast("B")
    if len(view) < _BLOB.size:
        raise damaged(f"has {len(view)} bytes: it is torn")
    magic, item, changed, base, checksum = _BLOB.unpack_from(view)
    if magic != _MAGIC or entry.dtype not in ITEM_BYTES or item != ITEM_BYTES[entry.dtype]:
        raise damaged(f"begins with {magic!r} for elements of {item} bytes, expected {_MAGIC!r} for {entry.dtype}")
    if xxhash.xxh3_64_intdigest(view[_BLOB.size :]) != checksum:
        raise damaged("does not have the checksum that it names: its bytes are damaged")
    records: list[_Record] = []
    at, left = _BLOB.size, _count_of(entry)
    while left > 0:
        if at + _RECORD.size > len(view):
            raise damaged(f"ends after {len(records)} slabs: it is torn")
        form, count, size = _RECORD.unpack_from(view, at)
        at += _RECORD.size
        known = count == size == 0 if form == 0 else count > 0 and form in (*range(1, _MOST_PLANES + 1), _BITS)
        if not known or count > min(left, SLAB) or at + size > len(view):
            raise damaged(f"has a slab of form {form} with {count} changes in {size} bytes: it is damaged")
        records.append(_Record(form, count, view[at : at + size]))
        at, left = at + size, left - SLAB
    if at != len(view) or sum(record.changed for record in records) != changed:
        raise damaged(f"has {len(view) - at} bytes or {changed} changes that are in no slab")
    return _Opened(f"{base:016x}", records)


# -- slabs ---------------------------------------------------------------------------------------------------------------------------------------


def _compare(base: TensorBytes, tensor: TensorBytes) -> _Compared:
    """Slab by slab, so that main memory is read once."""
    old, new, records = xxhash.xxh3_64(), xxhash.xxh3_64(), []
    for start in range(0, _count(tensor), SLAB):
        before, after = _elements(base, start), _elements(tensor, start)
        old.update(before.data)
        new.update(after.data)
        records.append(_encode_slab(before, after))
    return _Compared(str(old.hexdigest()), str(new.hexdigest()), records)


def _encode_slab(old: Elements, new: Elements) -> _Record:
    differs = old != new
    if not (changed := int(np.count_nonzero(differs))):
        return _Record(0, 0, b"")
    if changed * _SPARSE < len(old):
        index = np.flatnonzero(differs)
        difference = new.take(index) - old.take(index)
        gaps = np.diff(index, prepend=0).astype("<u4")
        form = max(1, (int(gaps.max()).bit_length() + 7) // 8)
        parts = _planes(gaps)[:form]
    else:  # finding and copying the changed ones one by one would miss a branch at every third element
        form = _BITS
        at = np.cumsum(differs, dtype=np.int64)
        at -= differs
        difference = np.empty(changed + 1, old.dtype)
        difference[at] = new - old  # an unchanged element writes where the next changed one will: of those that write to one place the last one counts
        difference = difference[:changed]
        parts = [np.packbits(differs, bitorder="little")]
    signed = difference.view(_SIGNED[old.itemsize])
    parts += _planes(((signed << 1) ^ (signed >> (8 * old.itemsize - 1))).view(old.dtype))
    return _Record(form, changed, zstandard.ZstdCompressor(level=_LEVEL).compress(np.concatenate(parts).data))


def _apply_slab(version: Version, entry: TensorEntry, record: _Record, slab: Elements) -> None:
    if not record.form:
        return
    count, item = record.changed, slab.itemsize
    index_bytes = record.form * count if record.form != _BITS else (len(slab) + 7) // 8
    raw = _unpacked(version, entry, record.frame, index_bytes + item * count)
    zigzag = _joined(raw[index_bytes:], count, slab.dtype)
    difference = (zigzag >> 1) ^ np.negative(zigzag & 1)
    if record.form == _BITS:
        differs = np.unpackbits(raw[:index_bytes], count=len(slab), bitorder="little")
        at = np.cumsum(differs, dtype=np.int64)
        if sound := int(at[-1]) == count:
            slab += np.concatenate([difference[:1], difference]).take(at) * differs  # an unchanged element takes that of the one before, times zero
    else:
        gaps = _joined(raw[:index_bytes], count, _UNSIGNED[4])
        at = np.cumsum(gaps, dtype=np.int64)
        if sound := int(at[-1]) < len(slab) and bool(gaps[1:].all()):
            slab[at] = slab.take(at) + difference
    if not sound:
        raise ManifestError(f"version {version}: the delta of tensor {entry.name} names elements that are not there, or one twice: it is damaged")


def _planes(elements: Elements) -> list[NDArray[np.uint8]]:
    """The bytes of elements, one plane a byte, lowest first."""
    by_byte = elements.view("u1").reshape(len(elements), elements.itemsize)
    return [np.ascontiguousarray(by_byte[:, at]) for at in range(elements.itemsize)]


def _joined(planes: NDArray[np.uint8], count: int, dtype: Any) -> Elements:
    """Elements of planes of one byte each, lowest first; planes that are not there are zeros."""
    whole = np.zeros(count, dtype)
    by_byte = whole.view("u1").reshape(count, whole.itemsize)
    for at in range(len(planes) // count):
        by_byte[:, at] = planes[at * count : (at + 1) * count]
    return whole


def _unpacked(version: Version, entry: TensorEntry, frame: memoryview | bytes, expected: int) -> NDArray[np.uint8]:
    """The bytes in a frame, whose size is known before memory is taken for it."""
    try:
        if (size := zstandard.frame_content_size(frame)) != expected:
            raise ManifestError(f"version {version}: the delta of tensor {entry.name} has a slab of {size} bytes, expected {expected}: it is damaged")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, max_output_size=expected, allow_extra_data=False), "u1")
    except zstandard.ZstdError as problem:
        raise ManifestError(f"version {version}: the delta of tensor {entry.name} cannot be unpacked ({problem}): it is damaged") from problem


def _elements(tensor: TensorBytes, start: int) -> Elements:
    """The slab of a tensor that begins at element `start`."""
    dtype = _UNSIGNED[ITEM_BYTES[tensor.dtype]]
    return np.frombuffer(tensor.data, dtype)[start : start + SLAB]


def _writable(into: memoryview, like: TensorBytes, start: int) -> Elements:
    return np.frombuffer(into, _UNSIGNED[ITEM_BYTES[like.dtype]])[start : start + SLAB]


def _count(tensor: TensorBytes) -> int:
    return tensor.nbytes // ITEM_BYTES[tensor.dtype]


def _count_of(entry: TensorEntry) -> int:
    count = 1
    for extent in entry.shape:
        count *= extent
    return count
