"""Messages to MessagePack frames and back: `encode(message) -> bytes`, `decode(type, bytes) -> message`; groups by `encode_group` and `decode_group`.

A frame is one MessagePack map `{"schema": [major, minor], "message": kind, …fields}` (`protocol.frames`); fields are read by the types of
`protocol.messages` (`protocol.fields`); a rollout group is stored ragged (`protocol.groups`).

>>> from protocol.messages import ProducerStatus
>>> decode(ProducerStatus, encode(ProducerStatus(producer_id="p1", groups_put=3))).groups_put
3
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

from protocol.fields import reader, to_wire
from protocol.frames import MAX_FRAME_BYTES, SCHEMA, digest, open_frame, write_frame
from protocol.groups import decode_group, decode_groups, encode_group
from protocol.messages import JsonValue

__all__ = ["MAX_FRAME_BYTES", "SCHEMA", "decode", "decode_group", "decode_groups", "digest", "encode", "encode_group", "to_json"]

M = TypeVar("M")


def encode(message: object) -> bytes:
    """One message (not a `RolloutGroup`) as a frame."""
    return write_frame(_kind(type(message).__name__), _plain(message))


def decode(message_type: type[M], data: bytes | memoryview, *, max_bytes: int = MAX_FRAME_BYTES) -> M:
    """The message in `data`, checked field by field.

    Raises: `DecodeError` naming the field; `SchemaTooNew` for a newer major.
    """
    kind = _kind(message_type.__name__)
    return cast("M", reader(cast("Any", message_type))(open_frame(kind, data, max_bytes), kind))


def to_json(message: object) -> dict[str, JsonValue]:
    """The message as plain JSON values, for HTTP and for people; versions as `"2:7"`."""
    return cast("dict[str, JsonValue]", _plain(message))


@cache
def _kind(type_name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in type_name).lstrip("_")


def _plain(message: object) -> dict[str, object]:
    return cast("dict[str, object]", to_wire(message))
