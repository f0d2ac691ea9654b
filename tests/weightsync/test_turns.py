from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from protocol.errors import Fenced, LedgerRegressed
from protocol.wakeups import Topic
from weightsync.turns import HOLDERS, Holder, Turn, Turns, renew

pytestmark = pytest.mark.redis


@pytest.fixture
def turns(rig: Any) -> Turns:
    return Turns(rig.redis, rig.keys, rig.wakes)


async def test_a_run_begins_with_the_engines(turns: Turns):
    standing = await turns.read()
    assert (standing.turn, standing.number, standing.holders) == (Turn.GENERATE, 0, frozenset())
    assert await turns.take(Holder.ENGINE, "e0", "b1")
    assert not await turns.take(Holder.TRAINER, "t", "b1")
    assert (await turns.read()).holders == {"engine:e0"}


async def test_the_trainer_has_the_device_once_every_engine_has_let_go(rig: Any, turns: Turns):
    await rig.attach(1, 0)
    for engine in ("e0", "e1"):
        assert await turns.take(Holder.ENGINE, engine, "b1")
    await turns.move(1, Turn.TRAIN)
    for engine in ("e0", "e1"):
        assert not await turns.take(Holder.TRAINER, "t", "b1")
        await turns.give(Holder.ENGINE, engine, "b1")
    assert await turns.take(Holder.TRAINER, "t", "b1")
    assert not await turns.take(Holder.ENGINE, "e0", "b1")
    assert [event["turn"] for event in await rig.events("turn")] == ["train"]


async def test_whoever_holds_memory_goes_on_holding_it_until_it_lets_go_also_after_its_turn(rig: Any, turns: Turns):
    await rig.attach(1, 0)
    assert await turns.take(Holder.ENGINE, "e0", "b1")
    await turns.move(1, Turn.TRAIN)
    assert await turns.take(Holder.ENGINE, "e0", "b1"), "renewed: its memory is still there"
    assert not await turns.take(Holder.ENGINE, "e0", "b2"), "a new boot has nothing to renew"
    assert not await turns.take(Holder.ENGINE, "e1", "b1")
    await turns.give(Holder.ENGINE, "e0", "b0")
    assert (await turns.read()).holders == {"engine:e0"}, "another boot lets go of nothing"


async def test_a_holder_that_died_is_not_waited_for(rig: Any, turns: Turns):
    await rig.attach(1, 0)
    assert await turns.take(Holder.ENGINE, "e0", "b1", held_s=600)
    await turns.move(1, Turn.TRAIN)
    assert not await turns.take(Holder.TRAINER, "t", "b1")
    assert await turns.take(Holder.ENGINE, "e0", "b1", held_s=0.001), "its last breath"
    async with asyncio.timeout(60):
        await turns.taken(Holder.TRAINER, "t", "b1")
    assert (await turns.read()).holders == {"trainer:t"}


async def test_whoever_renews_is_alive(rig: Any, turns: Turns):
    await rig.attach(1, 0)

    async def lasts_until() -> int:
        return int((await rig.redis.hget(rig.keys.holders, "engine:e0")).rpartition(b"|")[2])

    assert await turns.take(Holder.ENGINE, "e0", "b1", held_s=60)
    begun = await lasts_until()
    async with asyncio.TaskGroup() as group:
        renewing = group.create_task(renew(turns, Holder.ENGINE, "e0", "b1", every_s=0.05))
        await turns.move(1, Turn.TRAIN)
        for _ in range(3):
            before = await lasts_until()
            while await lasts_until() == before:
                await asyncio.sleep(0.01)
        assert await lasts_until() != begun
        assert not await turns.take(Holder.TRAINER, "t", "b1")
        renewing.cancel()


async def test_only_the_attached_trainer_moves_the_turn(rig: Any, turns: Turns):
    await rig.attach(2, 0)
    with pytest.raises(Fenced, match="incarnation 2 is attached"):
        await turns.move(1, Turn.TRAIN)
    with pytest.raises(LedgerRegressed, match="only incarnation 2"):
        await turns.move(3, Turn.TRAIN)
    await turns.move(2, Turn.TRAIN)
    await turns.move(2, Turn.TRAIN)
    assert (await turns.read()).number == 1, "the same turn again changes nothing"


async def test_who_waits_for_the_device_is_woken_when_the_last_lets_go(rig: Any, turns: Turns):
    await rig.attach(1, 0)
    assert await turns.take(Holder.ENGINE, "e0", "b1")
    async with asyncio.TaskGroup() as group:
        over = group.create_task(turns.until(Holder.ENGINE, mine=False))
        waiting = group.create_task(turns.taken(Holder.TRAINER, "t", "b1"))
        await turns.move(1, Turn.TRAIN)
        await over
        seen = rig.wakes.mark(Topic.RUN)
        await turns.give(Holder.ENGINE, "e0", "b1")
        await waiting
        assert rig.wakes.mark(Topic.RUN) != seen


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_the_holders_are_of_one_role(rig: Any, turns: Turns, seed: int):
    rng = random.Random(seed)
    await rig.attach(1, 0)
    members = [(role, f"m{i}", f"b{boot}") for role in Holder for i in range(2) for boot in range(2)]
    seen: set[str] = set()
    for _ in range(300):
        role, member, boot = rng.choice(members)
        match rng.randrange(5):
            case 0:
                await turns.move(1, rng.choice(list(Turn)))
            case 1 | 2:
                turn = (await turns.read()).turn
                held = f"{role}:{member}" in (await turns.read()).holders
                if await turns.take(role, member, boot, held_s=60):
                    assert held or HOLDERS[turn] is role
            case _:
                for one in ("b0", "b1"):
                    await turns.give(role, member, one)
        roles = {holder.partition(":")[0] for holder in (await turns.read()).holders}
        assert len(roles) <= 1
        seen |= roles
    assert seen == {"engine", "reward", "trainer"}
