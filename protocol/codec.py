"""Messages to MessagePack frames and back: `encode(message) -> bytes`, `decode(type, bytes) -> message`.

A frame is one MessagePack map `{"schema": [major, minor], "message": kind, …fields}`. A rollout group is stored ragged: its rollouts are concatenated
and cut by `lengths`, so decoding makes views and copies nothing. A payload may be compressed whole with zstd; a reader tells by the magic bytes.

>>> from protocol.messages import ProducerStatus
>>> decode(ProducerStatus, encode(ProducerStatus(producer_id="p1", groups_put=3))).groups_put
3
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast

import msgpack
import numpy as np
import xxhash
import zstandard

from protocol.arrays import FloatArray, IntArray, MaskArray, pack, unpack, unpack_as
from protocol.errors import DecodeError, SchemaTooNew
from protocol.messages import JsonValue, Rollout, RolloutGroup, Span
from protocol.versions import Version

SCHEMA = (1, 0)
"""(major, minor) this build writes; it reads every frame of its own major or an older one."""
MAX_FRAME_BYTES = 1 << 30
"""A frame larger than 1 GiB, packed or unpacked, is refused before it is parsed."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

M = TypeVar("M")


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 in hex: the digest of payloads and weights."""
    return xxhash.xxh3_128_hexdigest(data)


# -- frames ------------------------------------------------------------------------------------------------------------------------------------


def _frame(kind: str, body: dict[str, object]) -> bytes:
    return cast("bytes", msgpack.packb({"schema": list(SCHEMA), "message": kind, **body}, use_bin_type=True))


def _open(kind: str, data: bytes | memoryview, max_bytes: int) -> dict[str, Any]:
    if len(data) > max_bytes:
        raise DecodeError(kind, f"{len(data)} bytes, over the limit of {max_bytes}")
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as problem:
        raise DecodeError(kind, f"not a complete MessagePack frame ({problem or type(problem).__name__})") from problem
    if not isinstance(body, dict):
        raise DecodeError(kind, f"expected a map, got {type(body).__name__}")
    schema = body.get("schema")
    if not (isinstance(schema, list) and len(schema) == 2 and all(type(n) is int for n in schema)):
        raise DecodeError(f"{kind}.schema", f"got {schema!r:.40}, expected [major, minor]")
    if schema[0] > SCHEMA[0]:
        raise SchemaTooNew(f"{kind} was written with schema {schema[0]}.{schema[1]}, this process reads up to {SCHEMA[0]}.x: upgrade rollstream here")
    if body.get("message") != kind:
        raise DecodeError(f"{kind}.message", f"got {body.get('message')!r:.40}, expected {kind!r}")
    return body


# -- plain messages ----------------------------------------------------------------------------------------------------------------------------


def encode(message: object) -> bytes:
    """One message (not a `RolloutGroup`) as a frame."""
    return _frame(_kind(type(message)), {f.name: _to_wire(getattr(message, f.name)) for f in dataclasses.fields(cast("Any", message))})


def decode(message_type: type[M], data: bytes | memoryview, *, max_bytes: int = MAX_FRAME_BYTES) -> M:
    """The message in `data`, checked field by field.

    Raises: `DecodeError` naming the field; `SchemaTooNew` for a newer major.
    """
    kind = _kind(message_type)
    return _build(message_type, _open(kind, data, max_bytes), kind)


def to_json(message: object) -> dict[str, JsonValue]:
    """The message as plain JSON values, for HTTP and for people; versions as `"2:7"`."""
    return {f.name: cast("JsonValue", _to_wire(getattr(message, f.name))) for f in dataclasses.fields(cast("Any", message))}


def _kind(message_type: type) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in message_type.__name__).lstrip("_")


def _to_wire(value: object) -> object:
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, StrEnum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_wire(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _to_wire(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_to_wire(item) for item in value]
    return value


@cache
def _hints(message_type: type) -> dict[str, Any]:
    return typing.get_type_hints(message_type)


def _build(message_type: type[M], wire: object, path: str) -> M:
    if not isinstance(wire, dict):
        raise DecodeError(path, f"expected a map, got {type(wire).__name__}")
    hints, values = _hints(message_type), {}
    for f in dataclasses.fields(cast("Any", message_type)):
        if f.name in wire:
            values[f.name] = _from_wire(hints[f.name], wire[f.name], f"{path}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{path}.{f.name}", "is missing")
    return message_type(**values)


def _from_wire(hint: Any, wire: object, path: str) -> object:
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if set(parts) >= {dict, list} or any(typing.get_origin(p) in (list, dict) for p in parts):
            return wire
        if wire is None and type(None) in parts:
            return None
        return _from_wire(next(p for p in parts if p is not type(None)), wire, path)
    if hint is Version:
        if not isinstance(wire, str):
            raise DecodeError(path, f"expected a version string, got {type(wire).__name__}")
        try:
            return Version.parse(wire)
        except DecodeError as problem:
            raise DecodeError(path, str(problem)) from problem
    if origin is tuple:
        if not isinstance(wire, list):
            raise DecodeError(path, f"expected a list, got {type(wire).__name__}")
        return tuple(_from_wire(parts[0], item, f"{path}[{i}]") for i, item in enumerate(wire))
    if origin in (Mapping, dict):
        return _mapping(parts, wire, path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(cast("str", wire))
        except ValueError as problem:
            raise DecodeError(path, f"got {wire!r:.40}, expected one of {[str(item) for item in hint]}") from problem
    if dataclasses.is_dataclass(hint):
        return _build(cast("type[object]", hint), wire, path)
    return _scalar(hint, wire, path)


def _mapping(parts: tuple[Any, ...], wire: object, path: str) -> object:
    if not isinstance(wire, dict):
        raise DecodeError(path, f"expected a map, got {type(wire).__name__}")
    key_hint, value_hint = parts
    if key_hint is str and isinstance(value_hint, str | typing.ForwardRef):
        return wire
    return {_from_wire(key_hint, key, f"{path} key"): _from_wire(value_hint, item, f"{path}[{key!r:.40}]") for key, item in wire.items()}


def _scalar(hint: Any, wire: object, path: str) -> object:
    if hint is float and type(wire) is int:
        return float(wire)
    if type(wire) is hint:
        return wire
    raise DecodeError(path, f"expected {getattr(hint, '__name__', hint)}, got {type(wire).__name__}")


# -- rollout groups ----------------------------------------------------------------------------------------------------------------------------


def encode_group(group: RolloutGroup, *, compress: bool = False) -> bytes:
    """The payload of a group, ragged. `compress` trades about 0.15 ms of CPU per 200 kB for about half the bytes."""
    rollouts = group.rollouts
    spans = [(i, s.version.incarnation, s.version.n, s.start, s.end) for i, r in enumerate(rollouts) for s in r.spans]
    frame = _frame(
        "rollout_group",
        {
            "lengths": pack(np.array([len(r.tokens) for r in rollouts], dtype="<i4")),
            "tokens": pack(_concatenate([r.tokens for r in rollouts], "<i4")),
            "mask": pack(_concatenate([r.mask for r in rollouts], "|u1")),
            "logprobs": pack(_concatenate([r.logprobs for r in rollouts], "<f4")),
            "spans": pack(np.array(spans, dtype="<i4").reshape(-1, 5)),
            "rewards": pack(np.array([r.reward for r in rollouts], dtype="<f8")),
            "rollouts": [{"finish_reason": r.finish_reason, "engine_id": r.engine_id, "metadata": dict(r.metadata)} for r in rollouts],
            "extras": {name: pack(array) for name, array in group.extras.items()},
        },
    )
    return zstandard.ZstdCompressor(level=1).compress(frame) if compress else frame


def decode_group(data: bytes | memoryview, *, max_bytes: int = MAX_FRAME_BYTES) -> RolloutGroup:
    """The group in `data`; its arrays are read-only views of the frame.

    Raises: `DecodeError` naming the field, `SchemaTooNew` for a newer major.
    """
    body = _open("rollout_group", _decompress(data, max_bytes), max_bytes)
    lengths = unpack_as(body.get("lengths"), "lengths", "<i4", 1)
    tokens = cast("IntArray", unpack_as(body.get("tokens"), "tokens", "<i4", 1))
    mask = cast("MaskArray", unpack_as(body.get("mask"), "mask", "|u1", 1))
    logprobs = cast("FloatArray", unpack_as(body.get("logprobs"), "logprobs", "<f4", 1))
    rewards = unpack_as(body.get("rewards"), "rewards", "<f8", 1)
    if len(lengths) and int(lengths.min()) < 0:
        raise DecodeError("lengths", "a negative length")
    ends = [int(n) for n in np.cumsum(lengths, dtype=np.int64)]
    total = ends[-1] if ends else 0
    for name, array in (("tokens", tokens), ("mask", mask), ("logprobs", logprobs)):
        if len(array) != total:
            raise DecodeError(name, f"{len(array)} entries, expected {total} by lengths")
    metas = body.get("rollouts")
    if not isinstance(metas, list) or len(metas) != len(ends) or len(rewards) != len(ends):
        raise DecodeError("rollouts", f"expected {len(ends)} rollouts and rewards by lengths")
    spans = _spans(body.get("spans"), [int(n) for n in lengths])
    extras = body.get("extras", {})
    if not isinstance(extras, dict):
        raise DecodeError("extras", f"expected a map, got {type(extras).__name__}")
    rollouts = []
    for i, (meta, end) in enumerate(zip(metas, ends, strict=True)):
        if not isinstance(meta, dict):
            raise DecodeError(f"rollouts[{i}]", f"expected a map, got {type(meta).__name__}")
        cut = slice(end - int(lengths[i]), end)
        rollouts.append(
            Rollout(
                tokens=tokens[cut],
                mask=mask[cut],
                logprobs=logprobs[cut],
                spans=tuple(spans[i]),
                reward=float(rewards[i]),
                finish_reason=cast("str", _scalar(str, meta.get("finish_reason", "stop"), f"rollouts[{i}].finish_reason")),
                engine_id=cast("str", _scalar(str, meta.get("engine_id", ""), f"rollouts[{i}].engine_id")),
                metadata=cast("Mapping[str, JsonValue]", _scalar(dict, meta.get("metadata", {}), f"rollouts[{i}].metadata")),
            )
        )
    return RolloutGroup(rollouts=tuple(rollouts), extras={str(name): unpack(wire, f"extras.{name}") for name, wire in extras.items()})


def _concatenate(arrays: list[Any], dtype: str) -> Any:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


def _spans(wire: object, lengths: list[int]) -> list[list[Span]]:
    table = unpack_as(wire, "spans", "<i4", 2)
    if table.shape[1] != 5:
        raise DecodeError("spans", f"shape {list(table.shape)}, expected [spans, 5]")
    spans: list[list[Span]] = [[] for _ in lengths]
    for row, (rollout, incarnation, n, start, end) in enumerate(table.tolist()):
        if not 0 <= rollout < len(lengths) or incarnation < 0 or n < 0:
            raise DecodeError(f"spans[{row}]", f"names rollout {rollout}, version {incarnation}:{n}")
        floor = spans[rollout][-1].end if spans[rollout] else 0
        if not floor <= start < end <= lengths[rollout]:
            raise DecodeError(f"spans[{row}]", f"[{start}, {end}) is not inside [{floor}, {lengths[rollout]})")
        spans[rollout].append(Span(version=Version(incarnation, n), start=start, end=end))
    return spans


def _decompress(data: bytes | memoryview, max_bytes: int) -> bytes | memoryview:
    if bytes(data[:4]) != _ZSTD_MAGIC:
        return data
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise DecodeError("rollout_group", f"decompresses to {size} bytes, over the limit of {max_bytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes)
    except zstandard.ZstdError as problem:
        raise DecodeError("rollout_group", f"damaged zstd frame ({problem})") from problem
