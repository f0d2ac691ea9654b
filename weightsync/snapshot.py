"""A consistent copy of the policy's weights as plain bytes: what the trainer hands over, free of any tensor library.

>>> tensors = {"w": TensorBytes(dtype="F32", shape=(2,), data=bytes(8))}
>>> weights_digest(tensors) == weights_digest({"w": TensorBytes(dtype="F32", shape=(2,), data=bytearray(8))})
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from protocol.versions import Version

ITEM_BYTES = MappingProxyType(
    {
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "BF16": 2,
        "F16": 2,
        "I16": 2,
        "U16": 2,
        "I8": 1,
        "U8": 1,
        "BOOL": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
    }
)
"""Bytes of one element by the spelling of safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorBytes:
    """One tensor, row-major little-endian.

    Raises: `ValueError` when dtype, shape and bytes do not agree (a bug in the caller).
    """

    dtype: str
    """safetensors spelling: F32, BF16, …"""
    shape: tuple[int, ...]
    data: memoryview | bytes | bytearray

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: expected one of {sorted(ITEM_BYTES)}")
        expected = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.nbytes != expected:
            raise ValueError(f"{self.nbytes} bytes, expected {expected} for {self.dtype} {list(self.shape)}")

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The weights of one version. Nobody changes the bytes any more."""

    version: Version
    tensors: Mapping[str, TensorBytes]
    """By Hugging Face parameter name; tied weights once."""
    digest: str = ""
    """`weights_digest(tensors)` if the caller has it already; empty: the store computes it."""


def weights_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """xxh3-128, hex, over names, dtypes, shapes and bytes, in the order of names: equal digest means equal weights."""
    total = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        total.update(tensor.data)
    return total.hexdigest()
