from __future__ import annotations

from pathlib import Path

import pytest

from buffer.audit import AuditSpill, read_audit
from protocol.audit import emit
from protocol.connection import Client
from protocol.errors import DecodeError
from protocol.keys import Keys

pytestmark = pytest.mark.redis


async def _numbers(path: Path, client: Client | None = None, keys: Keys | None = None) -> list[object]:
    return [one.fields["n"] for one in await read_audit(path, client, keys)]


async def test_the_stream_moves_into_the_file_and_leaves_nothing_behind(redis: Client, keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for n in range(3):
        await emit(redis, keys, "eval", {"n": n})
    async with AuditSpill(redis, keys, path) as spill:
        assert await spill.flush() == 3
        assert await redis.xlen(keys.audit) == 0
        await emit(redis, keys, "eval", {"n": 3})
    assert await redis.xlen(keys.audit) == 0  # what came last is spilled on the way out
    assert await _numbers(path) == [0, 1, 2, 3]


async def test_a_reader_sees_file_and_tail_each_event_once(redis: Client, keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    assert await read_audit(path) == []
    for n in range(2):
        await emit(redis, keys, "eval", {"n": n})
    entries = await redis.xrange(keys.audit)
    async with AuditSpill(redis, keys, path) as spill:
        await spill.flush()
    for entry_id, entry in entries:  # a crash between fsync and trim leaves entries in both
        await redis.delete(keys.audit)
        await redis.xadd(keys.audit, entry, id=entry_id)
    await emit(redis, keys, "eval", {"n": 2})
    assert await _numbers(path, redis, keys) == [0, 1, 2]


async def test_a_spill_goes_on_where_the_file_ends(redis: Client, keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    await emit(redis, keys, "eval", {"n": 0})
    entries = await redis.xrange(keys.audit)
    async with AuditSpill(redis, keys, path):
        pass
    with path.open("ab") as file:
        file.write(b'{"id": "9')  # torn by a crash
    await redis.delete(keys.audit)
    await redis.xadd(keys.audit, entries[0][1], id=entries[0][0])  # and not trimmed either
    await emit(redis, keys, "eval", {"n": 1})
    async with AuditSpill(redis, keys, path):
        pass
    assert await _numbers(path) == [0, 1]
    assert path.read_bytes().count(b"\n") == 2


async def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"{}\n")
    with pytest.raises(DecodeError, match=r"audit\.jsonl:1"):
        await read_audit(path)


async def test_entries_of_somebody_else_are_passed_over_and_trimmed(redis: Client, keys: Keys, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    await emit(redis, keys, "e", {"n": 1})
    for foreign in ({"x": "y"}, {"op": "e", "d": "no JSON"}, {"op": "e", "d": "[]"}):
        await redis.xadd(keys.audit, foreign)
    await emit(redis, keys, "e", {"n": 2})
    assert [one.fields["n"] for one in await read_audit(path, redis, keys)] == [1, 2]
    async with AuditSpill(redis, keys, path) as spill:
        await spill.flush()
    assert await redis.xlen(keys.audit) == 0
    assert [one.fields["n"] for one in await read_audit(path)] == [1, 2]
