"""The audit stream: one line for every state change of a run, in the order Redis saw them.

Ledger scripts append inside their own transaction; everything else uses `emit`. An entry has two fields, `op` and `d` (JSON).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import orjson

from protocol.connection import Client, Script
from protocol.errors import DecodeError
from protocol.keys import Keys
from protocol.messages import Event, JsonValue

_EMIT = Script("protocol", "lua/emit.lua", flags="allow-oom")


async def emit(client: Client, keys: Keys, op: str, fields: Mapping[str, JsonValue]) -> None:
    """Append one event that no ledger script writes (engines, weights, evaluation). Raises: `RedisUnavailable`."""
    await _EMIT(client, keys=[keys.audit], args=[op, orjson.dumps(dict(fields))])


def event(entry_id: bytes, entry: Mapping[bytes, bytes]) -> Event:
    """One stream entry as an `Event`. Raises: `DecodeError`."""
    try:
        fields, op = orjson.loads(entry[b"d"]), entry[b"op"].decode()
    except KeyError as problem:
        raise DecodeError(f"audit entry {entry_id!r}", f"has no field {problem}") from problem
    except ValueError as problem:
        raise DecodeError(f"audit entry {entry_id!r}", str(problem)) from problem
    if not isinstance(fields, dict):
        raise DecodeError(f"audit entry {entry_id!r}", f"expected a JSON object, got {type(fields).__name__}")
    return Event(id=entry_id.decode(), op=op, fields=cast("Mapping[str, JsonValue]", fields))
