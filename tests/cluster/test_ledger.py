"""A run on a real cluster: its payloads lie on every node, its ledger on one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from buffer.redis_ledger import RedisLedger
from buffer.redis_put import PAYLOAD_TTL_S
from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.messages import Reason, Seq
from protocol.slots import slot_of_key
from protocol.versions import Version
from protocol.wakeups import wakeups
from tests.clusters import Cluster
from tests.pair import Pair, made, settings

from .conftest import run_on

pytestmark = pytest.mark.cluster


@contextlib.asynccontextmanager
async def run_of(url: str, keys: Keys, **changes: object) -> AsyncIterator[Pair]:
    client = connect(url, deadline_s=60.0)
    try:
        async with wakeups(client, keys) as waker:
            pair = Pair(client, keys, waker, **changes)  # type: ignore[arg-type]
            await pair.begin()
            yield pair
            await pair.ledger.delete_run()
    finally:
        await client.aclose()


async def payloads_of(nodes: Cluster, keys: Keys) -> dict[int, int]:
    """How many payloads of the run each node holds, by its port."""
    found = {}
    for node in nodes.live():
        _, names = await node.ask("SCAN", 0, "MATCH", f"rs:payload:{keys.run}:*", "COUNT", 100_000)
        found[node.port] = len(names)
    return found


async def test_the_whole_life_of_groups_whose_payloads_lie_on_every_node(three_nodes: Cluster, keys: Keys) -> None:
    async with run_of(three_nodes.url, keys) as pair:
        producing = [asyncio.create_task(pair.produce(f"p{i}"), name="test:producer") for i in range(2)]
        while not min((await payloads_of(three_nodes, keys)).values()):
            pair.put_any.clear()
            await pair.put_any.wait()
        await pair.train(12)
        await asyncio.gather(*producing)
        await pair.check(12)
        while await pair.ledger.sweep():
            pass
        status = await pair.ledger.status()
        held = sum((await payloads_of(three_nodes, keys)).values())
        assert held == status.ready + pair.config.groups_per_step, (
            "the newest trained step's, which only the newer of two checkpoints covers, and what is ready"
        )


async def test_every_key_but_payloads_lies_in_the_slot_of_the_run() -> None:
    keys = Keys("some-run")
    names = [getattr(keys, name) for name in dir(Keys) if isinstance(getattr(Keys, name), property)]
    names += [keys.key("anything"), keys.presence("producer"), keys.presence_deadline("trainer")]
    assert len(names) > 12
    assert {slot_of_key(name) for name in names} == {slot_of_key(keys.state)}
    assert len({slot_of_key(keys.payload(seq, 1, "t")) for seq in range(100)}) > 90


async def test_slots_move_while_groups_flow(three_nodes: Cluster, keys: Keys) -> None:
    """Those of payloads and that of the run itself, there and back."""
    async with run_of(three_nodes.url, keys, tokens=1_000) as pair:
        running = asyncio.create_task(pair.run(), name="test:run")
        await pair.soon(pair.trained_any, running)
        moved = 0
        for _ in range(2):
            await pair.soon(pair.trained_any, running)
            names = [key async for key in pair.client.scan_iter(match=f"rs:payload:{keys.run}:*")]
            for name in [*names[:2], keys.state.encode()]:
                slot, source = slot_of_key(name), await three_nodes.owner(name.decode())
                target = next(node for node in three_nodes.nodes if node is not source)
                await three_nodes.begin_move(slot, source, target)
                moved += await three_nodes.move_keys(slot, source, target)
                await three_nodes.end_move(slot, target)
                await three_nodes.move(slot, target, source)
        assert moved > 20, "what was moved was there"
        await pair.end(running)


@pytest.mark.parametrize("number", [0, 2], ids=["the node of the run", "a node of payloads"])
async def test_a_node_that_is_killed_and_restarted_costs_the_run_a_wait(mortal: Cluster, number: int) -> None:
    async with run_of(mortal.url, run_on(mortal, 0)) as pair:
        running = asyncio.create_task(pair.run(), name="test:run")
        await pair.soon(pair.trained_any, running)
        await mortal.masters[number].stop()
        await mortal.masters[number].start()
        await pair.end(running)
        await mortal.settled()


async def test_payloads_that_their_node_lost_are_replaced_by_other_groups(mortal: Cluster) -> None:
    """It comes back without what it had acknowledged; the ledger, on another node, knows of the groups still."""
    node = mortal.masters[2]
    log = max((node.folder / "appendonlydir").glob("*.incr.aof"))
    kept = log.stat().st_size
    async with run_of(mortal.url, run_on(mortal, 0)) as pair:

        async def some_there() -> bool:
            names = [pair.keys.payload(one.seq, one.attempt, one.token) for one in await pair.ledger.ready(100)]
            return node in [await mortal.owner(name) for name in names]

        while not await some_there():
            await pair.train_until(len(pair.trained) + 1)
        await node.stop()
        os.truncate(log, kept)
        await node.start()
        await mortal.settled()
        await pair.run(len(pair.trained) + 4)
        status = await pair.ledger.status()
        assert status.releases.get(Reason.PAYLOAD_LOST, 0) > 0
        assert status.trained_groups == len(pair.trained_once())


async def test_a_producer_that_dies_after_the_script_leaves_a_payload_that_a_sweep_makes_stay(
    redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with wakeups(redis, keys) as waker:
        pair = Pair(redis, keys, waker)
        await pair.begin()
        slot, *_ = (await pair.ledger.reserve("p", "r", 1, max_bytes=1 << 20)).slots  # type: ignore[union-attr]
        header, payload = made(slot, Version(pair.incarnation, 0), 100)
        name = keys.payload(header.seq, header.attempt, header.token)

        async def dies(*_: object) -> None:
            raise ConnectionAbortedError

        with monkeypatch.context() as death:
            death.setattr(redis, "persist", dies)
            with pytest.raises(Exception, match="put"):
                await pair.ledger.put(header, payload)
        assert (await pair.ledger.status()).ready == 1
        assert 0 < await redis.ttl(name) <= PAYLOAD_TTL_S
        assert await RedisLedger(redis, keys).sweep() == 1
        assert await redis.ttl(name) == -1
        assert await RedisLedger(redis, keys).sweep() == 0
        assert await pair.ledger.payload(header) == payload


async def test_a_producer_that_dies_before_the_script_leaves_a_payload_that_expires(redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    async with wakeups(redis, keys) as waker:
        pair = Pair(redis, keys, waker, config=settings(slot_seconds=0.5))
        await pair.begin()
        slot, *_ = (await pair.ledger.reserve("p", "r", 1, max_bytes=1 << 20)).slots  # type: ignore[union-attr]
        header, payload = made(slot, Version(pair.incarnation, 0), 100)

        async def dies(*_: object, **__: object) -> None:
            raise ConnectionAbortedError

        with monkeypatch.context() as death:
            death.setattr(pair.ledger._puts, "_script", dies)
            with pytest.raises(ConnectionAbortedError):
                await pair.ledger.put(header, payload)
        assert 0 < await redis.ttl(keys.payload(header.seq, header.attempt, header.token)) <= PAYLOAD_TTL_S
        await redis.hincrby(keys.state, "clock", 1000)
        (again,) = (await pair.ledger.reserve("q", "r", 1, max_bytes=1 << 20)).slots  # type: ignore[union-attr]
        assert (again.seq, again.attempt) == (slot.seq, slot.attempt + 1)
        assert again.seq == Seq(0)
