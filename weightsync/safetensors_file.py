"""safetensors files, written and read without copying a tensor and without the library.

The format is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the bytes back to back. The library's own
writing interface takes raw pointers and has changed between releases; the format has not.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from protocol.errors import ManifestError
from weightsync.snapshot import ITEM_BYTES, TensorBytes

_ALIGN = 8
_MAX_HEADER = 100_000_000
"""The limit of the format's reference implementation."""


class Sized(Protocol):
    """What a file must know of a tensor before it has its bytes."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


def order_of(tensors: Mapping[str, Sized]) -> list[str]:
    """Names in the order of a file: widest elements first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))


def cut(tensors: Mapping[str, Sized], bucket_bytes: int) -> dict[str, list[str]]:
    """Files of a model folder, each with its tensors: of at most `bucket_bytes`, or of one tensor that is larger. One file is `model.safetensors`."""
    buckets: list[list[str]] = [[]]
    room = bucket_bytes
    for name in order_of(tensors):
        if tensors[name].nbytes > room and buckets[-1]:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= tensors[name].nbytes
    if len(buckets) == 1:
        return {"model.safetensors": buckets[0]}
    return {f"model-{index:05}-of-{len(buckets):05}.safetensors": names for index, names in enumerate(buckets, 1)}


def index_of(files: Mapping[str, Sequence[str]], total_bytes: int) -> bytes:
    """`model.safetensors.index.json`, which tells a reader of a model in several files where each tensor lies."""
    places = {name: file for file, names in files.items() for name in names}
    return orjson.dumps({"metadata": {"total_size": total_bytes}, "weight_map": places}, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)


def header_of(tensors: Mapping[str, Sized]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The first bytes of a file, and where each tensor begins and ends in it."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans, offset = {}, 0
    for name in order_of(tensors):
        tensor = tensors[name]
        spans[name] = (offset, offset + tensor.nbytes)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": list(spans[name])}
        offset += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGN)
    start = _ALIGN + len(text)
    return len(text).to_bytes(_ALIGN, "little") + text, {name: (start + low, start + high) for name, (low, high) in spans.items()}


