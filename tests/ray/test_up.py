"""Runs on a simulated cluster: a node is lost, the command is lost, the run is scaled, there is no room."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from deploy.summary import read_summary
from producer.ray_actor import namespace
from producer.ray_fleet import Fleet
from protocol.keys import Keys
from tests.ray.conftest import Run, Simulated, has_moved

EVERYONE = ["engine-0", "engine-1", "producer-0", "producer-1", "trainer-0"]


async def has_started(fleet: Fleet, name: str) -> bool:
    return await fleet.about(name, timeout_s=10.0) is not None


@pytest.mark.timeout(1200)
async def test_a_run_whose_node_is_lost_ends_with_nothing_lost(run: Run, cluster: Simulated):
    async with run.fleet() as fleet:
        await run.up("--new")
        await run.trained(3)
        before = {name: await fleet.about(name, timeout_s=120.0) for name in await fleet.names()}
        assert sorted(before) == EVERYONE
        lost, trainer = before["engine-1"].node, before["trainer-0"]
        if trainer.node != lost:  # without it the run might be over before everyone has moved
            os.kill(trainer.pid, signal.SIGSTOP)
        cluster.remove(lost)
        for name in (name for name, about in before.items() if about.node == lost):
            await run.until(partial(has_moved, fleet, name, lost))
        if trainer.node != lost:
            os.kill(trainer.pid, signal.SIGCONT)
        said = await run.done("up")
        assert await fleet.names() == [], "who has ended leaves nothing on the cluster"
    cluster.add(gpus=2)
    summary = read_summary(run.folder / "run")
    assert summary["steps"] == 30, said
    assert summary["groups_lost"] == 0
    assert summary["groups_duplicated"] == 0
    assert not summary["disagreements"]
    assert summary["engines"][f"{run.keys.run}-engine-1"]["boots"] >= 2


@pytest.mark.timeout(1200)
async def test_a_run_goes_on_without_its_command_is_scaled_and_is_found_again(run: Run):
    run.sections["stop"]["steps"] = 10_000
    run.sections["engine"]["count"] = run.sections["producer"]["count"] = 1
    async with run.fleet() as fleet:
        up = await run.up("--new")
        await run.trained(1)
        up.kill()
        await up.wait()
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 2)

        assert "added producer-1, producer-2" in await run.scale("producers", 3)
        assert "added engine-1" in await run.scale("engines", 2)
        await run.engines(0, 1)
        assert await fleet.names() == ["engine-0", "engine-1", "producer-0", "producer-1", "producer-2", "trainer-0"]

        assert "left producer-1, producer-2" in await run.scale("producers", 1)
        assert "left engine-1" in await run.scale("engines", 1)
        await run.engines(0)
        assert await fleet.names() == ["engine-0", "producer-0", "trainer-0"]
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 1)

        by_hand = await run.command("producer", "producer.main", "-c", str(run.file()), "--ray", "--index", "7")
        await run.until(lambda: has_started(fleet, "producer-7"))
        by_hand.send_signal(signal.SIGTERM)
        await run.done("producer")
        await fleet.kill("producer-0")

        up = await run.up("--resume")
        await run.until(lambda: has_started(fleet, "producer-0"))
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 4)
        up.send_signal(signal.SIGTERM)
        said = await run.done("up")
        assert "trainer-0 goes on" in said
        assert "was stopped at step" in said
        assert await fleet.names() == []
    summary = read_summary(run.folder / "run")
    assert summary["groups_lost"] == 0
    assert summary["groups_duplicated"] == 0
    assert summary["engines"][f"{run.keys.run}-engine-0"]["boots"] == 1, "what ran was not started again"


@pytest.mark.timeout(900)
async def test_a_colocated_run_takes_turns_on_one_bundle_to_its_end(run: Run):
    run.sections["placement"]["layout"] = "colocated"
    run.sections["buffer"]["pipeline_depth"] = 0
    run.sections["engine"] |= {"count": 1, "pace_s": 0.0}
    run.sections["producer"]["count"] = 1
    run.sections["stop"]["steps"] = 3
    async with run.fleet() as fleet:
        await run.up("--new")
        for name in ("trainer-0", "engine-0"):
            await run.until(partial(has_started, fleet, name))
        trainer, engine = [await fleet.about(name, timeout_s=120.0) for name in ("trainer-0", "engine-0")]
        assert trainer.node == engine.node
        await run.done("up")
        assert await fleet.names() == []
    summary = read_summary(run.folder / "run")
    assert (summary["steps"], summary["groups_lost"], summary["groups_duplicated"]) == (3, 0, 0)


@pytest.mark.timeout(900)
async def test_a_cluster_that_is_too_small_is_told_within_the_bound_and_nothing_stays_reserved(run: Run):
    run.sections["engine"]["count"] = 5
    run.sections["placement"]["wait_seconds"] = 3.0
    await run.up("--new")
    said = await run.done("up", 75)
    assert "no room within 3 s for 5 × (1 GPU 0.5 CPU), 1 × (0.5 CPU)" in said
    assert "engine 5 × 1 GPUs" in said
    assert "3 nodes with 4 GPUs" in said
    async with run.fleet() as fleet:
        import ray

        assert await fleet.names() == []
        groups = ray.util.placement_group_table().values()
        assert not [group for group in groups if group["name"].startswith(namespace(run.keys.run)) and group["state"] != "REMOVED"]
    assert not await run.client.exists(Keys(run.keys.run).placement)


@pytest.mark.timeout(900)
async def test_what_only_one_machine_reaches_is_refused_before_anything_starts(run: Run):
    del run.sections["weights"]
    await run.up("--new")
    assert "weights.store is empty, which is the memory of one machine, and the cluster has 3" in await run.done("up", 2)
