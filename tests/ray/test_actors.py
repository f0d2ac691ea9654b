"""What an actor does with its body, whatever the body is."""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.ray.placement_group import look, new_group, remove, seat
from producer.ray_actor import Settings, namespace
from producer.ray_fleet import Fleet, RayUnavailable, connected, produce_on_ray
from protocol.errors import ConfigError
from tests.ray.bodies import Blocking, Brief, Failing, Hopeless, Refusing, Stubborn, Wide
from tests.ray.conftest import Simulated

pytestmark = pytest.mark.timeout(900)
RUN = f"r-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def cluster() -> AsyncIterator[Simulated]:
    """One node is enough."""
    simulated = Simulated()
    yield simulated
    simulated.close()


@pytest.fixture
async def fleet(cluster: Simulated) -> AsyncIterator[Fleet]:
    async with connected(cluster.address, RUN):
        found = Fleet(RUN)
        yield found
        for name in await found.names():
            await found.kill(name)


async def test_an_actor_answers_while_its_body_blocks_and_is_stopped_all_the_same(fleet: Fleet):
    await fleet.start(Blocking, "producer-0", Settings(run=RUN, text=""), cpus=0.1)
    await fleet.wait_started(["producer-0"], within_s=300.0)
    followed = asyncio.create_task(fleet.ended("producer-0"))
    first = await fleet.about("producer-0", timeout_s=120.0)
    await fleet.start(Blocking, "producer-0", Settings(run=RUN, text=""), cpus=0.1)
    assert (await fleet.about("producer-0", timeout_s=120.0)).pid == first.pid, "there is one of each name"
    assert (await fleet.stop("producer-0", within_s=120.0)).code == 0
    assert (await followed) is None or (await followed).code == 0
    assert await fleet.names() == []


async def test_a_body_that_fails_is_started_again_in_a_new_process_until_it_ends(fleet: Fleet, tmp_path: Path):
    tally = tmp_path / "tally"
    await fleet.start(Failing, "engine-0", Settings(run=RUN, text=str(tally)), cpus=0.1)
    told: list[str] = []
    about = await fleet.ended("engine-0", tell=told.append)
    assert (about.code, about.failures, about.message, about.gave_up) == (0, 2, "", False)
    assert about.moved
    assert tally.read_text() == "xxx"
    assert "engine-0 is back; failure 2 was: not yet" in told, "once, by whichever life is asked after it"


async def test_a_body_that_always_fails_is_given_up_and_its_reason_outlives_its_processes(fleet: Fleet):
    await fleet.start(Hopeless, "engine-2", Settings(run=RUN, text=""), cpus=0.1)
    about = await fleet.ended("engine-2")
    assert (about.code, about.failures, about.gave_up, about.message) == (1, 2, True, "no such device")
    await fleet.stop("engine-2", within_s=120.0)
    await fleet.start(Hopeless, "engine-2", Settings(run=RUN, text=""), cpus=0.1)
    assert (await fleet.ended("engine-2")).failures == 2, "one that is started afresh has no past"


async def test_who_had_to_be_killed_is_told_from_who_was_gone_and_from_who_had_no_process(fleet: Fleet):
    await fleet.start(Stubborn, "producer-1", Settings(run=RUN, text=""), cpus=0.1)
    await fleet.wait_started(["producer-1"], within_s=300.0)
    killed = await fleet.stop("producer-1", within_s=10.0)
    assert (killed.about, killed.killed, killed.answered, killed.code) == (None, True, True, 1)
    gone = await fleet.stop("producer-1", within_s=2.0)
    assert (gone.about, gone.killed, gone.code) == (None, False, 0)
    await fleet.start(Stubborn, "producer-2", Settings(run=RUN, text=""), cpus=1000)
    waiting = await fleet.stop("producer-2", within_s=2.0)
    assert (waiting.killed, waiting.answered, waiting.code) == (True, False, 0)


