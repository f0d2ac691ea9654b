from __future__ import annotations

import doctest
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from buffer.audit import AuditSpill
from buffer.redis_ledger import RedisLedger
from deploy import tally
from deploy.follower import AuditFollower
from deploy.tally import Tally
from protocol.audit import emit
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import Event, JsonValue

pytestmark = pytest.mark.redis


def trained(number: int, step: int, incarnation: int, staleness: dict[str, int]) -> Event:
    stats: dict[str, JsonValue] = {"tokens": sum(staleness.values()), "staleness": dict(staleness), "reward": 0.5}
    return Event(id=f"{number}-0", op="trained", fields={"step": step, "incarnation": incarnation, "stats": stats})


def test_doctests():
    assert doctest.testmod(tally).failed == 0


def test_a_resume_takes_back_the_steps_it_trains_again():
    found = Tally()
    for step in (1, 2, 3):
        found.take(trained(step, step, 1, {"0": 10, "1": step}))
    found.take(Event(id="4-0", op="attached", fields={"incarnation": 2, "parent": 1, "fork_step": 1}))
    assert found.totals.steps == 1
    found.take(trained(5, 2, 2, {"0": 10, "1": 2}))
    assert found.totals.steps == 2
    assert found.totals.tokens == 23
    assert dict(found.totals.staleness) == {0: 20, 1: 3}
    assert [point.incarnation for point in found.steps] == [1, 2]


async def test_nothing_is_missed_or_counted_twice_while_the_stream_moves_into_the_file(redis: Client, keys: Keys, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    follower, spill = AuditFollower(redis, keys, path), AuditSpill(redis, keys, path)
    written = 0
    for round_ in range(6):
        for _ in range(700 if round_ == 0 else 3):
            await emit(redis, keys, "put", {"seq": written, "bytes": 1, "tokens": {"1:0": 2}})
            written += 1
        if round_ % 2:
            await spill.flush()
        await follower.advance()
        assert follower.tally.totals.put == written
    assert follower.tally.totals.put_tokens == 2 * written


async def test_an_entry_that_is_no_event_is_passed_over(redis: Client, keys: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"id": "1-0", "op": "put"}\nnot JSON\n{"id": "2-0", "op": "put", "d": {"seq": 0, "bytes": 1, "tokens": {"1:0": 2}}}\n')
    follower = AuditFollower(redis, keys, path)
    for foreign in ({"x": "y"}, {"op": "put", "d": "no JSON"}, {"op": "put", "d": "[]"}, {"op": "put", "d": "{}"}):
        await redis.xadd(keys.audit, foreign)
        await emit(redis, keys, "put", {"seq": 0, "bytes": 1, "tokens": {"1:0": 2}})
    for _ in range(2):
        await follower.advance()
        assert follower.tally.totals.put_tokens == 10
    assert caplog.text.count("passed over") == 6


async def test_a_follower_that_comes_late_reads_the_file_first(redis: Client, keys: Keys, tmp_path: Path, small_run: Callable[[], Awaitable[RedisLedger]]):
    await small_run()
    path = tmp_path / "audit.jsonl"
    await AuditSpill(redis, keys, path).flush()
    assert await redis.xlen(keys.audit) == 0
    follower = AuditFollower(redis, keys, path)
    await follower.advance()
    assert follower.tally.totals.put == 3
    assert follower.complete


async def test_a_follower_without_the_file_says_that_it_has_not_seen_all(redis: Client, keys: Keys, tmp_path: Path):
    await emit(redis, keys, "checkpoint", {"step": 4})
    follower = AuditFollower(redis, keys)
    await follower.advance()
    assert not follower.complete


async def test_a_torn_last_line_is_read_once_it_is_whole(redis: Client, keys: Keys, tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    line = b'{"id":"5-0","op":"put","d":{"seq":0,"bytes":7,"tokens":{}}}\n'
    path.write_bytes(line[:20])
    follower = AuditFollower(redis, keys, path)
    await follower.advance()
    assert follower.tally.totals.put == 0
    path.write_bytes(line)
    await follower.advance()
    assert follower.tally.totals.put_bytes == 7
