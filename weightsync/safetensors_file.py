"""safetensors files, written and read without copying a tensor and without the library.

The format is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the bytes back to back. The library's own
writing interface takes raw pointers and has changed between releases; the format has not.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson

from protocol.errors import ManifestError
from weightsync.snapshot import ITEM_BYTES, TensorBytes

_ALIGN = 8
_MAX_HEADER = 100_000_000
"""The limit of the format's reference implementation."""


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes], *, durable: bool) -> None:
    """Write `tensors`, widest elements first so that every one is aligned; with `durable`, return after fsync."""
    order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = orjson.dumps(header)
    text += b" " * (-len(text) % _ALIGN)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(tensors[name].data)
        if durable:
            file.flush()
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
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            places = _places(path, mapped)
            tensors = {name: TensorBytes(dtype=dtype, shape=shape, data=memoryview(mapped)[low:high]) for name, (dtype, shape, low, high) in places.items()}
            try:
                yield tensors
            finally:
                for tensor in tensors.values():
                    if isinstance(tensor.data, memoryview):
                        tensor.data.release()


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


def _places(path: Path, mapped: mmap.mmap) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Dtype, shape, first byte and end of every tensor, each checked to lie in the file and to have the right size."""
    length = int.from_bytes(mapped[:8], "little")
    start = 8 + length
    if length > _MAX_HEADER or start > len(mapped):
        raise ManifestError(f"{path}: header of {length} bytes in a file of {len(mapped)}: the file is torn")
    try:
        header = orjson.loads(mapped[8:start])
    except ValueError as problem:
        raise ManifestError(f"{path}: header is not JSON ({problem}): the file is torn") from problem
    if not isinstance(header, dict):
        raise ManifestError(f"{path}: header is not a JSON object")
    places: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            (low, high), dtype, shape = entry["data_offsets"], entry["dtype"], tuple(entry["shape"])
            expected = math.prod(shape) * ITEM_BYTES[dtype]
            fits = 0 <= low <= high <= len(mapped) - start
        except (KeyError, TypeError, ValueError) as problem:
            raise ManifestError(f"{path}: tensor {name} has an unusable header entry ({problem!r})") from problem
        if not fits:
            raise ManifestError(f"{path}: tensor {name} lies at bytes {low} to {high} of {len(mapped) - start}: the file is torn")
        if high - low != expected:
            raise ManifestError(f"{path}: tensor {name} has {high - low} bytes, expected {expected} for {dtype} {list(shape)}")
        places[name] = (dtype, shape, start + low, start + high)
    return places
