"""A small real run on this machine that is scaled up and down meanwhile: who is added works for it, who leaves loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from deploy.cli import main
from deploy.demo import task
from deploy.redis_server import server_command
from deploy.summary import read_summary
from deploy.up.process import identity_of
from deploy.up.records import read_records
from protocol.connection import Client, connect
from protocol.errors import RollstreamError
from protocol.keys import Keys
from protocol.messages import EngineState, ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, wakeups
from tests.producer.engine.conftest import write_model
from weightsync.registry import Registry

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "rollout": {"group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 24},
    "buffer": {"groups_per_step": 4, "chunk_groups": 4},
    "engine": {"count": 1, "slots": 8, "pace_s": 0.05},
    "producer": {"count": 1, "max_inflight_groups": 3},
    "stop": {"steps": 100_000},
    "placement": {"wait_seconds": 300.0},
    "http": {"port": 0},
}
"""A response takes a second, so that some are always under way where somebody leaves."""


def write_run(folder: Path) -> Path:
    train, _ = task.write_data(folder, 0)
    own = {
        "run": {"name": "t", "dir": str(folder / "run")},
        "model": {"path": str(write_model(folder / "model", seed=1))},
        "data": {"path": str(train)},
    }
    path = folder / "run.toml"
    tables = own | SECTIONS
    path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items()))
    return path


@contextlib.asynccontextmanager
async def up(path: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """While the context is open, or until it ends by itself."""
    with (path.parent / "up.log").open("w") as log:
        command = (sys.executable, "-m", "deploy.cli", "up", "--new", "--no-live", "-c", str(path))
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        for _ in range(2):  # asked twice, it ends everybody at once
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        await process.wait()


class Watched:
    """The run, as Redis has it."""

    def __init__(self, path: Path, client: Client) -> None:
        self.path, self.client, self.keys = path, client, Keys("t")

    async def trained(self, *, more: int) -> None:
        """Return once so many steps more are trained."""
        ledger, goal = RedisLedger(self.client, self.keys), -1
        async with wakeups(self.client, self.keys) as waker:
            while True:
                mark = waker.mark(*Topic)
                with contextlib.suppress(RollstreamError):  # no server or no run yet
                    trained = (await ledger.status()).trained
                    goal = trained + more if goal < 0 else goal
                    if trained >= goal:
                        return
                await waker.wait(*Topic, since=mark, timeout_s=1.0)

    async def engines(self, *wanted: int) -> None:
        """Return once exactly these are routable."""
        async with wakeups(self.client, self.keys) as waker:
            while True:
                mark = waker.mark(Topic.ENGINES)
                found = await Registry(self.client, self.keys).engines()
                if {one.engine_id for one in found if one.state is EngineState.ROUTABLE} == {f"t-engine-{index}" for index in wanted}:
                    return
                await waker.wait(Topic.ENGINES, since=mark, timeout_s=1.0)

    async def worked(self, *, producers: int, engines: int) -> None:
        """Return once each of so many has brought something."""
        at_work = Presence(self.client, self.keys, "producer", ProducerStatus)
        async with wakeups(self.client, self.keys) as waker:
            while True:
                mark = waker.mark(*Topic)
                put = sum(one.groups_put > 0 for one in await at_work.members())
                written = sum(one.generated_tokens > 0 for one in await Registry(self.client, self.keys).engines())
                if (put, written) == (producers, engines):
                    return
                await waker.wait(*Topic, since=mark, timeout_s=1.0)

    async def command(self, *words: str) -> None:
        assert await asyncio.to_thread(main, [*words, "-c", str(self.path)]) == 0


@pytest.mark.demo
@pytest.mark.timeout(900)
async def test_a_run_is_scaled_up_and_down_while_it_goes_on_and_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_run(tmp_path)
    client = connect(server_command(tmp_path / "run" / "redis").url, deadline_s=60.0)
    run = Watched(path, client)
    try:
        async with up(path) as process, asyncio.timeout(800):
            await run.trained(more=1)
            await run.command("scale", "producers", "3")
            assert "producers: 3 now; added producer-1, producer-2; left none" in capsys.readouterr().out
            await run.command("scale", "engines", "2")
            assert "engines: 2 now; added engine-1; left none" in capsys.readouterr().out
            await run.engines(0, 1)
            await run.worked(producers=3, engines=2)
            await run.command("status")
            assert "3 of 3 producers, 2 of 2 engines" in capsys.readouterr().out

            await run.command("scale", "engines", "1")
            assert "engines: 1 now; added none; left engine-1" in capsys.readouterr().out
            await run.command("scale", "producers", "1")
            assert "producers: 1 now; added none; left producer-1, producer-2" in capsys.readouterr().out
            await run.engines(0)
            await run.trained(more=1)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0, (tmp_path / "up.log").read_text()[-4000:]
    finally:
        await client.aclose()
    summary = read_summary(tmp_path / "run")
    assert (summary["groups_lost"], summary["groups_duplicated"], summary["disagreements"]) == (0, 0, [])
    assert summary["groups_dead"] == {}
    assert summary["groups_released"].keys() <= {"given_back"}, "no group failed, as requests of the engine that left went on elsewhere"
    left = [event.fields for event in await read_audit(tmp_path / "run" / "audit.jsonl") if event.op == "engine_left"]
    assert [(one["engine_id"], one["reason"]) for one in left if one["engine_id"] == "t-engine-1"] == [("t-engine-1", "stopped")]
    assert summary["engines"]["t-engine-1"]["boots"] == 1
    assert not any(identity_of(record.identity.pid) == record.identity for record in read_records(tmp_path / "run"))
