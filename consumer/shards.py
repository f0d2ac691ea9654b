"""Tensors of a checkpoint in files: each rank writes what it has, one index says where everything lies, and any layout reads what it needs.

    rank r ── its parts ──► shards/<group>-0000r-of-0000n.safetensors, durable ──► Told ──┐
    one rank ─────────────► model/model.safetensors, <group>.safetensors        ──► Told ─┴─ merged ──► index.json

`index.json` has the size and a checksum of every file, and of every tensor its type, its shape and its parts: file, first byte, start and shape. Groups of
tensors have names; `weights` and `optimizer` are always there. The checkpoint's digest is that of the index, and so of every byte that the index names.
"""

from __future__ import annotations

import base64
import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import orjson
import xxhash

from consumer.backend import TrainingState
from consumer.parts import Place, Shape, cut, join, overlap, row_range
from protocol.durable import make_folder, sync_folder
from protocol.errors import ConfigError, DecodeError, RollstreamError
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import JsonValue
from weightsync import lora
from weightsync.safetensors_file import header_of, open_tensors
from weightsync.snapshot import ITEM_BYTES, TensorBytes

INDEX = "index.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
MODEL_FILE = "model/model.safetensors"
"""The weights where one rank has them all: `model/` loads as any Hugging Face folder."""
ADAPTER_FILE = f"model/{lora.ADAPTER_FILE}"
"""Where they are an adapter's, and one rank has it all: `model/` loads as any peft folder."""
_SHARDS = "shards"
_READ = 16 << 20
Told: TypeAlias = Mapping[str, JsonValue]
"""What a rank says of what it wrote: `files` and `groups` as in the index, and `rng`, its random states in base64."""


def not_written(folder: Path, problem: OSError) -> RollstreamError:
    return RollstreamError(f"the checkpoint cannot be written to {folder} ({problem}); free space there or set checkpoint.dir, then --resume")


