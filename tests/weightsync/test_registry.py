from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from protocol.errors import Superseded, WeightError
from protocol.messages import EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync import claim as claim_module
from weightsync import registry as registry_module
from weightsync.registry import UpdateTimes


async def routes(rig: Any) -> dict[str, str]:
    raw = await rig.redis.hgetall(rig.keys.routable)
    return {engine.decode(): value.decode().rpartition(":")[0] for engine, value in raw.items()}


async def test_an_engine_is_routable_only_after_it_acks(rig: Any):
    assert await rig.registry.beat(rig.status("e0", "b1", "http://one"), ttl_s=600) is True
    [engine] = await rig.registry.engines()
    assert (engine.state, engine.version, engine.url) == (EngineState.STARTING, None, "http://one")
    assert await rig.registry.routable() == []
    assert await routes(rig) == {}
    assert await rig.registry.ack("e0", "b1", Version(1, 0), times=UpdateTimes(pause_s=0.25)) is True
    [engine] = await rig.registry.routable()
    assert (engine.state, engine.version) == (EngineState.ROUTABLE, Version(1, 0))
    assert await routes(rig) == {"e0": "1:0"}
    [applied] = await rig.events("applied")
    assert (applied["engine_id"], applied["version"], applied["from"], applied["pause_s"]) == ("e0", "1:0", "", 0.25)