def parts_of(tensors: Mapping[str, TensorBytes]) -> list[bytes | memoryview]:
    """A file, piece by piece."""
    header, places = header_of(tensors)
    return [header, *(memoryview(tensors[name].data).cast("B") for name in places if tensors[name].nbytes)]


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes], *, durable: bool) -> None:
    """Write `tensors`; with `durable`, return after fsync."""
    with path.open("xb") as file:
        for part in parts_of(tensors):
            file.write(part)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def new_file(path: Path, tensors: Mapping[str, Sized], *, durable: bool) -> Iterator[Mapping[str, memoryview]]:
    """A new file, to be filled through views of its tensors; they must not be used after the context. With `durable`, it is on the disk after it."""
    header, places = header_of(tensors)
    size = max((high for _, high in places.values()), default=len(header))
    with path.open("x+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # no space is an error here, not a fault at some write through the map
        file.write(header)
        file.flush()
        with _mapped(file.fileno(), mmap.ACCESS_WRITE) as mapped, _views(mapped, places) as views:
            yield views
        if durable:
            os.fsync(file.fileno())


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Mapping[str, TensorBytes]]:
    """The tensors of a file as views of a memory map; they must not be used after the context.

    Raises: `ManifestError` naming the tensor that does not lie in the file; `FileNotFoundError`.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _ALIGN:
            raise ManifestError(f"{path}: {size} bytes, too short for a safetensors file")
        with _mapped(file.fileno(), mmap.ACCESS_READ) as mapped:
            places = _places(str(path), memoryview(mapped))
            with _views(mapped, {name: (low, high) for name, (_, _, low, high) in places.items()}) as views:
                yield {name: TensorBytes(dtype=dtype, shape=shape, data=views[name]) for name, (dtype, shape, _, _) in places.items()}


def read_tensors(where: str, content: bytes) -> Mapping[str, TensorBytes]:
    """The tensors of a file that is in memory, as views of it. Raises: `ManifestError` naming the tensor that does not lie in it."""
    if len(content) < _ALIGN:
        raise ManifestError(f"{where}: {len(content)} bytes, too short for a safetensors file")
    view = memoryview(content)
    return {name: TensorBytes(dtype=dtype, shape=shape, data=view[low:high]) for name, (dtype, shape, low, high) in _places(where, view).items()}


def size_of(where: str, begin: bytes) -> int:
    """Bytes of the whole file that begins with `begin`. Raises: `ManifestError` if its header does not end there."""
    length = int.from_bytes(begin[:_ALIGN], "little")
    header = _header(where, memoryview(begin), _ALIGN + length)
    try:
        return _ALIGN + length + max((int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0)
    except (KeyError, IndexError, TypeError, ValueError) as problem:
        raise ManifestError(f"{where}: unusable header ({problem!r})") from problem


@contextlib.contextmanager
def _mapped(descriptor: int, access: int) -> Iterator[mmap.mmap]:
    mapped = mmap.mmap(descriptor, 0, access=access)
    try:
        yield mapped
    finally:
        with contextlib.suppress(BufferError):  # an error under way may hold views in its frames: the map goes with them
            mapped.close()


@contextlib.contextmanager
def _views(mapped: mmap.mmap, places: Mapping[str, tuple[int, int]]) -> Iterator[Mapping[str, memoryview]]:
    whole = memoryview(mapped)
    views = {name: whole[low:high] for name, (low, high) in places.items()}
    try:
        yield views
    finally:
        for view in (*views.values(), whole):
            with contextlib.suppress(BufferError):
                view.release()


@contextlib.contextmanager
def open_model(folder: Path) -> Iterator[Mapping[str, TensorBytes]]:
    """The weights of a Hugging Face model folder, one file or many, as views of memory maps; they must not be used after the context.

    Raises: `ManifestError` naming the file or tensor.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ManifestError(f"{folder}: has no *.safetensors file; save the weights there with save_pretrained")
    with contextlib.ExitStack() as opened:
        tensors: dict[str, TensorBytes] = {}
        for file in files:
            part = opened.enter_context(open_tensors(file))
            if twice := sorted(tensors.keys() & part.keys()):
                raise ManifestError(f"{file}: tensor {twice[0]} is in another file of {folder} too; keep one set of weights there")
            tensors.update(part)
        yield tensors


def _header(where: str, view: memoryview, start: int) -> dict[str, Any]:
    if start - _ALIGN > _MAX_HEADER or start > len(view):
        raise ManifestError(f"{where}: header of {start - _ALIGN} bytes in a file of {len(view)}: the file is torn")
    try:
        header = orjson.loads(view[_ALIGN:start])
    except ValueError as problem:
        raise ManifestError(f"{where}: header is not JSON ({problem}): the file is torn") from problem
    if not isinstance(header, dict):
        raise ManifestError(f"{where}: header is not a JSON object")
    return header


def _places(where: str, view: memoryview) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Dtype, shape, first byte and end of every tensor, each checked to lie in the file and to have the right size."""
    start = _ALIGN + int.from_bytes(view[:_ALIGN], "little")
    header = _header(where, view, start)
    places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            (low, high), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
            expected = math.prod(shape) * ITEM_BYTES[dtype]
            whole = all(type(number) is int and number >= 0 for number in (low, high, *shape))
            fits = whole and low <= high <= len(view) - start
        except (KeyError, TypeError, ValueError) as problem:
            raise ManifestError(f"{where}: tensor {name} has an unusable header entry ({problem!r})") from problem
        if not fits:
            raise ManifestError(f"{where}: tensor {name} lies at bytes {low} to {high} of {len(view) - start}: the file is torn")
        if high - low != expected:
            raise ManifestError(f"{where}: tensor {name} has {high - low} bytes, expected {expected} for {dtype} {list(shape)}")
        places[name] = (dtype, shape, start + low, start + high)
    return places
