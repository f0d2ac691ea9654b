"""Puts that go to Redis together are judged one by one, and each as if it had come alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import orjson
import pytest

from buffer.contract import LedgerStatus, PutResult, Slot
from protocol.errors import DecodeError, PayloadTooLarge, RollstreamError, SlotLost
from protocol.messages import GroupHeader
from protocol.versions import Version

from .conftest import Harness, PureHarness, RedisHarness, header_for, settings

pytestmark = pytest.mark.redis


def _put(slot: Slot, versions: dict[Version, int], size: int = 50) -> tuple[GroupHeader, bytes]:
    payload = slot.token.encode().ljust(size, b".")
    return header_for(slot, versions, payload), payload


def _mixed(slots: Sequence[Slot]) -> list[tuple[GroupHeader, bytes]]:
    """A batch in which everything comes that may: good groups of several versions, a group twice, refusals of each kind."""
    first, second, third, large, unknown, other = slots
    return [
        _put(first, {Version(1, 0): 10, Version(1, 1): 5}),
        _put(second, {Version(1, 1): 7}, size=99),
        _put(first, {Version(1, 0): 10, Version(1, 1): 5}),
        _put(large, {Version(1, 0): 1}, size=101),
        _put(unknown, {Version(7, 0): 1}),
        _put(dataclasses.replace(other, attempt=9), {Version(1, 0): 1}),
        _put(third, {}),
    ]


async def _slots(harness: Harness) -> tuple[Slot, ...]:
    """Six slots of a run at step 1."""
    incarnation = await harness.start(settings(groups_per_step=4))
    await harness.produce(4, Version(1, 0))
    await harness.train(incarnation, 1)
    await harness.serve(Version(1, 1))
    return await harness.reserve(6)


def _counts(status: LedgerStatus) -> tuple[object, ...]:
    return status.generating, status.ready, status.bytes_used, dict(status.ready_versions), dict(status.releases)


async def _answer(harness: Harness, header: GroupHeader, payload: bytes) -> object:
    """The result, or the kind of the refusal."""
    try:
        return await harness.ledger.put(header, payload)
    except RollstreamError as refusal:
        return type(refusal)


async def test_puts_of_one_round_trip_are_answered_as_the_pure_ledger_answers_them_in_turn(on_redis: RedisHarness) -> None:
    pure = PureHarness()
    slots = await _slots(on_redis)
    before = (await on_redis.ledger.status()).sequence
    together = await asyncio.gather(*(_answer(on_redis, *one) for one in _mixed(slots)))
    after = await on_redis.ledger.status()
    assert after.sequence == before + 1
    alone = [await _answer(pure, *one) for one in _mixed(await _slots(pure))]
    assert together == alone
    assert together == [PutResult.STORED, PutResult.STORED, PutResult.DUPLICATE, PayloadTooLarge, DecodeError, SlotLost, PutResult.STORED]
    assert _counts(after) == _counts(await pure.ledger.status())
    assert [header.seq for header in await on_redis.ledger.ready(9)] == [header.seq for header in await pure.ledger.ready(9)]


async def test_each_put_of_a_round_trip_is_told_once(on_redis: RedisHarness) -> None:
    slots = await _slots(on_redis)
    await asyncio.gather(*(_answer(on_redis, *one) for one in _mixed(slots)))
    events = [orjson.loads(fields[b"d"]) for _, fields in await on_redis.client.xrange(on_redis.keys.audit) if fields[b"op"] == b"put"]
    assert [(one["seq"], one["tokens"], one["trained"], one["lag"]) for one in events[4:]] == [
        (4, {"1:0": 10, "1:1": 5}, 1, {"1": 10, "0": 5}),
        (5, {"1:1": 7}, 1, {"0": 7}),
        (6, {}, 1, {}),
    ]
