"""Arrays on the wire: raw little-endian buffers with dtype and shape, decoded as read-only views that copy nothing.

On the wire: `{"dtype": "<i4", "shape": [8, 2048], "data": bytes}`.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from protocol.errors import DecodeError
from protocol.frames import brief

Array: TypeAlias = npt.NDArray[np.generic]
IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
MaskArray: TypeAlias = npt.NDArray[np.uint8]

DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "<f2", "|u1", "|i1", "<i2", "<u2"})
_KINDS = {dtype: np.dtype(dtype) for dtype in DTYPES}
_INTEGERS, _BINARY = {int}, (bytes, memoryview)
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40


def pack(array: Array) -> dict[str, object]:
    """The wire form of an array; the data is a view of the array's own memory where that is possible.

    Raises: `ValueError` for a dtype outside `DTYPES` (a bug in the caller).
    """
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    dtype = contiguous.dtype.str
    if dtype not in DTYPES:
        raise ValueError(f"array of dtype {dtype} has no wire form; use one of {sorted(DTYPES)}")
    return {"dtype": dtype, "shape": list(array.shape), "data": contiguous.reshape(-1).view(np.uint8).data}


def unpack(wire: object, field: str) -> Array:
    """A read-only view of the bytes in `wire`. Raises `DecodeError` naming `field`."""
    if not isinstance(wire, dict):
        raise DecodeError(field, f"expected an array, got {type(wire).__name__}")
    dtype, shape, data = wire.get("dtype"), wire.get("shape"), wire.get("data")
    kind = _KINDS.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise DecodeError(f"{field}.dtype", f"got {brief(dtype)}, expected one of {sorted(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not {*map(type, shape)} <= _INTEGERS or min(shape, default=0) < 0:
        raise DecodeError(f"{field}.shape", f"got {brief(shape)}, expected at most {MAX_DIMENSIONS} sizes of 0 or more")
    if not isinstance(data, _BINARY):
        raise DecodeError(f"{field}.data", f"expected bytes, got {type(data).__name__}")
    size, expected = memoryview(data).nbytes, math.prod(shape) * kind.itemsize
    if size != expected or not size:
        if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:  # also where another size is 0: numpy cannot hold such a shape
            raise DecodeError(f"{field}.shape", f"{brief(shape)} is over the limit of {MAX_ELEMENTS} elements")
        if size != expected:
            raise DecodeError(f"{field}.data", f"{size} bytes, expected {expected} for {dtype} {brief(shape)}")
    array = np.frombuffer(data, kind)
    return array if len(shape) == 1 else array.reshape(shape)


def unpack_as(wire: object, field: str, dtype: str, dimensions: int) -> Array:
    """As `unpack`, and refuses another dtype or number of dimensions."""
    array = unpack(wire, field)
    if array.dtype != _KINDS[dtype] or array.ndim != dimensions:
        raise DecodeError(field, f"got {array.dtype.str} of {array.ndim} dimensions, expected {dtype} of {dimensions}")
    return array