async def test_a_beat_renews_and_does_not_make_an_engine_routable_by_what_it_says_of_itself(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    assert await rig.registry.beat(rig.status("e0", "b1", state=EngineState.ROUTABLE), ttl_s=600) is False
    assert await rig.registry.routable() == []
    assert len(await rig.events("engine_started")) == 1


async def test_a_restarted_engine_is_a_new_engine_with_no_version(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    assert await rig.registry.beat(rig.status("e0", "b2"), ttl_s=600) is True
    [engine] = await rig.registry.engines()
    assert (engine.boot_nonce, engine.state, engine.version) == ("b2", EngineState.STARTING, None)
    assert await routes(rig) == {}
    with pytest.raises(Superseded):
        await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    with pytest.raises(Superseded):
        await rig.registry.ack("e0", "b1", Version(1, 6))
    assert await rig.registry.mark_unfit("e0", "b1", "late news") is False
    await rig.registry.leave("e0", "b1")
    assert [engine.boot_nonce for engine in await rig.registry.engines()] == ["b2"]
    assert await rig.registry.ack("e0", "b2", Version(1, 0)) is True


async def test_an_unfit_engine_is_off_the_routes_until_it_acks(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    assert await rig.registry.mark_unfit("e0", "b1", "answered with 1:4") is True
    assert await rig.registry.mark_unfit("e0", "b1", "answered with 1:4") is False
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    [engine] = await rig.registry.engines()
    assert (engine.state, engine.reason) == (EngineState.UNFIT, "answered with 1:4")
    assert await routes(rig) == {}
    await rig.registry.ack("e0", "b1", Version(1, 5))
    [engine] = await rig.registry.routable()
    assert engine.reason == ""
    assert [event["reason"] for event in await rig.events("unfit")] == ["answered with 1:4"]


async def test_an_engine_never_goes_back_but_a_new_incarnation_may_be_lower(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    with pytest.raises(WeightError, match="never goes back"):
        await rig.registry.ack("e0", "b1", Version(1, 4))
    assert await rig.registry.ack("e0", "b1", Version(2, 3)) is True
    assert await routes(rig) == {"e0": "2:3"}
    assert await rig.registry.ack("e0", "b1", Version(1, 4)) is True, "the incarnation that is left may be one that Redis lost"


async def test_an_engine_without_beats_is_gone_and_says_so(rig: Any, redis: Any, keys: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=0.001)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    async with asyncio.timeout(60):
        while await rig.registry.engines():
            pass
    assert await routes(rig) == {}
    assert [event["reason"] for event in await rig.events("engine_left")] == ["expired"]
    assert await rig.registry.ack("e0", "b1", Version(1, 6)) is False
    assert await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600) is True
    assert await rig.registry.routable() == []


async def test_a_leaving_engine_takes_no_requests_but_is_there(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    await rig.registry.beat(rig.status("e0", "b1", state=EngineState.LEAVING), ttl_s=600)
    [engine] = await rig.registry.engines()
    assert engine.state is EngineState.LEAVING
    assert await routes(rig) == {}
    await rig.registry.leave("e0", "b1")
    assert await rig.registry.engines() == []
    [left] = await rig.events("engine_left")
    assert left["reason"] == "stopped"
    assert {"busy_s", "uptime_s", "paused_s", "generated_tokens"} <= left.keys()  # how it was used, from its last beat


async def test_waiting_for_acks_ends_with_the_last_engine_and_names_the_late_ones(rig: Any):
    for engine in ("e0", "e1"):
        await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
        await rig.registry.ack(engine, "b1", Version(1, 5))
    await rig.registry.ack("e0", "b1", Version(1, 6))
    assert await rig.registry.wait_acks(Version(1, 5), rig.wakes, apply_s=5, most_paused=1) == ()
    assert await rig.registry.wait_acks(Version(1, 6), rig.wakes, apply_s=0, most_paused=1) == ("e1",)
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(rig.registry.wait_acks(Version(1, 6), rig.wakes, apply_s=60, most_paused=1))
        await rig.registry.ack("e1", "b1", Version(1, 7))
    assert waiter.result() == ()


@pytest.mark.parametrize(("engines", "most_paused", "rounds"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (9, 1, 3), (0, 1, 1)])
async def test_the_time_for_acks_is_that_of_updates_one_after_the_other_and_bounded(
    rig: Any, monkeypatch: pytest.MonkeyPatch, engines: int, most_paused: int, rounds: int
):
    for index in range(engines):
        await rig.registry.beat(rig.status(f"e{index}", "b1"), ttl_s=600)
    now, waited = [0.0], []

    async def wait(*_topics: Topic, since: int, timeout_s: float) -> None:
        waited.append(timeout_s)
        now[0] += timeout_s

    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rig.wakes, "wait", wait)
    late = await rig.registry.wait_acks(Version(1, 0), rig.wakes, apply_s=10.0, most_paused=most_paused)
    assert late == tuple(f"e{index}" for index in range(engines))
    assert sum(waited) == pytest.approx(10.0 * rounds if engines else 0.0)


async def test_an_engine_that_vanishes_while_its_ack_is_awaited_is_awaited_until_it_is_back(rig: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 5))
    lists, looked = rig.registry.engines, asyncio.Queue()

    async def engines() -> list[EngineStatus]:
        found = await lists()
        looked.put_nowait([engine.engine_id for engine in found])
        return found

    rig.registry.engines = engines
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiter = group.create_task(rig.registry.wait_acks(Version(1, 6), rig.wakes, apply_s=20, most_paused=1))
        assert await looked.get() == ["e0"]
        await rig.registry.beat(rig.status("e0", "b1"), ttl_s=0.001)  # killed
        while await looked.get() != []:
            pass
        await rig.registry.beat(rig.status("e0", "b2"), ttl_s=600)
        await rig.registry.ack("e0", "b2", Version(1, 6))
        while await looked.get() != ["e0"]:
            assert not waiter.done()
    assert waiter.result() == ()


async def test_the_pause_goes_to_the_engine_with_the_oldest_version(rig: Any):
    await rig.publish(1, 6)
    claims = {}
    for engine, n in (("e0", 5), ("e1", 3), ("e2", 4)):
        await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
        await rig.registry.ack(engine, "b1", Version(1, n))
        claims[engine] = rig.channel.claim(engine, "b1")
        await claims[engine].look(None)

    async def ask(engine: str) -> bool:
        return await claims[engine].pause(Version(1, 6), most=1, valid_s=60, idle=False)

    assert await ask("e0")
    assert not await ask("e2")
    assert not await ask("e1")
    await claims["e0"].resumed()
    assert not await ask("e2")
    assert not await ask("e0")
    assert await ask("e1")
    assert not await ask("e2")
    await rig.registry.ack("e1", "b1", Version(1, 6), reconciler=claims["e1"].owner)
    assert not await ask("e0")
    assert await ask("e2")
    await claims["e2"].release()
    assert await ask("e0")


async def test_only_an_engine_off_the_routes_pauses_uncounted_when_it_is_idle(rig: Any):
    """One that is idle on the routes may have a request before the pause reaches it, or under the pause."""
    await rig.publish(1, 6)
    claims = {}
    for engine in ("e0", "e1", "e2"):
        await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
        claims[engine] = rig.channel.claim(engine, "b1")
        await claims[engine].look(None)
    for engine in ("e0", "e1"):
        await rig.registry.ack(engine, "b1", Version(1, 5))

    async def ask(engine: str, *, idle: bool) -> bool:
        return await claims[engine].pause(Version(1, 6), most=1, valid_s=60, idle=idle)

    assert await ask("e0", idle=True)
    assert not await ask("e1", idle=True), "an idle engine on the routes counts"
    assert await ask("e2", idle=True), "no producer has heard of it"
    await rig.registry.mark_unfit("e1", "b1", "an answer says boot:b9")
    assert not await ask("e1", idle=False), "what it decodes for others would stand"
    assert await ask("e1", idle=True)
    await claims["e0"].resumed()
    assert await ask("e1", idle=False), "those that were let through held nothing"


async def test_two_may_pause_where_two_may(rig: Any):
    await rig.publish(1, 6)
    claims = []
    for engine in ("e0", "e1", "e2"):
        await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
        claims.append(rig.channel.claim(engine, "b1"))
        await claims[-1].look(None)
    granted = [await claim.pause(Version(1, 6), most=2, valid_s=60, idle=False) for claim in claims]
    assert granted == [True, True, False]


@pytest.mark.parametrize(("share", "granted"), [(0.0, 4), (0.5, 2), (0.7, 1), (0.9, 1)])
async def test_a_share_of_the_engines_that_decode_goes_on_and_one_may_always_be_updated(rig: Any, share: float, granted: int):
    await rig.publish(1, 6)
    """Those out of service do not count as serving, and are not held up by the share."""
    claims = []
    for index in range(6):
        await rig.registry.beat(rig.status(f"e{index}", "b1"), ttl_s=600)
        claims.append(rig.channel.claim(f"e{index}", "b1"))
        await claims[-1].look(None)
        if index < 4:
            await rig.registry.ack(f"e{index}", "b1", Version(1, 1))
    taken = [await claim.pause(Version(1, 6), most=5, valid_s=60, idle=False, serving_share=share) for claim in claims[:4]]
    assert sum(taken) == granted
    assert await claims[4].pause(Version(1, 6), most=5, valid_s=60, idle=False, serving_share=share)
    assert await claims[5].pause(Version(1, 6), most=1, valid_s=60, idle=True, serving_share=share)


async def test_a_dead_engine_holds_no_pause_and_no_place_in_line(rig: Any):
    await rig.publish(1, 6)
    for engine in ("e0", "e1", "e2"):
        await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
    dead, claimant, live = (rig.channel.claim(engine, "b1") for engine in ("e0", "e1", "e2"))
    for claim in (dead, claimant, live):
        await claim.look(None)
    assert await dead.pause(Version(1, 6), most=1, valid_s=60, idle=False)
    assert not await claimant.pause(Version(1, 6), most=1, valid_s=60, idle=False)
    assert not await live.pause(Version(1, 6), most=1, valid_s=60, idle=False)
    await rig.registry.beat(rig.status("e0", "b2"), ttl_s=60)
    await rig.registry.beat(rig.status("e1", "b1"), ttl_s=0.001)
    async with asyncio.timeout(60):
        while not await live.pause(Version(1, 6), most=1, valid_s=60, idle=False):
            pass


async def test_a_reconciler_without_the_lock_changes_nothing(rig: Any):
    await rig.publish(1, 6)
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    first, second = rig.channel.claim("e0", "b1"), rig.channel.claim("e0", "b1")
    await first.look(None)
    locked = await second.look(None)
    assert 0 < locked.for_s <= claim_module.LOCK_S
    with pytest.raises(Superseded):
        await second.pause(Version(1, 6), most=1, valid_s=60, idle=False)
    with pytest.raises(Superseded):
        await rig.registry.ack("e0", "b1", Version(1, 0), reconciler=second.owner)
    await second.release()
    assert await first.pause(Version(1, 6), most=1, valid_s=600, idle=False)
    assert (await second.look(None)).for_s > claim_module.LOCK_S
    await first.release()
    assert (await second.look(None)).state is EngineState.STARTING


async def test_a_lock_that_redis_lost_is_nobodys_and_ends_no_reconciler(rig: Any):
    """Redis came back without its last second. A look takes the lock again; whoever is between two looks goes on, or begins anew."""
    await rig.publish(1, 6)
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    claim = rig.channel.claim("e0", "b1")
    await claim.look(None)
    await rig.redis.delete(rig.keys.reconcilers)
    assert not await claim.pause(Version(1, 6), most=1, valid_s=60, idle=False)
    assert not await rig.registry.ack("e0", "b1", Version(1, 6), reconciler=claim.owner)
    await claim.renew()
    assert (await rig.channel.claim("e0", "b1").look(None)).for_s > 0
    assert await claim.pause(Version(1, 6), most=1, valid_s=60, idle=False)


async def test_garbage_in_the_registry_stops_nobody_and_goes_when_it_is_overdue(rig: Any, redis: Any, keys: Any):
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.beat(rig.status("ghost", "b2"), ttl_s=600)
    await redis.hset(keys.engines, "ghost", b"\xc1garbage")
    assert [engine.engine_id for engine in await rig.registry.engines()] == ["e0"]
    facts = orjson.loads(await redis.hget(keys.engine_facts, "ghost"))
    await redis.hset(keys.engine_facts, "ghost", orjson.dumps(facts | {"expires": 0}))
    assert [engine.engine_id for engine in await rig.registry.engines()] == ["e0"]
    assert await redis.hexists(keys.engines, "ghost") == 0
