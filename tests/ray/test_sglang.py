"""Real servers of SGLang, each the child of an actor: one is killed while the run goes on, then its whole node; and one over two nodes loses the second.

In the lane of SGLang, as it needs its environment. One run for each number of nodes, as servers start slowly.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from deploy.summary import Summary, read_summary
from protocol.messages import EngineState, EngineStatus
from tests.contract.conftest import write_model
from tests.contract.served import interpreter
from tests.ray.conftest import Run, Simulated, has_moved

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Simulated]:
    """An engine a node, or one over two, and a node to spare."""
    simulated = Simulated()
    try:
        for _ in range(3):
            simulated.add(gpus=1)
        yield simulated
    finally:
        simulated.close()


def server_of(actor: int) -> psutil.Process:
    """The server, or the part of one, that runs for an engine's actor."""
    (server,) = (child for child in psutil.Process(actor).children(recursive=True) if any(word.endswith("launch.py") for word in child.cmdline()))
    return server


async def test_a_killed_server_and_then_its_lost_node_cost_no_group_and_it_comes_back_elsewhere_with_the_newest_weights(run: Run, cluster: Simulated):
    engine = {"kind": "sglang", "device": "cpu", "python": interpreter(), "count": 2, "slots": 16}
    run.sections["placement"]["gpus_per_node"] = 1
    run.sections |= {
        "engine": engine,
        "model": {"path": str(write_model(run.folder / "words", 1))},
        "rollout": {"group_size": 2, "max_prompt_tokens": 16, "max_new_tokens": 64},
        "stop": {"steps": 100_000},
    }
    async with run.fleet() as fleet:
        up = await run.up("--new")
        await run.engines(0, 1)
        await run.trained(2)
        engines = [await fleet.about(f"engine-{index}", timeout_s=120.0) for index in (0, 1)]
        assert engines[0] is not None
        assert engines[1] is not None
        assert engines[0].node != engines[1].node, "each has a GPU of its own, as far as Ray counts them"
        host = engines[1].pid
        before = await registered(run, 1)
        assert before is not None
        assert (before.kind, before.pid) == ("sglang", host)
        server = server_of(host)
        os.killpg(server.pid, signal.SIGKILL)

        async def again() -> bool:
            found = await registered(run, 1)
            return found is not None and (found.state, found.pid, found.boot_nonce != before.boot_nonce) == (EngineState.STARTING, host, True)

        await run.until(again)
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 4)
        second = server_of(host)
        assert second.pid != server.pid

        cluster.remove(engines[1].node)
        await run.until(partial(has_moved, fleet, "engine-1", engines[1].node))
        assert not second.is_running(), "a server never outlives its host"
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 1)
        await run.engines(0, 1)
        back = await registered(run, 1)
        assert back is not None
        assert back.pid != host
        assert back.version is not None
        assert back.version.n > trained, "it came back to the newest weights"
        up.send_signal(signal.SIGTERM)
        said = await run.done("up")
        assert await fleet.names() == []
    assert ended_whole(run, said)["engines"][before.engine_id]["boots"] == 3
    cluster.add(gpus=1)


async def test_an_engine_over_two_nodes_serves_takes_every_version_and_begins_again_on_another_node_when_it_loses_one(run: Run, cluster: Simulated):
    run.sections["placement"] |= {"engine_gpus": 2, "gpus_per_node": 1}
    run.sections |= {
        "engine": {"kind": "sglang", "device": "cpu", "python": interpreter(), "count": 1, "tp": 2, "nodes": 2, "slots": 8},
        "model": {"path": str(write_model(run.folder / "words", 1))},
        "rollout": {"group_size": 2, "max_prompt_tokens": 16, "max_new_tokens": 16},
        "stop": {"steps": 100_000},
    }
    run.sections["producer"]["count"] = 1
    async with run.fleet() as fleet:
        up = await run.up("--new")
        await run.trained(4)
        first, second = [await fleet.about(name, timeout_s=20.0) for name in ("engine-0", "engine-0-node-1")]
        assert first is not None
        assert second is not None
        assert first.node != second.node
        words = [server_of(about.pid).cmdline() for about in (first, second)]
        met = words[0][words[0].index("--dist-init-addr") + 1]
        assert met.startswith(f"{first.address}:")
        for rank, word in enumerate(words):
            assert (word[word.index("--node-rank") + 1], word[word.index("--dist-init-addr") + 1]) == (str(rank), met)
        before = await registered(run, 0)
        assert before is not None
        assert before.version is not None
        assert before.version.n > 0, "what it serves has been updated"

        cluster.remove(second.node)
        await run.until(partial(has_moved, fleet, "engine-0-node-1", second.node))

        async def again() -> bool:
            found = await registered(run, 0)
            return found is not None and (found.state, found.boot_nonce != before.boot_nonce) == (EngineState.ROUTABLE, True)

        await run.until(again)
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 3)
        back = await registered(run, 0)
        assert back is not None
        assert back.version is not None
        assert back.version.n > before.version.n
        up.send_signal(signal.SIGTERM)
        said = await run.done("up")
        assert await fleet.names() == []
    ended_whole(run, said)


def ended_whole(run: Run, said: str) -> Summary:
    summary = read_summary(run.folder / "run")
    assert summary["steps"] >= 7, said
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["groups_dead"], summary["disagreements"]) == (0, 0, {}, [])
    return summary


async def registered(run: Run, index: int) -> EngineStatus | None:
    """None between two lives of a server."""
    return next((one for one in await run.registry.engines() if one.engine_id.endswith(f"engine-{index}")), None)
