from __future__ import annotations

from typing import cast

import pytest

from protocol.audit import emit, event
from protocol.connection import Client
from protocol.errors import DecodeError
from protocol.keys import Keys


async def test_events_read_back_in_order_with_the_server_s_clock(redis: Client, keys: Keys) -> None:
    await emit(redis, keys, "published", {"version": "1:3", "bytes": 10})
    await emit(redis, keys, "applied", {"engine_id": "e", "from": None})
    entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", await redis.xrange(keys.audit))
    events = [event(entry_id, entry) for entry_id, entry in entries]
    assert [(e.op, e.fields) for e in events] == [("published", {"version": "1:3", "bytes": 10}), ("applied", {"engine_id": "e", "from": None})]
    seconds, _ = await redis.time()
    assert abs(seconds - events[0].at) < 120


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({b"op": b"put"}, "has no field b'd'"),
        ({b"d": b"{}"}, "has no field b'op'"),
        ({b"op": b"put", b"d": b"{"}, "audit entry b'1-1'"),
        ({b"op": b"put", b"d": b"[1]"}, "expected a JSON object, got list"),
        ({b"op": b"\xff", b"d": b"{}"}, "audit entry b'1-1'"),
    ],
)
def test_a_damaged_entry_is_named(entry: dict[bytes, bytes], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        event(b"1-1", entry)
