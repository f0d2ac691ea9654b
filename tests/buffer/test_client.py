from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from buffer.client import ProducerBuffer, TrainerBuffer
from buffer.contract import Granted, Slot
from protocol.codec import decode_groups, digest, encode_group
from protocol.errors import DecodeError, RedisUnavailable, RunEnded, SlotLost
from protocol.messages import Edge, GroupHeader, Reason, Rollout, RolloutGroup, Span
from protocol.versions import Version
from protocol.wakeups import Wakeups, wakeups

from .conftest import RedisHarness, seqs_of, settings

pytestmark = pytest.mark.redis
BIG = 4096


@pytest_asyncio.fixture
async def waker(on_redis: RedisHarness) -> AsyncIterator[Wakeups]:
    async with wakeups(on_redis.client, on_redis.keys) as found:
        yield found


def group_for(slot: Slot) -> tuple[GroupHeader, bytes, RolloutGroup]:
    tokens = np.arange(6, dtype=np.int32) + slot.seq
    mask = np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8)
    rollout = Rollout(
        tokens=tokens, mask=mask, logprobs=np.zeros(6, dtype=np.float32), spans=(Span(version=Version(1, 0), start=2, end=6),), reward=float(slot.seq)
    )
    group = RolloutGroup(rollouts=(rollout, rollout))
    payload = encode_group(group)
    header = GroupHeader(
        seq=slot.seq,
        attempt=slot.attempt,
        token=slot.token,
        prompt_id="row",
        producer_id="p",
        group_size=2,
        lengths=(6, 6),
        trainable={Version(1, 0): 8},
        oldest=Version(1, 0),
        rewards=(1.0, 1.0),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )
    return header, payload, group


async def test_reserve_waits_for_the_edge_and_wakes_when_it_opens(on_redis: RedisHarness, waker: Wakeups) -> None:
    incarnation = await on_redis.start()
    buffer = ProducerBuffer(on_redis.ledger, waker, "p1")
    for slot in await buffer.reserve(8, BIG):
        header, payload, _ = group_for(slot)
        await buffer.put(header, payload)
    assert buffer.held == {}
    edges: list[Edge] = []
    blocked = asyncio.Event()

    def on_blocked(edge: Edge) -> None:
        edges.append(edge)
        blocked.set()

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(buffer.reserve(3, BIG, on_blocked))
        await blocked.wait()
        await on_redis.train(incarnation, 1)
        slots = await waiting
    assert [slot.seq for slot in slots] == [8, 9, 10]
    assert set(edges) == {Edge.NO_SLOT}
    assert set(buffer.held) == {8, 9, 10}
    await buffer.give_back()
    assert buffer.held == {}
    assert (await on_redis.ledger.status()).releases == {Reason.GIVEN_BACK: 3}


async def test_a_waiting_producer_hears_that_the_run_ended(on_redis: RedisHarness, waker: Wakeups) -> None:
    incarnation = await on_redis.start()
    buffer = ProducerBuffer(on_redis.ledger, waker, "p1")
    await buffer.reserve(8, BIG)
    blocked = asyncio.Event()

    async def reserve() -> None:
        with pytest.raises(RunEnded):
            await buffer.reserve(1, BIG, lambda _edge: blocked.set())

    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(reserve())
        await blocked.wait()
        await on_redis.ledger.drain(incarnation, "end")


