"""Data-parallel ranks of one trainer: each with a connection of its own, leasing the same chunk and reading its own share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from buffer.client import Agree, TrainerBuffer
from buffer.contract import ChunkRecord
from buffer.redis_ledger import RedisLedger
from buffer.shares import Share
from protocol.codec import encode_group
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Seq, Span
from protocol.versions import Version
from protocol.wakeups import wakeups

from .conftest import RedisHarness, header_for, settings

RANKS = 3


class Rank:
    """One rank: its own ledger object, and every payload it reads."""

    def __init__(self, rank: int, client: Client, keys: Keys, waker: object, incarnation: int) -> None:
        self.share = Share(rank, RANKS)
        self.ledger = RedisLedger(client, keys)
        self.read: list[Seq] = []
        inner = self.ledger.payloads

        async def payloads(headers: list[GroupHeader]) -> tuple[bytes, ...]:
            self.read += [header.seq for header in headers]
            return await inner(headers)

        self.ledger.payloads = payloads  # type: ignore[method-assign, assignment]
        self.buffer = TrainerBuffer(self.ledger, waker, incarnation)  # type: ignore[arg-type]

    async def step(self, incarnation: int, step: int, chunk: int, agree: Agree) -> tuple[ChunkRecord, list[Seq]]:
        await self.ledger.open_step(incarnation, step)
        record, groups = await self.buffer.fetch_share(await self.buffer.lease(step, chunk), self.share, agree)
        return record, [header.seq for header, _ in groups]


class AllReduce:
    """What a process group does for ranks of several processes."""

    def __init__(self) -> None:
        self._barrier = asyncio.Barrier(RANKS)
        self._values: list[int] = []
        self.rounds = 0

    async def __call__(self, value: int) -> tuple[int, int]:
        self._values.append(value)
        async with self._barrier as place:
            answer = min(self._values), max(self._values)
            if place == 0:
                self.rounds += 1
        async with self._barrier:
            self._values = []
        return answer


@pytest_asyncio.fixture
async def harness(redis: Client, keys: Keys) -> RedisHarness:
    return RedisHarness(redis, keys)


@pytest_asyncio.fixture
async def ranks(harness: RedisHarness, redis: Client, keys: Keys) -> AsyncIterator[tuple[int, list[Rank], list[GroupHeader]]]:
    incarnation = await harness.start(settings(groups_per_step=9, chunk_groups=9))
    made = []
    for slot in await harness.reserve(12, max_bytes=4000):
        length = 5 + 11 * int(slot.seq)
        rollout = Rollout(
            tokens=_ints(length), mask=_mask(length), logprobs=_floats(length), spans=(Span(version=Version(incarnation, 0), start=2, end=length),), reward=1.0
        )
        payload = encode_group(RolloutGroup(rollouts=(rollout, rollout)))
        header = header_for(slot, {Version(incarnation, 0): 2 * (length - 2)}, payload)
        await harness.ledger.put(header, payload)
        made.append(header)
    async with wakeups(redis, keys) as waker:
        yield incarnation, [Rank(rank, redis, keys, waker, incarnation) for rank in range(RANKS)], made


def _ints(length: int):  # noqa: ANN202 - an array
    import numpy as np

    return np.arange(length, dtype=np.int32)


def _mask(length: int):  # noqa: ANN202
    import numpy as np

    mask = np.ones(length, dtype=np.uint8)
    mask[:2] = 0
    return mask


def _floats(length: int):  # noqa: ANN202
    import numpy as np

    return np.zeros(length, dtype=np.float32)


async def test_every_rank_reads_its_own_share_and_no_other(ranks: tuple[int, list[Rank], list[GroupHeader]]) -> None:
    incarnation, members, _ = ranks
    agree = AllReduce()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rank.step(incarnation, 1, 0, agree)) for rank in members]
    chunks, shares = zip(*(task.result() for task in tasks), strict=True)
    assert len({chunk.revision for chunk in chunks}) == 1
    assert [header.seq for header in chunks[0].headers] == list(range(9))
    assert sorted(seq for share in shares for seq in share) == list(range(9))
    for rank, share in zip(members, shares, strict=True):
        assert sorted(rank.read) == share, "a rank read what is another's"
    assert agree.rounds == 1


async def test_ranks_agree_on_the_chunk_when_one_of_them_loses_a_payload(ranks: tuple[int, list[Rank], list[GroupHeader]], harness: RedisHarness) -> None:
    incarnation, members, made = ranks
    await harness.lose_payload(made[4])
    agree = AllReduce()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rank.step(incarnation, 1, 0, agree)) for rank in members]
    chunks, shares = zip(*(task.result() for task in tasks), strict=True)
    assert {chunk.revision for chunk in chunks} == {1}
    assert {tuple(header.seq for header in chunk.headers) for chunk in chunks} == {(0, 1, 2, 3, 5, 6, 7, 8, 9)}
    assert sorted(seq for share in shares for seq in share) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert agree.rounds >= 2
    await members[0].ledger.trained(incarnation, 1, "d", {})
    assert await harness.violations() == []
