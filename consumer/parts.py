"""Parts of tensors: boxes that ranks hold, cut out of wholes and put together again as bytes, whatever the layouts of who wrote and who reads.

>>> whole = TensorBytes(dtype="U8", shape=(3, 2), data=bytes(range(6)))
>>> list(cut(whole, (1, 0), (2, 1)).data)
[2, 4]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from weightsync.snapshot import ITEM_BYTES, TensorBytes

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part lies: its first index in each axis of the tensor it is of, and the shape of that tensor."""

    start: Shape
    whole: Shape


def cut(tensor: TensorBytes, start: Shape, shape: Shape) -> TensorBytes:
    """A copy of the box of `tensor` that begins at `start`. Raises: `ValueError` for one that does not lie in it."""
    _check(start, shape, tensor.shape)
    found = np.ascontiguousarray(_array(tensor)[_slices(start, shape)])
    return TensorBytes(dtype=tensor.dtype, shape=shape, data=_bytes(found))


def join(dtype: str, start: Shape, shape: Shape, parts: Iterable[tuple[Shape, TensorBytes]]) -> TensorBytes:
    """The box at `start` of a tensor, from parts and where each begins. Raises: `ValueError` where they do not fill it, or overlap in it."""
    target: NDArray[Any] = np.empty(shape, _item(dtype))
    filled = 0
    for begin, part in parts:
        there = overlap(start, shape, begin, part.shape)
        if there is None:
            continue
        at, size = there
        source = _array(part)[_slices(_minus(at, begin), size)]
        target[_slices(_minus(at, start), size)] = source
        filled += source.size
    if filled != target.size:
        raise ValueError(f"its parts have {filled} elements of the {target.size} at {list(start)}, {list(shape)}")
    return TensorBytes(dtype=dtype, shape=shape, data=_bytes(target))


def overlap(start: Shape, shape: Shape, other_start: Shape, other_shape: Shape) -> tuple[Shape, Shape] | None:
    """Where two boxes of a tensor meet, and how large that is; None: nowhere.

    >>> overlap((0, 0), (2, 4), (1, 2), (9, 9))
    ((1, 2), (1, 2))
    """
    low = tuple(map(max, start, other_start))
    high = tuple(map(min, _plus(start, shape), _plus(other_start, other_shape)))
    size = _minus(high, low)
    return None if any(length <= 0 for length in size) else (low, size)


def row_range(start: Shape, shape: Shape, whole: Shape) -> tuple[int, int]:
    """Elements of a row-major tensor from the first row of a box to its last: those between which all of it lies. A scalar is one row."""
    if not whole:
        return 0, 1
    row = int(np.prod(whole[1:], dtype=np.int64))
    return start[0] * row, (start[0] + shape[0]) * row


def _array(tensor: TensorBytes) -> NDArray[Any]:
    return np.frombuffer(tensor.data, _item(tensor.dtype)).reshape(tensor.shape)


def _item(dtype: str) -> np.dtype[Any]:
    """Elements are moved, never looked at: numpy has no bfloat16."""
    return np.dtype(f"V{ITEM_BYTES[dtype]}")


def _bytes(array: NDArray[Any]) -> memoryview | bytes:
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _check(start: Shape, shape: Shape, whole: Shape) -> None:
    inside = len(start) == len(shape) == len(whole) and all(a >= 0 and n >= 0 and a + n <= most for a, n, most in zip(start, shape, whole, strict=True))
    if not inside:
        raise ValueError(f"the box at {list(start)} of shape {list(shape)} does not lie in {list(whole)}")


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))


def _plus(one: Shape, other: Shape) -> Shape:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _minus(one: Shape, other: Shape) -> Shape:
    return tuple(a - b for a, b in zip(one, other, strict=True))
