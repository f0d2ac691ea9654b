"""A run on two real servers of SGLang, one of which is killed: it learns, loses nothing, and the server comes back by itself.

One run for all of it, as a start takes the better part of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from deploy.demo import folder as folders
from deploy.demo.warm_start import warm_start
from deploy.redis_server import socket_path
from deploy.summary import read_summary
from deploy.up.process import identity_of
from deploy.up.records import read_records
from deploy.up.supervisor import Child, Role
from protocol.connection import connect
from protocol.keys import Keys
from protocol.messages import EngineState, EngineStatus
from tests.contract.served import interpreter
from weightsync.registry import Registry

pytestmark = [pytest.mark.sglang, pytest.mark.faults, pytest.mark.timeout(3000)]
STEPS = 60
KILL_AT = 8
DEADLINE_S = 2400.0
VICTIM = "demo-engine-1"
SETS = ("engine.count=2", "engine.slots=64", "trainer.lr=2e-3", "stop.steps=100000", "http.port=0")
"""The demo's task, at a rate of learning that shows in sixty steps; it ends when the test has seen enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What became of the run."""

    code: int
    said: str
    rewards: list[float]
    summary: dict[str, Any]
    before: EngineStatus
    after: EngineStatus
    folder: Path


class _Run:
    def __init__(self, folder: Path) -> None:
        demo = folders.Demo(folder=folder, seed=0, steps=STEPS, engine=folders.EngineKind.SGLANG, engine_python=interpreter())
        folders.claim(demo)
        folders.fill(demo)
        warm_start(demo.model, demo.seed)
        self.folder = folder
        command = [sys.executable, "-m", "deploy.cli", "up", "-c", str(demo.config), "--new", "--no-live"]
        self._log = (folder / "said.log").open("wb")
        self.up = subprocess.Popen([*command, *(word for one in SETS for word in ("--set", one))], stdout=self._log, stderr=self._log)

    def rewards(self) -> list[float]:
        with contextlib.suppress(FileNotFoundError):
            return [orjson.loads(line)["reward"] for line in (self.folder / "metrics.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return []

    def engine(self) -> EngineStatus | None:
        """The victim, if it may be asked."""

        async def look() -> EngineStatus | None:
            client = connect(f"unix://{socket_path(self.folder / 'redis')}", deadline_s=60.0)
            try:
                return next((one for one in await Registry(client, Keys("demo")).engines() if one.engine_id == VICTIM), None)
            finally:
                await client.aclose()

        found = asyncio.run(look())
        return found if found is not None and found.state is EngineState.ROUTABLE else None

    def until(self, what: str, found: Any) -> Any:
        end = time.monotonic() + DEADLINE_S
        while not (answer := found()):
            assert self.up.poll() is None, f"waiting for {what}, the run ended:\n{self.said()}"
            assert time.monotonic() < end, f"no {what}:\n{self.said()}"
            time.sleep(0.25)
        return answer

    def said(self) -> str:
        return (self.folder / "said.log").read_text()[-6000:]

    def kill_server(self) -> None:
        """The server, not its host."""
        (host,) = (record.identity.pid for record in read_records(self.folder) if record.child == Child(Role.ENGINE, 1))
        (server,) = (child for child in psutil.Process(host).children() if any(word.endswith("launch.py") for word in child.cmdline()))
        os.killpg(server.pid, signal.SIGKILL)

    def end(self) -> int:
        if self.up.poll() is None:
            self.up.terminate()
        code = self.up.wait(300)
        self._log.close()
        return code


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    run = _Run(tmp_path_factory.mktemp("sglang") / "demo")
    try:
        run.until("steps before the kill", lambda: len(run.rewards()) >= KILL_AT)
        before = run.until("engine to kill", run.engine)
        run.kill_server()
        after = run.until("engine that is back", lambda: (one := run.engine()) is not None and one.boot_nonce != before.boot_nonce and one)
        run.until("sixty steps", lambda: len(run.rewards()) >= STEPS)
        code = run.end()
        yield Told(
            code=code,
            said=run.said(),
            rewards=run.rewards(),
            summary=read_summary(run.folder),
            before=before,
            after=after,
            folder=run.folder,
        )
    finally:
        if run.up.poll() is None:
            run.end()


def test_it_learns_through_real_servers(told: Told):
    first, last = sum(told.rewards[:10]) / 10, sum(told.rewards[STEPS - 10 : STEPS]) / 10
    assert last - first >= 0.2, f"mean reward of ten steps: {first:.3f}, then {last:.3f}"


def test_a_killed_server_costs_no_group_and_the_run_ends_in_good_order(told: Told):
    assert told.code == 0, told.said
    figures = {name: told.summary[name] for name in ("groups_lost", "groups_duplicated", "over_k_tokens", "steps_over_k", "disagreements")}
    assert figures == {"groups_lost": 0, "groups_duplicated": 0, "over_k_tokens": 0, "steps_over_k": 0, "disagreements": []}
    assert [record.child for record in read_records(told.folder) if identity_of(record.identity.pid) == record.identity] == []


def test_the_server_is_back_by_itself_and_goes_to_the_newest_version(told: Told):
    assert told.after.pid == told.before.pid, "its host was never gone"
    assert told.after.version is not None
    assert told.before.version is not None
    assert told.after.version > told.before.version
    engines = told.summary["engines"]
    assert {name: (engine["at_final"], engine["went_back"]) for name, engine in engines.items()} == {"demo-engine-0": (True, 0), VICTIM: (True, 0)}
