"""The payload of a group as this build writes it, read where it lies: its arrays are views, where a general MessagePack reader makes copies."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import numpy as np

from protocol.arrays import Array

_INTEGER = rb"([\x00-\x7f]|\xcc.|\xcd..|\xce....)"
_BYTES = rb"(\xc4.|\xc5..|\xc6....)"
_ARRAYS = (("lengths", "<i4", 1), ("tokens", "<i4", 1), ("mask", "|u1", 1), ("logprobs", "<f4", 1), ("spans", "<i4", 5), ("rewards", "<f8", 1))
"""Name, dtype and columns, in the order in which `encode_group` writes them."""
_HEAD = re.compile(rb"([\x88-\x8f])\xa6schema\x92\x01[\x00-\x7f]\xa7message\xadrollout_group", re.DOTALL)
_REST_BYTES = 1 << 16
"""What stands behind the arrays is read by the general reader, from a copy. Large extras would be copied twice, which costs more than is saved."""


def _opening(name: str, dtype: str, columns: int) -> re.Pattern[bytes]:
    """Everything of an array's entry that stands before its bytes."""
    key, kind = bytes([0xA0 | len(name)]) + name.encode(), re.escape(dtype.encode())
    shape = rb"\x91" + _INTEGER if columns == 1 else rb"\x92" + _INTEGER + bytes([columns])
    return re.compile(key + rb"\x83\xa5dtype\xa3" + kind + rb"\xa5shape" + shape + rb"\xa4data" + _BYTES, re.DOTALL)


_OPENINGS = [(name, np.dtype(dtype), columns, _opening(name, dtype, columns).match) for name, dtype, columns in _ARRAYS]
_NAMES = frozenset({"schema", "message", *(name for name, _, _ in _ARRAYS)})


def read_in_place(frame: bytes | memoryview) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """The arrays of a frame, read-only views of it at whatever address they have there, and its other entries. None for a frame that is written in another
    way, or has an array of nothing, or is damaged: the general reader tells which.

    Invariant: every byte is accounted for, one token after the other, so the general reader would give the same.
    """
    head = _HEAD.match(frame)
    if head is None:
        return None
    arrays: dict[str, Array] = {}
    at, total = head.end(), len(frame)
    for name, dtype, columns, match in _OPENINGS:
        found = match(frame, at)
        if found is None:
            return None
        rows, told = found.groups()
        items, size, at = columns * int.from_bytes(rows[1:] or rows, "big"), int.from_bytes(told[1:], "big"), found.end()
        if not 0 < items * dtype.itemsize == size <= total - at:
            return None
        array = np.frombuffer(frame, dtype, items, at)
        arrays[name] = array if columns == 1 else array.reshape(-1, columns)
        at += size
    if total - at > _REST_BYTES:
        return None
    try:
        rest = msgpack.unpackb(bytes([head[1][0] - len(_NAMES)]) + frame[at:], raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        return None
    return (arrays, rest) if _NAMES.isdisjoint(rest) else None
