"""A simulated Ray cluster: three nodes on this machine, with GPUs that are only counted. And a small real run for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from deploy.redis_server import server_binary, wait_ready
from producer.ray_fleet import Fleet, connected
from protocol.connection import Client
from protocol.errors import RunMissing
from protocol.keys import Keys
from protocol.messages import EngineState
from protocol.wakeups import Topic, wakeups
from tests.producer.engine.conftest import write_model
from weightsync.registry import Registry

os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ROOT = Path(__file__).parents[2]
_NODE: dict[str, Any] = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
_SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 4}
"""A node that was killed is known to be lost after seconds; usually it takes Ray most of a minute."""
_REDIS_HOST = "127.0.0.77"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that lies here is of the lane `ray`. Ray leaves sockets to the collector, and warns of its own old calls."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)
            for what in (
                "ignore::ResourceWarning",
                "ignore::DeprecationWarning:ray",
                "ignore::FutureWarning:ray",
                "ignore::pytest.PytestUnraisableExceptionWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(what))


@pytest.fixture(scope="module", autouse=True)
def no_leaked_descriptors() -> None:
    """In place of the check of all other tests: Ray keeps files and sockets open in a process that was once a driver."""


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A server as a cluster needs it: reached by address. Not by 127.0.0.1, which would be refused where there are several machines."""
    with tempfile.TemporaryDirectory(prefix="rs-redis-") as folder, socket.create_server((_REDIS_HOST, 0)) as free:
        port = free.getsockname()[1]
        free.close()
        options = {
            "bind": _REDIS_HOST,
            "port": str(port),
            "dir": folder,
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        argv = [str(server_binary()), *(word for key, value in options.items() for word in (f"--{key}", value))]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        url = f"redis://{_REDIS_HOST}:{port}"
        try:
            asyncio.run(wait_ready(url, timeout_s=60.0))
            yield url
        finally:
            process.terminate()
            process.wait(60)


class Simulated:
    """Nodes with addresses of their own, as drivers join the node of their machine: that is the first one, which has no GPU and stays."""

    def __init__(self) -> None:
        from ray._private import node
        from ray.cluster_utils import Cluster

        node.time = SimpleNamespace(monotonic=lambda: time.monotonic() / 10, time=time.time, sleep=time.sleep)

        class Patient(Cluster):  # type: ignore[misc]
            """Ray gives a node half a minute to start and as long to appear, and has no setting for either."""

            def _wait_for_node(self, node: Any, timeout: float = 300.0) -> None:
                super()._wait_for_node(node, timeout)

        self._hosts = (f"127.0.0.{number}" for number in range(2, 255))
        self._cluster = Patient(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 0, "_system_config": _SOON, **_NODE})
        self.address: str = self._cluster.address

    def add(self, *, gpus: int) -> None:
        self._cluster.add_node(num_cpus=8, num_gpus=gpus, node_ip_address=next(self._hosts), **_NODE)

    def remove(self, node: str) -> None:
        """As if its machine had gone: nothing there ends in good order."""
        self._cluster.remove_node(next(each for each in self._cluster.list_all_nodes() if each.node_id == node), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Simulated]:
    simulated = Simulated()
    try:
        simulated.add(gpus=2)
        simulated.add(gpus=2)
        yield simulated
    finally:
        simulated.close()


