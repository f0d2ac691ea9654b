"""The client of `protocol.connection` on a real cluster."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from redis.exceptions import RedisError, ResponseError

from protocol import wakeups as module
from protocol.connection import Client, Script, asking, check_server, connect
from protocol.errors import RedisUnavailable, RedisUnreachable, UnsafeRedis
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, wakeups
from tests.clusters import Cluster

from .conftest import run_on

pytestmark = pytest.mark.cluster
LONG_S = 60.0
BEAT = Script("protocol", "lua/presence_beat.lua")


async def test_a_url_of_any_node_finds_the_cluster(three_nodes: Cluster, keys: Keys) -> None:
    for node in three_nodes.nodes:
        other = connect(node.url, deadline_s=60.0)
        try:
            facts = await check_server(other, url=node.url)
            assert (facts.cluster, facts.appendonly, facts.appendfsync) == (True, True, "everysec")
            await other.set(keys.payload(1, 1, node.url), "x")
            assert await other.get(keys.payload(1, 1, node.url)) == b"x"
        finally:
            await other.aclose()


async def test_a_node_that_may_evict_is_found_whichever_is_asked(three_nodes: Cluster, redis: Client) -> None:
    bad = three_nodes.nodes[2]
    await bad.ask("CONFIG SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(UnsafeRedis, match="maxmemory-policy is allkeys-lru"):
            await check_server(redis, url=three_nodes.url)
    finally:
        await bad.ask("CONFIG SET", "maxmemory-policy", "noeviction")


async def test_a_cluster_is_as_durable_as_its_worst_node(three_nodes: Cluster, redis: Client) -> None:
    bad = three_nodes.nodes[1]
    await bad.ask("CONFIG SET", "appendonly", "no")
    try:
        assert "memory only" in (await check_server(redis, url=three_nodes.url)).durability
    finally:
        await bad.ask("CONFIG SET", "appendonly", "yes")


async def test_keys_of_every_node_are_read_in_the_order_asked(three_nodes: Cluster, redis: Client, keys: Keys) -> None:
    names = [keys.payload(seq, 1, "t") for seq in range(60)]
    await asyncio.gather(*(redis.set(name, str(i)) for i, name in enumerate(names) if i != 7))
    assert {node.port for node in [await three_nodes.owner(name) for name in names[:20]]} == {node.port for node in three_nodes.nodes}
    assert await redis.mget(names) == [None if i == 7 else str(i).encode() for i in range(60)]
    assert {key async for key in redis.scan_iter(match=f"*{keys.run}*")} == {name.encode() for i, name in enumerate(names) if i != 7}
    assert await redis.exists(*names) == 59
    assert await redis.unlink(*names) == 59
    assert await redis.mget(names) == [None] * 60
    assert await redis.mget([]) == []


async def test_what_would_ask_one_node_for_the_whole_is_refused(redis: Client, keys: Keys) -> None:
    for command in (redis.dbsize, redis.randomkey, redis.flushall):
        with pytest.raises(RedisError, match=r"asks a single node, and this server is a cluster"):
            await command()
    with pytest.raises(RedisError, match="a pipeline goes to a single node"):
        redis.pipeline()
    assert await redis.on_owner(keys.state, ["SET", keys.state, "1"], ["WAIT", 0, 1]) == [True, 0]


async def test_keys_of_two_slots_in_one_script_are_an_error_and_not_retried(redis: Client, keys: Keys) -> None:
    with pytest.raises(ResponseError, match=r"(?i)slot"):
        await BEAT(redis, keys=[keys.state, keys.payload(0, 0, "t")], args=["m", b"", 60_000])


async def test_a_script_is_sent_whole_to_each_node_that_does_not_know_it(three_nodes: Cluster, redis: Client) -> None:
    runs = [run_on(three_nodes, number) for number in range(3)]
    for node in three_nodes.nodes:
        await node.ask("SCRIPT FLUSH")
    here = [Presence(redis, run, "producer", ProducerStatus) for run in runs]
    for one in here:
        await one.beat("a", ProducerStatus(producer_id="a"))
    for one, run in zip(here, runs, strict=True):
        assert [member.producer_id for member in await one.members()] == ["a"]
        await redis.delete(run.presence("producer"), run.presence_deadline("producer"))


async def test_a_slot_that_moves_loses_no_command(three_nodes: Cluster, redis: Client, keys: Keys) -> None:
    """More commands at once than redis-py's own cluster client stands: ASKING must go over the connection of the command that follows."""
    names = [f"{keys.state}:{i}" for i in range(60)]
    slot = await redis.execute_command("CLUSTER KEYSLOT", keys.state)
    source = await three_nodes.owner(keys.state)
    target = next(node for node in three_nodes.nodes if node is not source)
    await asyncio.gather(*(redis.set(name, "0") for name in names))
    await three_nodes.begin_move(slot, source, target)
    try:
        await asyncio.gather(*(redis.incr(name) for name in names))  # the source has them still
        assert await three_nodes.move_keys(slot, source, target) == 60
        await asyncio.gather(*(redis.incr(name) for name in names))  # ASK
        assert await redis.mget(names) == [b"2"] * 60
    finally:
        await three_nodes.end_move(slot, target)
    await asyncio.gather(*(redis.incr(name) for name in names))  # MOVED
    assert await redis.mget(names) == [b"3"] * 60
    await three_nodes.move(slot, target, source)
    await asyncio.gather(*(redis.incr(name) for name in names))
    assert await redis.mget(names) == [b"4"] * 60
    await redis.unlink(*names)


