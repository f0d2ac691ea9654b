"""Real servers of SGLang, each the child of an actor: one is killed while the run goes on.

In the lane of SGLang, as it needs its environment. One run for all of it, as servers start slowly.
"""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from deploy.summary import read_summary
from protocol.messages import EngineState
from tests.contract.conftest import write_model
from tests.contract.served import interpreter
from tests.ray.conftest import Run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


def server_of(actor: int) -> psutil.Process:
    """The server that runs for an engine's actor."""
    (server,) = (child for child in psutil.Process(actor).children(recursive=True) if any(word.endswith("launch.py") for word in child.cmdline()))
    return server


async def test_a_killed_server_is_started_again_by_its_actor_and_costs_no_group(run: Run):
    engine = {"kind": "sglang", "device": "cpu", "python": interpreter(), "count": 2, "slots": 16}
    run.sections["weights"]["apply_deadline_s"] = 8.0  # the end of the run waits for the server that starts, in multiples of it
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
        engines = [await fleet.about(f"engine-{index}", timeout_s=20.0) for index in (0, 1)]
        assert engines[0] is not None
        assert engines[1] is not None
        assert (engines[0].node, engines[0].gpus) != (engines[1].node, engines[1].gpus), "each has a GPU of its own, as far as Ray counts them"
        host = engines[1].pid
        (before,) = [one for one in await run.registry.engines() if one.engine_id.endswith("engine-1")]
        assert (before.kind, before.pid) == ("sglang", host)
        server = server_of(host)
        os.killpg(server.pid, signal.SIGKILL)

        async def again() -> bool:
            found = [one for one in await run.registry.engines() if one.engine_id == before.engine_id]
            return [(one.state, one.pid, one.boot_nonce != before.boot_nonce) for one in found] == [(EngineState.STARTING, host, True)]

        await run.until(again)
        trained = (await run.ledger.status()).trained
        await run.trained(trained + 4)
        assert server_of(host).pid != server.pid
        up.send_signal(signal.SIGTERM)
        said = await run.done("up")
        assert await fleet.names() == []
    assert not psutil.pid_exists(server.pid)
    summary = read_summary(run.folder / "run")
    assert summary["steps"] >= 6, said
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["groups_dead"], summary["disagreements"]) == (0, 0, {}, [])
    assert {name[-8:]: one["boots"] for name, one in summary["engines"].items()} == {"engine-0": 1, "engine-1": 2}
