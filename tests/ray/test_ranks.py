"""A trainer of two ranks on two nodes: the node of the second is lost in the middle of a run."""

from __future__ import annotations

import asyncio

import pytest

from deploy.ray.placement_group import find, kept
from deploy.summary import read_summary
from producer.ray_actor import namespace
from tests.ray.conftest import Run, Simulated


async def node_of(run: Run, name: str) -> str:
    """Where the bundle of `name` lies; empty while it is on its way."""
    import ray

    (bundle,) = (await kept(run.client, run.keys.run))[1][name]
    group = await asyncio.to_thread(find, namespace(run.keys.run))
    table = await asyncio.to_thread(ray.util.placement_group_table, group)
    return str(table["bundles_to_node_id"].get(bundle, ""))


@pytest.mark.timeout(1200)
async def test_two_ranks_train_on_two_nodes_and_go_on_from_the_newest_checkpoint_when_one_node_is_lost(run: Run, cluster: Simulated):
    run.sections["placement"]["engine_gpus"] = 0
    run.sections["ray"]["trainer_cpus"] = 5.0  # two of these are more than a node has
    run.sections["trainer"] = {"ranks": 2}
    run.sections["engine"]["count"] = run.sections["producer"]["count"] = 1
    run.sections["stop"]["steps"] = 20
    async with run.fleet() as fleet:
        await run.up("--new")
        await run.trained(3)
        leader = await fleet.about("trainer-0", timeout_s=120.0)
        assert leader is not None
        lost = await node_of(run, "rank-1")
        assert lost != leader.node
        assert leader.node == await node_of(run, "trainer-0")
        cluster.remove(lost)
        cluster.add(gpus=2)
        said = await run.done("up")
        assert await fleet.names() == []
    summary = read_summary(run.folder / "run")
    assert summary["steps"] == 20, said
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["disagreements"]) == (0, 0, [])
    assert summary["incarnations"] >= 2, "the trainer began again"
    assert "trainer-0 is back; failure 1 was: rank 1 is gone" in said
