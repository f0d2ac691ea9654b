"""How the tensors of a version are cut into buckets that travel as one piece: a pure function of the manifest, the same on every side.

Within a bucket tensors lie back to back, widest elements first, so that each begins at a multiple of its element's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from protocol.errors import ManifestError
from protocol.messages import Manifest
from weightsync.snapshot import ITEM_BYTES

TORCH_NAMES = MappingProxyType({
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
})  # fmt: skip
"""torch's name of a type by the spelling of safetensors; what torch has no collective for is not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that travel as one run of bytes, in this order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """torch's names."""
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """First byte of each tensor in the bucket."""
    nbytes: int
    digest: str
    """xxh3-64, hex, over names, dtypes and shapes: both sides compare it before a byte moves."""


def plan(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at least `bucket_bytes`, each without its last tensor smaller than that; only the last bucket may be smaller.

    What is smaller costs more time in calls than in bytes (rule W6). Empty tensors travel too, with others: an engine counts names.

    Raises: `ManifestError` naming a tensor whose type cannot be sent.
    """
    buckets: list[Bucket] = []
    names: list[str] = []
    ends: list[int] = [0]
    entries = {entry.name: entry for entry in manifest.tensors}
    order = sorted(manifest.tensors, key=lambda entry: (-ITEM_BYTES.get(entry.dtype, 0), entry.name))

    def close() -> None:
        if names:
            chosen = [entries[name] for name in names]
            dtypes, shapes = tuple(TORCH_NAMES[one.dtype] for one in chosen), tuple(one.shape for one in chosen)
            text = "\0".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in zip(names, dtypes, shapes, strict=True))
            digest = xxhash.xxh3_64_hexdigest(text.encode())
            buckets.append(Bucket(names=tuple(names), dtypes=dtypes, shapes=shapes, offsets=tuple(ends[:-1]), nbytes=ends[-1], digest=digest))
            names.clear()
            ends[:] = [0]

    for entry in order:
        if entry.dtype not in TORCH_NAMES:
            raise ManifestError(f"version {manifest.version}: tensor {entry.name} has dtype {entry.dtype}, which cannot be sent; use weights.transport = store")
        size = ITEM_BYTES[entry.dtype] * math.prod(entry.shape)
        if size and ends[-1] >= bucket_bytes:
            close()
        names.append(entry.name)
        ends.append(ends[-1] + size)
    close()
    return tuple(buckets)