class Run:
    """A run of its own: files, commands, and what Redis says of it."""

    def __init__(self, folder: Path, client: Client, keys: Keys, url: str, address: str) -> None:
        self.folder, self.client, self.keys, self.address = folder, client, keys, address
        self.ledger, self.registry = RedisLedger(client, keys), Registry(client, keys)
        self._commands: dict[str, asyncio.subprocess.Process] = {}
        model = write_model(folder / "model", seed=3)
        rows = [{"prompt": f"{i}+{j}=", "label": str(i + j)} for i in range(8) for j in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.sections: dict[str, dict[str, Any]] = {
            "run": {"name": keys.run, "dir": str(folder / "run")},
            "redis": {"url": url},
            "model": {"path": str(model)},
            "data": {"path": str(folder / "rows.jsonl")},
            "rollout": {"group_size": 2, "max_prompt_tokens": 16, "max_new_tokens": 8},
            "buffer": {"groups_per_step": 4, "chunk_groups": 2, "byte_budget": 50_000_000, "slot_seconds": 8.0},
            "weights": {"store": str(folder / "weights")},
            "engine": {"kind": "embedded", "count": 2, "slots": 16, "pace_s": 0.2},
            "producer": {"count": 2, "max_inflight_groups": 4},
            "checkpoint": {"every_steps": 4, "every_seconds": 0.0},
            "stop": {"steps": 30},
            "http": {"port": 0},
            "placement": {"engine_gpus": 1, "gpus_per_node": 2, "wait_seconds": 300.0},
            "ray": {"address": address, "producer_cpus": 0.5, "engine_cpus": 0.5, "trainer_cpus": 0.5},
        }

    def file(self) -> Path:
        path = self.folder / "run.toml"
        lines = [line for name, values in self.sections.items() for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()))]
        path.write_text("\n".join(lines) + "\n")
        return path

    async def command(self, name: str, *words: str) -> asyncio.subprocess.Process:
        """`python -m …` in a process of its own, with a log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._commands[name] = await asyncio.create_subprocess_exec(sys.executable, "-m", *words, cwd=ROOT, stdout=log, stderr=log, env=environment)
        return self._commands[name]

    async def up(self, mode: str) -> asyncio.subprocess.Process:
        return await self.command("up", "deploy.cli", "up", "-c", str(self.file()), mode, "--no-live")

    async def done(self, name: str, code: int = 0) -> str:
        """Wait for its end; what it said."""
        found = await self._commands[name].wait()
        said = self.log(name)
        assert found == code, f"{name} ended with {found}:\n{said}"
        return said

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-6000:]

    async def scale(self, what: str, count: int) -> str:
        await self.command("scale", "deploy.cli", "scale", what, str(count), "-c", str(self.file()))
        return await self.done("scale")

    async def trained(self, steps: int) -> None:
        """Return once so many steps are trained; fails when `up` ends before."""
        async with wakeups(self.client, self.keys) as waker:
            while True:
                mark = waker.mark(*Topic)
                with contextlib.suppress(RunMissing):
                    if (await self.ledger.status()).trained >= steps:
                        return
                up = self._commands.get("up")
                assert up is None or up.returncode in (None, -9), self.log("up")
                await waker.wait(*Topic, since=mark, timeout_s=1.0)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Ask again and again: what becomes of an actor wakes nobody. Fails when `up` ends badly before."""
        while not await holds():
            up = self._commands.get("up")
            assert up is None or up.returncode in (None, -9, 0), self.log("up")
            await asyncio.sleep(0.2)

    async def engines(self, *wanted: int) -> None:
        """Return once exactly these engines are routable."""
        names = {f"{self.keys.run}-engine-{index}" for index in wanted}
        async with wakeups(self.client, self.keys) as waker:
            while True:
                mark = waker.mark(*Topic)
                if {engine.engine_id for engine in await self.registry.engines() if engine.state is EngineState.ROUTABLE} == names:
                    return
                await waker.wait(*Topic, since=mark, timeout_s=1.0)

    @contextlib.asynccontextmanager
    async def fleet(self) -> AsyncIterator[Fleet]:
        async with connected(self.address, self.keys.run):
            yield Fleet(self.keys.run)

    async def close(self) -> None:
        for process in self._commands.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        async with self.fleet() as fleet:
            from producer.ray_actor import give_back

            for name in await fleet.names():
                await fleet.kill(name)
            await asyncio.to_thread(give_back, self.keys.run)


async def has_moved(fleet: Fleet, name: str, away_from: str) -> bool:
    """The processes of a node that was killed answer until they notice."""
    about = await fleet.about(name, timeout_s=600.0)
    assert about is not None, f"{name} was not started anew"
    assert about.moved or about.node == away_from
    return about.node != away_from


@pytest.fixture
async def run(tmp_path: Path, redis: Client, keys: Keys, redis_url: str, cluster: Simulated) -> AsyncIterator[Run]:
    found = Run(tmp_path, redis, keys, redis_url, cluster.address)
    try:
        yield found
    finally:
        await found.close()