class ShardsDamaged(ConfigError):
    """Files of a checkpoint are not as its index says, or not there any more. Going back to an older one is a decision for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    file: str
    at: int
    """Its first byte in the file."""
    start: Shape
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor, whole: where its parts lie."""

    dtype: str
    shape: Shape
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What `index.json` says."""

    files: Mapping[str, tuple[int, str]]
    """Bytes and checksum, by path in the checkpoint."""
    groups: Mapping[str, Mapping[str, Entry]]

    def files_of(self, group: str) -> list[str]:
        return sorted({part.file for entry in self.groups[group].values() for part in entry.parts})


# -- writing -------------------------------------------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, state: TrainingState) -> Told:
    """Write what `state` has of every group into the checkpoint `folder`; on the disk on return, with the folders' names. Blocks.

    Raises: `OSError`; `ConfigError` where the folder, which rank 0 has made, is not to be seen.
    """
    rank, ranks = state.part
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not to be seen by rank {rank}: set checkpoint.dir to a folder that the hosts of all ranks share")
    files: dict[str, JsonValue] = {}
    tensors: dict[str, JsonValue] = {}
    for group, every in state.groups.items():
        places = state.places.get(group, {})
        held = {name: tensor for name, tensor in every.items() if tensor.nbytes or name not in places}
        entries: dict[str, JsonValue] = {}
        if held:
            file = _file_of(group, rank, ranks, weights=MODEL_FILE if state.base is None else ADAPTER_FILE)
            make_folder((folder / file).parent)
            files[file], offsets = _write(folder / file, held)
            for name, tensor in held.items():
                place = places.get(name) or Place(start=(0,) * len(tensor.shape), whole=tensor.shape)
                part: list[JsonValue] = [file, offsets[name], list(place.start), list(tensor.shape)]
                entries[name] = {"dtype": tensor.dtype, "shape": list(place.whole), "parts": [part]}
        tensors[group] = entries
    for made in {(folder / file).parent for file in files} | {folder}:
        sync_folder(made)
    failpoint(Failpoint.CHECKPOINT_PART_WRITTEN)
    return {"files": files, "groups": tensors, "rng": {name: base64.b64encode(value).decode() for name, value in state.rng.items()}}


def told_of(name: str, content: bytes) -> Told:
    """Of a file of rank 0 that has no tensors."""
    return {"files": {name: {"bytes": len(content), "digest": xxhash.xxh3_128_hexdigest(content)}}, "groups": {}, "rng": {}}


def _file_of(group: str, rank: int, ranks: int, *, weights: str) -> str:
    if ranks > 1:
        return f"{_SHARDS}/{group}-{rank + 1:05}-of-{ranks:05}.safetensors"
    return weights if group == WEIGHTS else f"{group}.safetensors"


def _write(path: Path, tensors: Mapping[str, TensorBytes]) -> tuple[JsonValue, dict[str, int]]:
    """Size and checksum, and where each tensor begins."""
    header, spans = header_of(tensors)
    total, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        pieces: list[bytes | memoryview] = [header, *(memoryview(tensors[name].data).cast("B") for name in spans if tensors[name].nbytes)]
        for piece in pieces:
            file.write(piece)
            total.update(piece)
            size += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "digest": total.hexdigest()}, {name: low for name, (low, _) in spans.items()}


def merged(told: Sequence[Told]) -> bytes:
    """`index.json` of what all ranks told. Raises: `RollstreamError` where their parts do not make up whole tensors."""
    files: dict[str, JsonValue] = {}
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for one in told:
        files |= cast("dict[str, JsonValue]", one["files"])
        for group, entries in cast("Mapping[str, Mapping[str, dict[str, Any]]]", one["groups"]).items():
            of_group = groups.setdefault(group, {})
            for name, entry in entries.items():
                known = of_group.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "parts": []})
                if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                    raise RollstreamError(
                        f"checkpoint: ranks do not agree on {group} {name}: {known['dtype']} {known['shape']}, {entry['dtype']} {entry['shape']}"
                    )
                known["parts"] += entry["parts"]
    for group, of_group in groups.items():
        for name, entry in of_group.items():
            if (there := sum(math.prod(part[3]) for part in entry["parts"])) != math.prod(entry["shape"]):
                raise RollstreamError(f"checkpoint: the ranks have {there} elements of {group} {name}, which has {math.prod(entry['shape'])}")
    return orjson.dumps({"files": files, "groups": groups}, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def digest_of_index(index: bytes) -> str:
    """xxh3-128, hex: what the checkpoint is registered and known by."""
    return xxhash.xxh3_128_hexdigest(index)


# -- reading -------------------------------------------------------------------------------------------------------------------------------------------


def read_index(content: bytes) -> Index:
    """Raises: `DecodeError` for what is no index."""
    try:
        raw = orjson.loads(content)
        files = {str(name): (int(one["bytes"]), str(one["digest"])) for name, one in raw["files"].items()}
        groups = {group: {name: _entry(entry) for name, entry in entries.items()} for group, entries in raw["groups"].items()}
        stray = [part.file for entries in groups.values() for entry in entries.values() for part in entry.parts if part.file not in files]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
        raise DecodeError(INDEX, in_words(problem)) from problem
    if stray or any(name.startswith("/") or ".." in name.split("/") for name in files):
        raise DecodeError(INDEX, "it names files that are not its own")
    return Index(files=files, groups=groups)


def in_words(problem: Exception) -> str:
    """What is wrong with a file of a checkpoint, for a person."""
    if isinstance(problem, orjson.JSONDecodeError):
        return f"it is no JSON any more ({problem}): it is torn, or was changed"
    if isinstance(problem, KeyError):
        return f"it has no {problem} where there must be one: it is damaged, or not of a checkpoint"
    if isinstance(problem, OSError):
        return f"{problem.filename or 'a file'}: {problem.strerror or problem}"
    if isinstance(problem, RollstreamError):
        return str(problem)
    return f"a value is not of the kind that was written there ({problem}): it is damaged"


def _entry(raw: Mapping[str, Any]) -> Entry:
    parts = tuple(Part(file=str(file), at=int(at), start=tuple(map(int, start)), shape=tuple(map(int, shape))) for file, at, start, shape in raw["parts"])
    entry = Entry(dtype=str(raw["dtype"]), shape=tuple(map(int, raw["shape"])), parts=parts)
    axes = {len(entry.shape), *(len(one) for part in parts for one in (part.start, part.shape))}
    if entry.dtype not in ITEM_BYTES or len(axes) > 1:
        raise ValueError(f"a tensor of {entry.dtype}, shape {entry.shape} and parts with other axes")
    return entry


def index_of_files(folder: Path, files: Mapping[str, str]) -> Index:
    """Of whole tensors in `files` (path by group), without checksums. Raises: `ManifestError`, `ShardsDamaged`, `OSError`."""
    groups: dict[str, dict[str, Entry]] = {}
    for group, file in files.items():
        with open_tensors(folder / file) as tensors:
            header, spans = header_of(tensors)
            with (folder / file).open("rb") as raw:
                if raw.read(len(header)) != header:
                    raise ShardsDamaged(f"{file} was not written by this program")
            groups[group] = {
                name: Entry(
                    dtype=one.dtype,
                    shape=one.shape,
                    parts=(Part(file=file, at=spans[name][0], start=(0,) * len(one.shape), shape=one.shape),),
                )
                for name, one in tensors.items()
            }
    return Index(files={}, groups=groups)


def verify(folder: Path, index: Index, files: Iterable[str]) -> None:
    """Return once these files are known to be as the index says. Raises: `ShardsDamaged` naming the file; `OSError`."""
    for name in files:
        size, digest = index.files[name]
        check_size(folder, name, size)
        total = xxhash.xxh3_128()
        with (folder / name).open("rb", buffering=0) as file:
            while piece := file.read(_READ):
                total.update(piece)
        if total.hexdigest() != digest:
            raise ShardsDamaged(f"{name} has checksum {total.hexdigest()}, expected {digest}: it is damaged")


def check_size(folder: Path, name: str, size: int) -> None:
    """Raises: `ShardsDamaged`; `OSError`."""
    if (found := (folder / name).stat().st_size) != size:
        raise ShardsDamaged(f"{name} has {found} bytes, expected {size}: it is torn")


class LazyTensors(Mapping[str, TensorBytes]):
    """Tensors whose shape and type are known before one is read, or made."""

    @abstractmethod
    def shape(self, name: str) -> Shape: ...

    @abstractmethod
    def dtype(self, name: str) -> str: ...


class SavedTensors(LazyTensors):
    """One group of a checkpoint on disk. Nothing is read before it is asked for, and of a part no more than the rows it lies in."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self.folder, self._entries = folder, entries

    def shape(self, name: str) -> Shape:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def part(self, name: str, start: Shape, shape: Shape) -> TensorBytes:
        """The box of a tensor that begins at `start`. Raises: `ShardsDamaged` where the files do not have it."""
        entry = self._entries[name]
        try:
            return join(entry.dtype, start, shape, self._read(entry, start, shape))
        except ValueError as problem:
            raise ShardsDamaged(f"{name}: {problem}") from problem

    def _read(self, entry: Entry, start: Shape, shape: Shape) -> Iterator[tuple[Shape, TensorBytes]]:
        item = ITEM_BYTES[entry.dtype]
        for part in entry.parts:
            there = overlap(start, shape, part.start, part.shape)
            if there is None:
                continue
            at, size = there
            inner = tuple(a - b for a, b in zip(at, part.start, strict=True))
            low, high = row_range(inner, size, part.shape)
            rows = part.shape and (size[0], *part.shape[1:])
            try:
                with (self.folder / part.file).open("rb", buffering=0) as file:
                    data = _read_exactly(file.fileno(), (high - low) * item, part.at + low * item)
            except OSError as problem:
                raise ShardsDamaged(f"{self.folder / part.file} cannot be read any more ({problem})") from problem
            yield (at[:1] + part.start[1:]), TensorBytes(dtype=entry.dtype, shape=rows, data=data)

    def __getitem__(self, name: str) -> TensorBytes:
        entry = self._entries[name]
        return self.part(name, (0,) * len(entry.shape), entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read_exactly(descriptor: int, size: int, at: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = os.preadv(descriptor, [view[done:]], at + done)
        if not count:
            raise ShardsDamaged(f"a file ends {size - done} bytes too soon")
        done += count
    return data


def shape_of(tensors: Mapping[str, TensorBytes], name: str) -> Shape:
    """Of a tensor, in memory or on disk, without reading it."""
    return tensors.shape(name) if isinstance(tensors, LazyTensors) else tensors[name].shape


def dtype_of(tensors: Mapping[str, TensorBytes], name: str) -> str:
    """As `shape_of`."""
    return tensors.dtype(name) if isinstance(tensors, LazyTensors) else tensors[name].dtype


def part_of(tensors: Mapping[str, TensorBytes], name: str, start: Shape, shape: Shape) -> TensorBytes:
    """A box of a tensor, in memory or on disk. Raises: `ValueError`, `ShardsDamaged` for one that is not there."""
    return tensors.part(name, start, shape) if isinstance(tensors, SavedTensors) else cut(tensors[name], start, shape)
