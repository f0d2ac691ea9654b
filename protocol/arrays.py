"""Arrays on the wire: raw little-endian buffers with dtype and shape, decoded as read-only views that copy nothing.

On the wire: `{"dtype": "<i4", "shape": [8, 2048], "data": bytes}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
_SIZES = {dtype: np.dtype(dtype).itemsize for dtype in DTYPES}
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
    if not isinstance(wire, Mapping):
        raise DecodeError(field, f"expected an array, got {type(wire).__name__}")
    dtype, shape, data = wire.get("dtype"), wire.get("shape"), wire.get("data")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DecodeError(f"{field}.dtype", f"got {brief(dtype)}, expected one of {sorted(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise DecodeError(f"{field}.shape", f"got {brief(shape)}, expected at most {MAX_DIMENSIONS} sizes of 0 or more")
    if not isinstance(data, bytes | memoryview):
        raise DecodeError(f"{field}.data", f"expected bytes, got {type(data).__name__}")
    if math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:  # also where another size is 0: numpy cannot hold such a shape
        raise DecodeError(f"{field}.shape", f"{brief(shape)} is over the limit of {MAX_ELEMENTS} elements")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size != expected:
        raise DecodeError(f"{field}.data", f"{size} bytes, expected {expected} for {dtype} {shape}")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def unpack_as(wire: object, field: str, dtype: str, dimensions: int) -> Array:
    """As `unpack`, and refuses another dtype or number of dimensions."""
    if dimensions == 1 and type(wire) is dict and wire.get("dtype") == dtype:  # the usual case, in one look
        data, shape = wire.get("data"), wire.get("shape")
        if type(data) is bytes and type(shape) is list and shape == [len(data) // _SIZES[dtype]] and len(data) % _SIZES[dtype] == 0:
            return np.frombuffer(data, dtype=dtype)
    array = unpack(wire, field)
    if array.dtype.str != dtype or array.ndim != dimensions:
        raise DecodeError(field, f"got {array.dtype.str} of {array.ndim} dimensions, expected {dtype} of {dimensions}")
    return array