async def test_a_name_that_others_have_is_refused_and_one_that_has_ended_is_free(fleet: Fleet):
    await fleet.start(Stubborn, "producer-3", Settings(run=RUN, text="", digest="theirs"), cpus=0.1)
    await fleet.start(Refusing, "producer-4", Settings(run=RUN, text="", digest="theirs"), cpus=0.1)
    await fleet.ended("producer-4")
    with pytest.raises(ConfigError, match=r"^producer-3: there already"):
        await fleet.refuse_others(["producer-3", "producer-4", "producer-5"], "ours")
    await fleet.refuse_others(["producer-3", "producer-4"], "theirs")
    assert "producer-4" not in await fleet.names()
    assert "producer-3" in await fleet.names()


async def test_two_that_leave_at_once_give_back_what_the_run_had_reserved(fleet: Fleet):
    import ray

    assert await fleet.names() == []
    group = await new_group(namespace(RUN), [{"CPU": 0.1}], asked="a test", wait_s=120.0)
    for name in ("producer-5", "producer-6"):
        await fleet.start(Brief, name, Settings(run=RUN, text=""), cpus=0.1)
    while await asyncio.to_thread(lambda: ray.util.placement_group_table(group)["state"]) != "REMOVED":
        await asyncio.sleep(0.1)
    while await fleet.names():
        await asyncio.sleep(0.1)


async def test_what_a_person_must_mend_is_not_tried_again(fleet: Fleet):
    await fleet.start(Refusing, "engine-1", Settings(run=RUN, text=""), cpus=0.1)
    about = await fleet.ended("engine-1")
    assert (about.code, about.message, about.moved) == (2, "model.path: no such folder", False)


async def test_an_actor_without_room_is_named_within_the_bound(fleet: Fleet):
    await fleet.start(Blocking, "producer-9", Settings(run=RUN, text=""), cpus=1000)
    with pytest.raises(RayUnavailable, match=r"producer-9: not started within 1 s; the cluster has 1 nodes with 0 GPUs and 8 CPUs"):
        await fleet.wait_started(["producer-9"], within_s=1.0)


async def test_producers_without_room_are_not_left_behind(cluster: Simulated, tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "{RUN}-alone"\n[redis]\nurl = "redis://127.0.0.77:1"\n[model]\npath = "m"\n[data]\npath = "d"\n[producer]\ncount = 2\n'
        f'[placement]\nwait_seconds = 1.0\n[ray]\naddress = "{cluster.address}"\nproducer_cpus = 1000.0\n'
    )
    options = argparse.Namespace(config=str(file), set=[], index=None, ray=None)
    for _ in range(2):
        with pytest.raises(RayUnavailable, match=r"producer-0, producer-1: not started within 1 s"):
            await produce_on_ray(options, asyncio.Event())


async def test_an_engine_of_several_gpus_sees_those_of_its_bundles_and_no_others(cluster: Simulated, fleet: Fleet):
    cluster.add(gpus=3)
    group = await new_group(f"rollstream-{RUN}", [{"GPU": 1.0, "CPU": 0.5}] * 3, asked="a test", wait_s=120.0)
    try:
        where = {bundle.index: bundle.gpu for bundle in await look(group)}
        two = [index for index in where if where[index] != "1"]
        await fleet.start(Wide, "engine-5", Settings(run=RUN, text=""), cpus=0.5, gpus=0.9, where=seat(group, two[0]), bundles=two)
        await run_until(fleet, "engine-5", ",".join(where[index] for index in two))
        assert sorted(where.values()) == ["0", "1", "2"]
        assert (await fleet.stop("engine-5", within_s=120.0)).code == 0
    finally:
        remove(group)


async def run_until(fleet: Fleet, name: str, gpus: str) -> None:
    """The actor answers before it has learned of all its GPUs, and wakes nobody when it has."""
    while (about := await fleet.about(name, timeout_s=120.0)).gpus != gpus:
        assert about.code is None, about.message
        await asyncio.sleep(0.1)
