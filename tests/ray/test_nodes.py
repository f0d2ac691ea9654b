"""Engines over two nodes each, on a simulated cluster. In SGLang's place is a program that does nothing, so what is seen is who runs where, and who is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from producer.engine.nodes import NodeCall, NodeStatus, calls, statuses
from producer.ray_actor import About, namespace
from producer.ray_fleet import Fleet
from tests.ray.conftest import Run, Simulated, has_moved

pytestmark = pytest.mark.timeout(480)
GPUS = 2
"""Of each node of the cluster, and of each node of an engine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Simulated]:
    """Room for two engines."""
    simulated = Simulated()
    try:
        for _ in range(4):
            simulated.add(gpus=GPUS)
        yield simulated
    finally:
        simulated.close()


@pytest.fixture
def idle(run: Run, tmp_path: Path) -> Run:
    """Engines of a server that never comes to its first token."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    run.sections["engine"] = {"kind": "sglang", "device": "cpu", "python": str(program), "count": 1, "slots": 4, "tp": 4, "nodes": 2}
    run.sections["placement"] |= {"engine_gpus": 2 * GPUS, "gpus_per_node": GPUS}
    run.sections["producer"]["count"] = 1
    return run


async def there(fleet: Fleet, name: str) -> About:
    about = await fleet.about(name, timeout_s=60.0)
    assert about is not None, f"{name} does not answer"
    return about


class Meetings:
    """What both sides of each engine have told in Redis."""

    def __init__(self, run: Run) -> None:
        self._calls, self._statuses, self._run = calls(run.client, run.keys), statuses(run.client, run.keys), run

    async def met(self, index: int, *, not_boot: str = "") -> NodeCall:
        """The first life but `not_boot` that node 1 is a part of."""
        found: list[NodeCall] = []

        async def meets() -> bool:
            call, status = await self._of(index)
            if call is not None and status is not None and call.boot_nonce == status.boot_nonce != not_boot and not status.ended:
                found.append(call)
            return bool(found)

        await self._run.until(meets)
        return found[0]

    async def _of(self, index: int) -> tuple[NodeCall | None, NodeStatus | None]:
        name = f"{self._run.keys.run}-engine-{index}"
        call = next((one for one in await self._calls.members() if one.engine_id == name), None)
        return call, next((one for one in await self._statuses.members() if (one.engine_id, one.rank) == (name, 1)), None)


def rooms(run: Run) -> list[str]:
    import ray

    named = (group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED")
    return sorted(name.partition("/")[2] for name in named if name.startswith(f"{namespace(run.keys.run)}/"))


async def test_engines_over_two_nodes_are_started_scaled_and_moved_whole(idle: Run, cluster: Simulated):
    async with idle.fleet() as fleet:
        up = await idle.up("--new")
        meetings = Meetings(idle)
        await idle.trained(0)  # the trainer makes the run, and nothing comes to it
        first = await meetings.met(0)
        node_0, node_1 = await there(fleet, "engine-0"), await there(fleet, "engine-0-node-1")
        assert node_0.node != node_1.node
        assert (node_0.gpus, node_1.gpus) == ("0,1", "0,1"), "each sees all GPUs of its own node, in their order"
        assert first.address.startswith(f"{node_0.address}:"), "engine.host was not set: the others find node 0 where Ray does"

        assert "added engine-1, engine-1-node-1" in await idle.scale("engines", 2)
        await meetings.met(1)
        nodes = {(await there(fleet, name)).node for name in await fleet.names("engine")}
        assert (len(nodes), rooms(idle)) == (4, ["engine-0", "engine-1"])

        idle.sections["placement"]["wait_seconds"] = 3.0
        await idle.command("scale", "deploy.cli", "scale", "engines", "3", "-c", str(idle.file()))
        said = await idle.done("scale", 75)
        assert "no room within 3 s for 2 × (2 GPU 1 CPU), each on a node of its own (engine-2); the cluster has 5 nodes with 8 GPUs" in said, said
        assert "GPUs of each node: 2, 2, 2, 2, 0" in said
        assert rooms(idle) == ["engine-0", "engine-1"]

        assert "left engine-1, engine-1-node-1" in await idle.scale("engines", 1)
        assert (await fleet.names("engine"), rooms(idle)) == (["engine-0", "engine-0-node-1"], ["engine-0"])

        cluster.remove(node_1.node)
        await idle.until(partial(has_moved, fleet, "engine-0-node-1", node_1.node))
        moved = await there(fleet, "engine-0-node-1")
        assert moved.node in nodes - {node_0.node, node_1.node}
        assert (await there(fleet, "engine-0")).pid == node_0.pid
        second = await meetings.met(0, not_boot=first.boot_nonce)
        assert second.address != first.address, "a life that lost a node begins anew"
        up.send_signal(signal.SIGTERM)
        await idle.done("up")
        assert (await fleet.names(), rooms(idle)) == ([], [])
    cluster.add(gpus=GPUS)


@pytest.mark.parametrize(
    ("nodes", "gpus", "told"),
    [
        (5, 5, "no room within 3 s for 5 × (1 GPU 0.5 CPU), each on a node of its own (engine-0 of: "),
        (2, 6, "no room within 3 s for 2 × (3 GPU 1.5 CPU), each on a node of its own (engine-0 of: "),
    ],
    ids=["too few nodes", "nodes of too few GPUs"],
)
async def test_a_cluster_without_room_for_all_nodes_of_an_engine_is_told_within_the_bound(idle: Run, nodes: int, gpus: int, told: str):
    idle.sections["engine"] |= {"tp": gpus, "nodes": nodes}
    idle.sections["placement"] |= {"engine_gpus": gpus, "gpus_per_node": 3, "wait_seconds": 3.0}
    await idle.up("--new")
    said = await idle.done("up", 75)
    assert told in said
    assert "5 nodes with 8 GPUs" in said
    assert "GPUs of each node: 2, 2, 2, 2, 0" in said
    async with idle.fleet() as fleet:
        assert (await fleet.names(), rooms(idle)) == ([], [])
