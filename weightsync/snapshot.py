"""A consistent copy of the policy's weights as plain bytes: what the trainer hands over, free of any tensor library.

>>> tensors = {"w": TensorBytes(dtype="F32", shape=(2,), data=bytes(8))}
>>> weights_digest(tensors) == weights_digest({"w": TensorBytes(dtype="F32", shape=(2,), data=bytearray(8))})
True
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from protocol.errors import WeightError
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


class HeldWeights(Mapping[str, TensorBytes], ABC):
    """A consistent copy of the weights in memory that is used again: a device's, say. As a mapping it is what `host` gives.

        held ── host() ──► read ── release() ──► given back
          └── a newer copy needs the memory, or release() ──► given back

    Invariant: from `host` to `release` nobody writes the bytes. Any thread may call any method.
    """

    plain: bool = False
    """`digest` is `weights_digest` of the bytes; otherwise it is one that only digests of its own kind compare with."""

    @abstractmethod
    def digest(self) -> str:
        """Equal for equal weights. Blocks; only before `host` or anybody else gives the memory back."""

    @abstractmethod
    def host(self, dtype: str = "") -> Mapping[str, TensorBytes] | None:
        """The bytes in host memory, until `release`; None if the memory was given back, so that a newer copy exists or is being made. Blocks.

        `dtype`: the type that floats are wanted in (see `weightsync.cast`), if the copy is not `plain` and that is cheaper here; the caller casts what is left.
        """

    @abstractmethod
    def release(self) -> None:
        """The bytes are not needed any more, and views of them must not be used. Again, it changes nothing."""

    def __getitem__(self, name: str) -> TensorBytes:
        return self._there()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def _there(self) -> Mapping[str, TensorBytes]:
        found = self.host()
        if found is None:
            raise WeightError("this copy of the weights was given back: call host() before a newer one is made")
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The weights of one version. Nobody changes the bytes any more."""

    version: Version
    tensors: Mapping[str, TensorBytes]
    """By Hugging Face parameter name; tied weights once. `HeldWeights` belong to whom they are handed to."""
    digest: str = ""
    """`weights_digest(tensors)` if the caller has it already; empty: the store computes it."""

    def release(self) -> None:
        """Give back memory that is used again; nothing happens to any other."""
        if isinstance(self.tensors, HeldWeights):
            self.tensors.release()


def digest_of(tensors: Mapping[str, TensorBytes]) -> str:
    """What a step's weights are known by: `weights_digest`, or that of the device where they are."""
    return tensors.digest() if isinstance(tensors, HeldWeights) else weights_digest(tensors)


def weights_digest(tensors: Mapping[str, TensorBytes]) -> str:
    """xxh3-128, hex, over names, dtypes, shapes and bytes, in the order of names: equal digest means equal weights."""
    total = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        total.update(tensor.data)
    return total.hexdigest()