async def test_a_grant_whose_reply_was_lost_is_asked_for_again(on_redis: RedisHarness, waker: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    await on_redis.start()
    buffer = ProducerBuffer(on_redis.ledger, waker, "p1")
    reserve = on_redis.ledger.reserve
    granted: list[Granted] = []

    async def lost(owner: str, request_id: str, n: int, *, max_bytes: int) -> Granted:
        answer = await reserve(owner, request_id, n, max_bytes=max_bytes)
        assert isinstance(answer, Granted)
        granted.append(answer)
        if len(granted) == 1:
            raise RedisUnavailable("the reply is lost")
        return answer

    monkeypatch.setattr(on_redis.ledger, "reserve", lost)
    with pytest.raises(RedisUnavailable):
        await buffer.reserve(2, BIG)
    assert await buffer.reserve(2, BIG) == granted[0].slots
    assert (await on_redis.ledger.status()).generating == 2
    assert [slot.seq for slot in await buffer.reserve(2, BIG)] == [2, 3]


async def test_lost_slots_are_told_and_forgotten(on_redis: RedisHarness, waker: Wakeups) -> None:
    await on_redis.start()
    buffer = ProducerBuffer(on_redis.ledger, waker, "p1")
    first, second, third = await buffer.reserve(3, BIG)
    await buffer.renew()
    await on_redis.advance(61)
    await on_redis.ledger.status()
    header, payload, _ = group_for(first)
    with pytest.raises(SlotLost):
        await buffer.put(header, payload)
    await buffer.release(second, Reason.FAILED)
    told: list[int] = []
    await buffer.renew(told.append)
    assert told == [third.seq]
    assert buffer.held == {}
    with pytest.raises(SlotLost):
        await buffer.bind(third, "row")


async def test_the_trainer_fetches_the_groups_of_a_chunk_in_order(on_redis: RedisHarness, waker: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.FETCH_BYTES", 500)
    incarnation = await on_redis.start(settings(chunk_groups=4))
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    await on_redis.ledger.open_step(incarnation, 1)
    blocked = asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(trainer.lease(1, 0, lambda _edge: blocked.set()))
        await blocked.wait()
        for slot in reversed(await producer.reserve(4, BIG)):
            header, payload, _ = group_for(slot)
            await producer.put(header, payload)
        chunk = await waiting
    trained, fetched = await trainer.fetch(chunk)
    assert trained == chunk
    assert [header.seq for header, _ in fetched] == seqs_of(chunk) == [0, 1, 2, 3]
    for header, group in fetched:
        assert group.rollouts[1].tokens.tolist() == list(range(header.seq, header.seq + 6))


async def test_a_lost_payload_is_replaced_while_fetching(on_redis: RedisHarness, waker: Wakeups) -> None:
    incarnation = await on_redis.start(settings(chunk_groups=4))
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    headers = []
    for slot in await producer.reserve(5, BIG):
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
        headers.append(header)
    await on_redis.ledger.open_step(incarnation, 1)
    chunk = await trainer.lease(1, 0)
    await on_redis.lose_payload(headers[1])
    key = on_redis.keys.payload(headers[3].seq, headers[3].attempt, headers[3].token)
    await on_redis.client.set(key, b"damaged", keepttl=True)
    blocked = asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(trainer.fetch(chunk, lambda _edge: blocked.set()))
        await blocked.wait()
        for slot in await producer.reserve(1, BIG):
            header, payload, _ = group_for(slot)
            await producer.put(header, payload)
        trained, fetched = await fetching
    assert trained.headers == tuple(header for header, _ in fetched)
    assert trained.revision > chunk.revision
    assert [(header.seq, header.attempt) for header, _ in fetched] == [(0, 1), (2, 1), (4, 1), (1, 2)]
    await on_redis.ledger.trained(incarnation, 1, "w1", {})


async def test_a_payload_lost_from_a_whole_step_of_another_trainer_is_replaced_under_a_record_of_our_own(on_redis: RedisHarness, waker: Wakeups) -> None:
    first = await on_redis.start()
    producer = ProducerBuffer(on_redis.ledger, waker, "p1")
    headers = []
    for slot in await producer.reserve(4, BIG):
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
        headers.append(header)
    await on_redis.lease(first, 1)  # the whole step is journalled, and its trainer dies
    second = (await on_redis.ledger.attach(None, trainer_id="next")).incarnation
    await on_redis.serve(Version(second, 0))
    trainer = TrainerBuffer(on_redis.ledger, waker, second)
    assert (await on_redis.ledger.open_step(second, 1)).incarnation == first
    leased = await trainer.lease(1, 0)
    await on_redis.lose_payload(headers[1])
    blocked = asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        fetching = tasks.create_task(trainer.fetch(leased, lambda _edge: blocked.set()))
        await blocked.wait()
        (slot,) = await producer.reserve(1, BIG)
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
    chunk, groups = fetching.result()
    assert [(header.seq, header.attempt) for header, _ in groups] == [(0, 1), (1, 2)]
    assert (chunk.headers, chunk.record.incarnation) == (tuple(header for header, _ in groups), second)
    assert chunk.revision > leased.revision
    other, _ = await trainer.fetch(await trainer.lease(1, 1))
    assert other.record.incarnation == first
    await on_redis.ledger.trained(second, 1, "w1", {})


async def test_a_slow_batch_holds_up_no_other_and_two_are_read_at_once(on_redis: RedisHarness, waker: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.FETCH_BYTES", 1)
    incarnation = await on_redis.start(settings(chunk_groups=4))
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    for slot in await producer.reserve(4, BIG):
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
    await on_redis.ledger.open_step(incarnation, 1)
    chunk = await trainer.lease(1, 0)
    read, under_way, most, last_asked = on_redis.ledger.payloads, 0, 0, asyncio.Event()

    async def payloads(headers: list[GroupHeader]) -> tuple[bytes, ...]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if headers[0].seq == 0:
            await last_asked.wait()
        elif headers[0].seq == 3:
            last_asked.set()
        found = await read(headers)
        under_way -= 1
        return found

    monkeypatch.setattr(on_redis.ledger, "payloads", payloads)
    async with asyncio.timeout(100):
        _, groups = await trainer.fetch(chunk)
    assert [header.seq for header, _ in groups] == [0, 1, 2, 3]
    assert most == 2


async def test_others_on_the_event_loop_have_their_turn_while_many_groups_are_decoded(
    on_redis: RedisHarness, waker: Wakeups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client._DECODED_AT_ONCE", 2)
    incarnation = await on_redis.start(settings(chunk_groups=4))
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    for slot in await producer.reserve(4, BIG):
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
    await on_redis.ledger.open_step(incarnation, 1)
    chunk = await trainer.lease(1, 0)
    turns: list[str] = []

    def decoded(payloads: list[bytes]) -> list[RolloutGroup | DecodeError]:
        if not turns:
            asyncio.get_running_loop().call_soon(turns.append, "other")
        turns.append(f"{len(payloads)} decoded")
        return decode_groups(payloads)

    monkeypatch.setattr("buffer.client.decode_groups", decoded)
    await trainer.fetch(chunk)
    assert turns == ["2 decoded", "other", "2 decoded"]


async def test_payloads_that_no_reader_understands_are_named_and_replaced(on_redis: RedisHarness, waker: Wakeups, caplog: pytest.LogCaptureFixture) -> None:
    """Their digests are right: they were written so. They lie among so many that all are checked at once."""
    incarnation = await on_redis.start(settings(groups_per_step=20, chunk_groups=20))
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    bad = {3: "rollouts[0].spans: 2 tokens with mask 1 lie in no span", 11: "rollout_group: not a complete MessagePack frame"}
    for slot in await producer.reserve(22, BIG):
        header, payload, group = group_for(slot)
        if slot.seq == 3:
            bare = dataclasses.replace(group.rollouts[0], mask=np.ones(6, dtype=np.uint8))
            payload = encode_group(dataclasses.replace(group, rollouts=(bare, group.rollouts[1])))
        elif slot.seq == 11:
            payload = payload[:-1]
        await producer.put(dataclasses.replace(header, payload_bytes=len(payload), payload_digest=digest(payload)), payload)
    await on_redis.ledger.open_step(incarnation, 1)
    async with asyncio.timeout(100):
        trained, fetched = await trainer.fetch(await trainer.lease(1, 0))
    assert [header.seq for header, _ in fetched] == seqs_of(trained) == [seq for seq in range(22) if seq not in bad]
    for seq, why in bad.items():
        assert f"step 1, group {seq}: {why}" in caplog.text


async def test_a_read_that_fails_ends_the_one_beside_it(on_redis: RedisHarness, waker: Wakeups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.FETCH_BYTES", 1)
    incarnation = await on_redis.start()
    producer, trainer = ProducerBuffer(on_redis.ledger, waker, "p1"), TrainerBuffer(on_redis.ledger, waker, incarnation)
    for slot in await producer.reserve(2, BIG):
        header, payload, _ = group_for(slot)
        await producer.put(header, payload)
    await on_redis.ledger.open_step(incarnation, 1)
    chunk = await trainer.lease(1, 0)
    ended: list[int] = []

    async def payloads(headers: list[GroupHeader]) -> tuple[bytes, ...]:
        if headers[0].seq == 0:
            raise RedisUnavailable("gone")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(headers[0].seq)
        raise AssertionError

    monkeypatch.setattr(on_redis.ledger, "payloads", payloads)
    with pytest.raises(RedisUnavailable):
        await trainer.fetch(chunk)
    assert ended == [1]
