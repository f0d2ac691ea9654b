"""Frames: one MessagePack map `{"schema": [major, minor], "message": kind, …fields}`, opened with every size and type checked before it is believed."""

from __future__ import annotations

import reprlib
from typing import Any, cast

import msgpack
import xxhash
import zstandard

from protocol.errors import DecodeError, SchemaTooNew

SCHEMA = (1, 4)
"""(major, minor) this build writes; it reads every frame of its own major or an older one."""
MAX_FRAME_BYTES = 1 << 30
"""A frame larger than 1 GiB, packed or unpacked, is refused before it is parsed."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 in hex: the digest of payloads and weights."""
    return xxhash.xxh3_128_hexdigest(data)


def brief(value: object, limit: int = 60) -> str:
    """What was seen, short enough for a message whatever its size or nesting."""
    return reprlib.repr(value)[:limit]


def write_frame(kind: str, body: dict[str, object]) -> bytes:
    """The frame of `body`."""
    return cast("bytes", msgpack.packb({"schema": list(SCHEMA), "message": kind, **body}, use_bin_type=True))


def open_frame(kind: str, data: bytes | memoryview, max_bytes: int) -> dict[str, Any]:
    """The map in `data`.

    Raises: `DecodeError` unless it is one whole frame of this kind; `SchemaTooNew` for a newer major.
    """
    if len(data) > max_bytes:
        raise DecodeError(kind, f"{len(data)} bytes, over the limit of {max_bytes}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as problem:
        raise DecodeError(kind, f"not a complete MessagePack frame ({str(problem)[:80] or type(problem).__name__})") from problem
    if not isinstance(body, dict):
        raise DecodeError(kind, f"expected a map, got {type(body).__name__}")
    schema = body.get("schema")
    if not (isinstance(schema, list) and len(schema) == 2 and all(type(n) is int for n in schema) and schema[0] >= 1):
        raise DecodeError(f"{kind}.schema", f"got {brief(schema)}, expected [major, minor]")
    if schema[0] > SCHEMA[0]:
        raise SchemaTooNew(f"{kind} was written with schema {schema[0]}.{schema[1]}, this process reads up to {SCHEMA[0]}.x: upgrade rollstream here")
    if body.get("message") != kind:
        raise DecodeError(f"{kind}.message", f"got {brief(body.get('message'))}, expected {kind!r}")
    return body


def compress_frame(frame: bytes) -> bytes:
    """The frame whole in zstd; a reader tells by the magic bytes, which no MessagePack map begins with."""
    return zstandard.ZstdCompressor(level=1).compress(frame)


def decompress_frame(kind: str, data: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
    """The frame in `data`, compressed or not. Raises: `DecodeError`, before memory is taken for a size over `max_bytes`."""
    if bytes(data[: len(_ZSTD_MAGIC)]) != _ZSTD_MAGIC:
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            seen = "an unknown size" if size < 0 else f"{size} bytes"
            raise DecodeError(kind, f"decompresses to {seen}, over the limit of {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as problem:
        raise DecodeError(kind, f"damaged zstd frame ({problem})") from problem
