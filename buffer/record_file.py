"""The layout of a recorded object: a MessagePack stream of `bin` values, an index frame first, then its digest, then bodies as they are.

    bin(index frame)  bin(digest of the index frame)  bin(body 0)  bin(body 1)  …

The index names and sizes the bodies, so a reader takes the ones it wants and nothing else; bodies are written from where they lie, without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.codec import digest
from protocol.errors import DecodeError
from protocol.frames import open_frame, write_frame
from protocol.objects import ObjectStore

_BIN32 = 0xC6
_MARK_BYTES = 5
_DIGEST_BYTES = 32
_HEAD_BYTES = 256 << 10
"""Read at once: the whole index of most steps."""
_MAX_INDEX_BYTES = 1 << 30
_MAX_BODY_BYTES = (1 << 32) - 1


def record_parts(kind: str, index: Mapping[str, object], bodies: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """What to write, in order. Raises: `ValueError` for a body of 4 GiB and more."""
    frame = write_frame(kind, {**index, "sizes": [_size(body) for body in bodies]})
    parts: list[bytes | memoryview] = [_mark(len(frame)), frame, _mark(_DIGEST_BYTES), digest(frame).encode()]
    for body in bodies:
        parts += (_mark(_size(body)), body)
    return parts


class RecordFile:
    """A recorded object: its index, and its bodies where they are asked for. Every failure to understand it is a `DecodeError` that names the object."""

    def __init__(self, store: ObjectStore, name: str, kind: str, *, whole: bool) -> None:
        """Reads the index, and with `whole` everything. Raises: `FileNotFoundError`, `DecodeError`."""
        self._store, self._name = store, name
        self.place = f"{store.url}/{name}"
        self._data = store.read(name) if whole else store.read(name, 0, _HEAD_BYTES)
        self._whole = whole
        length = self._marked(0)
        end = _MARK_BYTES + length + _MARK_BYTES + _DIGEST_BYTES
        if length > _MAX_INDEX_BYTES:
            raise DecodeError(self.place, f"an index of {length} bytes, over the limit of {_MAX_INDEX_BYTES}")
        if not whole and len(self._data) < end:
            self._data += store.read(name, len(self._data), end)
        frame = memoryview(self._data)[_MARK_BYTES : _MARK_BYTES + length]
        if self._marked(_MARK_BYTES + length) != _DIGEST_BYTES or bytes(self._data[end - _DIGEST_BYTES : end]) != digest(frame).encode():
            raise DecodeError(self.place, "the index does not match its digest: the object is damaged, or was cut short")
        try:
            self.index: dict[str, Any] = open_frame(kind, frame, _MAX_INDEX_BYTES)
        except DecodeError as problem:
            raise DecodeError(self.place, str(problem)) from problem
        sizes = self.index.get("sizes")
        if not (isinstance(sizes, list) and all(type(size) is int and 0 <= size <= _MAX_BODY_BYTES for size in sizes)):
            raise DecodeError(self.place, "sizes: expected one number a body")
        self.sizes: list[int] = sizes
        self._starts = [end]
        for size in sizes:
            self._starts.append(self._starts[-1] + _MARK_BYTES + size)

    def body(self, at: int) -> bytes:
        """Raises: `DecodeError` if the object ends before it."""
        start, stop = self._starts[at], self._starts[at + 1]
        inside = self._whole or stop <= len(self._data)
        found = memoryview(self._data)[start:stop] if inside else memoryview(self._store.read(self._name, start, stop))
        if found[:_MARK_BYTES] != _mark(self.sizes[at]) or len(found) != stop - start:
            raise DecodeError(self.place, f"body {at} of {self.sizes[at]} bytes is damaged, or was cut short")
        return bytes(found[_MARK_BYTES:])

    def _marked(self, start: int) -> int:
        """The length of the `bin` value that begins at `start`."""
        mark = self._data[start : start + _MARK_BYTES]
        if len(mark) != _MARK_BYTES or mark[0] != _BIN32:
            raise DecodeError(self.place, f"no binary value at byte {start}: the object is damaged, or none of ours")
        return int.from_bytes(mark[1:], "big")


def _mark(size: int) -> bytes:
    if size > _MAX_BODY_BYTES:
        raise ValueError(f"a body of {size} bytes cannot be recorded: the limit is {_MAX_BODY_BYTES}")
    return bytes([_BIN32]) + size.to_bytes(4, "big")


def _size(body: bytes | memoryview) -> int:
    return body.nbytes if isinstance(body, memoryview) else len(body)
