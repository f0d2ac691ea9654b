"""Engines that only evaluate go for what they are asked for, and the rest of the run does not count on them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import VersionGone
from protocol.messages import EngineState
from protocol.versions import Version
from weightsync.aim import EVAL_FLEET, Aim
from weightsync.pointer import Pointer


@contextlib.asynccontextmanager
async def evaluating(rig: Any, engine_id: str, boot: str = "b1") -> AsyncIterator[Any]:
    async with rig.server(boot) as server:
        await rig.registry.beat(dataclasses.replace(rig.status(engine_id, boot, server.url), fleet=EVAL_FLEET), ttl_s=600)
        async with rig.running(rig.reconciler(engine_id, server)):
            yield server


async def test_it_takes_the_version_it_is_asked_for_and_stays_there_whatever_is_published(rig: Any):
    aim = Aim(rig.redis, rig.keys)
    await rig.publish(1, 1)
    async with rig.engine("e0") as follower, evaluating(rig, "e1") as pinned:
        await rig.serves("e0", "1:1")
        assert (await rig.registry.engines())[1].state is EngineState.STARTING
        await aim.ask(Version(1, 1))
        await rig.serves("e1", "1:1")
        for n in (2, 3):
            await rig.publish(1, n)
            await rig.serves("e0", f"1:{n}")
        assert pinned.versions == ["1:1"]
        await aim.ask(Version(1, 3))
        await rig.serves("e1", "1:3")
        assert pinned.versions == ["1:1", "1:3"]
        assert follower.versions == ["1:1", "1:2", "1:3"]
    assert await rig.redis.get(rig.keys.eval_aim) == b"1:3"


async def test_what_it_is_asked_for_is_kept_as_long_as_it_is_held_and_one_that_starts_anew_comes_back_to_it(rig: Any):
    aim, pointer = Aim(rig.redis, rig.keys), Pointer(rig.redis, rig.keys, "eval/p")
    await rig.publish(1, 1)
    async with pointer.holding(Version(1, 1)):
        await aim.ask(Version(1, 1))
        for n in range(2, 6):
            await rig.publish(1, n)
            await rig.channel.collect(rig.store, keep=1)
        async with evaluating(rig, "e1"):
            await rig.serves("e1", "1:1")
        async with evaluating(rig, "e1", "b2") as again:
            await rig.serves("e1", "1:1")
            assert again.versions == ["1:1"]


async def test_a_version_that_is_not_kept_is_not_asked_for_and_an_engine_that_starts_after_it_is_gone_waits(rig: Any):
    aim = Aim(rig.redis, rig.keys)
    await rig.publish(1, 1)
    await aim.ask(Version(1, 1))
    await rig.publish(1, 2)
    await rig.channel.collect(rig.store, keep=1)
    with pytest.raises(VersionGone, match="1:1 is collected"):
        await aim.ask(Version(1, 1))
    async with rig.engine("e0"), evaluating(rig, "e1") as server:
        await rig.serves("e0", "1:2")
        assert server.versions == []
        await aim.ask(Version(1, 2))
        await rig.serves("e1", "1:2")


async def test_no_slot_is_promised_on_it_and_the_end_of_a_run_does_not_wait_for_it(rig: Any):
    await rig.publish(1, 1)
    async with evaluating(rig, "e1"):
        await Aim(rig.redis, rig.keys).ask(Version(1, 1))
        await rig.serves("e1", "1:1")
        assert [engine.engine_id for engine in await rig.registry.routable()] == ["e1"]
        assert await rig.redis.hgetall(rig.keys.routable) == {}
        (status,) = await rig.registry.engines()
        await rig.registry.beat(status, ttl_s=600)  # nor does a beat put it there
        assert await rig.redis.hgetall(rig.keys.routable) == {}
        assert await rig.registry.wait_acks(Version(1, 2), rig.wakes, apply_s=0, most_paused=1) == ()


async def test_its_pause_takes_no_place_in_the_line(rig: Any):
    """max_paused is 1 and another engine holds the pause; the share that must go on serving does not count it either."""
    await rig.publish(1, 1)
    async with rig.engine("e0"):
        await rig.serves("e0", "1:1")
        await rig.redis.hset(rig.keys.pauses, "held:e0", str(10**15))
        async with evaluating(rig, "e1"):
            await Aim(rig.redis, rig.keys).ask(Version(1, 1))
            await rig.serves("e1", "1:1")