async def test_a_script_waits_while_its_keys_are_at_two_nodes(three_nodes: Cluster, redis: Client, keys: Keys) -> None:
    """TRYAGAIN: a script finds some of its keys here and some there until the slot has moved."""
    here = Presence(redis, keys, "producer", ProducerStatus)
    await here.beat("before", ProducerStatus(producer_id="before"))
    slot = await redis.execute_command("CLUSTER KEYSLOT", keys.state)
    source = await three_nodes.owner(keys.state)
    target = next(node for node in three_nodes.nodes if node is not source)
    await three_nodes.begin_move(slot, source, target)
    await source.ask("MIGRATE", "127.0.0.1", target.port, keys.presence("producer"), 0, 10_000)
    beating = asyncio.create_task(here.beat("meanwhile", ProducerStatus(producer_id="meanwhile")), name="test:beat")
    await asyncio.wait([beating], timeout=0.2)
    assert not beating.done()
    await three_nodes.move_keys(slot, source, target)
    await three_nodes.end_move(slot, target)
    await beating
    assert {member.producer_id for member in await here.members()} == {"before", "meanwhile"}
    await three_nodes.move(slot, target, source)


async def test_a_wake_up_reaches_whoever_listens_wherever_it_is_published(three_nodes: Cluster, redis: Client, keys: Keys) -> None:
    async with contextlib.AsyncExitStack() as stack:
        wakers = [await stack.enter_async_context(wakeups(redis, keys)) for _ in range(3)]  # each through another node
        for waker in wakers:
            await waker.wait(Topic.RUN, since=dict.fromkeys(Topic, 0), timeout_s=LONG_S)
        for node in three_nodes.nodes:
            marks = [waker.mark(Topic.SLOT) for waker in wakers]
            await node.ask("PUBLISH", keys.wakeups, "slot")
            for waker, mark in zip(wakers, marks, strict=True):
                await waker.wait(Topic.SLOT, since=mark, timeout_s=LONG_S)
                assert waker.mark(Topic.SLOT) != mark


async def test_wake_ups_move_to_another_node_when_theirs_dies(mortal: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECONNECT_S", 0.01)
    monkeypatch.setattr(module, "_SILENCE_S", LONG_S)
    keys, client = run_on(mortal, 0), connect(mortal.url, deadline_s=60.0)
    try:
        async with contextlib.AsyncExitStack() as stack:
            wakers = [await stack.enter_async_context(wakeups(client, keys)) for _ in range(3)]
            for waker in wakers:
                await waker.wait(Topic.RUN, since=dict.fromkeys(Topic, 0), timeout_s=LONG_S)
            marks = [waker.mark(Topic.RUN) for waker in wakers]
            dead = mortal.nodes[2]
            await dead.stop()

            waiting = [asyncio.create_task(waker.wait(Topic.RUN, since=mark, timeout_s=LONG_S)) for waker, mark in zip(wakers, marks, strict=True)]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert sum(waker.mark(Topic.RUN) != mark for waker, mark in zip(wakers, marks, strict=True)) == 1, "one listened through the node that died"
            marks = [waker.mark(Topic.SLOT) for waker in wakers]
            await mortal.nodes[1].ask("PUBLISH", keys.wakeups, "slot")
            for waker, mark in zip(wakers, marks, strict=True):
                await waker.wait(Topic.SLOT, since=mark, timeout_s=LONG_S)
                assert waker.mark(Topic.SLOT) != mark
    finally:
        await mortal.nodes[2].start()
        await mortal.settled()
        await client.aclose()


async def test_a_node_that_is_killed_and_restarted_costs_a_wait(mortal: Cluster) -> None:
    keys, client = run_on(mortal, 1), connect(mortal.url, deadline_s=60.0)
    node = mortal.masters[1]
    try:
        await client.set(keys.state, "kept")
        await client.on_owner(keys.state, ["WAITAOF", 1, 0, 0])
        await node.stop()
        asked = asyncio.create_task(client.get(keys.state), name="test:get")
        await node.start()
        assert await asked == b"kept"
    finally:
        await client.delete(keys.state)
        await client.aclose()


async def test_a_node_that_stays_away_is_unavailable_at_the_deadline(mortal: Cluster) -> None:
    gone, there = run_on(mortal, 2), run_on(mortal, 0)
    client = connect(mortal.url, deadline_s=0.5)
    node = mortal.masters[2]
    try:
        await client.mset({there.state: "1"})
        await node.stop()
        with pytest.raises(RedisUnavailable, match=r"get: Redis did not answer in time \(the cluster: "), asking("get"):
            await client.get(gone.state)
        with pytest.raises(RedisUnavailable, match="mget"), asking("mget"):
            await client.mget([there.state, gone.state])
        with pytest.raises(RedisUnreachable, match=r"no answer .*; start Redis there"):
            await check_server(client, url=mortal.url)
    finally:
        await node.start()
        await mortal.settled()
        await client.delete(there.state)
        await client.aclose()
