"""A run with a real weight server process, and engines that are processes too, for the tests of what a weight server serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from protocol.config import RunConfig
from protocol.messages import EngineId, Manifest, WeightServerStatus
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync.config import WeightsConfig, store_folder
from weightsync.control import EngineControl
from weightsync.roles import WEIGHT_SERVER
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore
from weightsync.transports import served, server_line
from weightsync.transports.collective import CollectiveTransport

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


_SERVER = f"from weightsync import roles; roles.HEARTBEAT_S = {PATIENCE_S}; from deploy.cli import main; raise SystemExit(main())"
"""A server that does not take a line for dead whose other end stands still for a while: a line that is cut, or whose process dies, is closed at once."""


def big_snapshot(version: Version, *, megabytes: int = 3) -> Snapshot:
    """Over one bucket of a megabyte, types mixed, a scalar and an empty tensor among them."""
    rng = np.random.default_rng(version.n)
    tensors = {f"layers.{index}.weight": TensorBytes(dtype="F32", shape=(1 << 17,), data=rng.bytes(1 << 19)) for index in range(2 * megabytes)}
    tensors["norm.weight"] = TensorBytes(dtype="BF16", shape=(3,), data=rng.bytes(6))
    tensors["steps"] = TensorBytes(dtype="I64", shape=(), data=rng.bytes(8))
    tensors["empty"] = TensorBytes(dtype="F32", shape=(0, 4), data=b"")
    return Snapshot(version=version, tensors=tensors)


class Engine:
    def __init__(self, process: subprocess.Popen[str], url: str, session: aiohttp.ClientSession) -> None:
        self.process, self.url, self._session = process, url, session
        self.control = EngineControl(session, url)

    async def stage(self, mode: str) -> None:
        async with self._session.post(f"{self.url}/stage", json={"next": mode}) as answer:
            answer.raise_for_status()

    async def seen(self) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/seen") as answer:
            return await answer.json()

    async def until(self, call: str, *, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.seen())["calls"].count(call) < times:
                await asyncio.sleep(0.02)


class ServedRig:
    """Wraps the `rig` of one run; everything it starts ends with it."""

    def __init__(self, rig: Any, redis_url: str, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self.rig, self._redis_url, self._folder, self._stack = rig, redis_url, folder, stack
        self.store = DirectoryStore(store_folder(self.config(), RunConfig(name=rig.keys.run)))
        self.presence: Presence[WeightServerStatus] = Presence(rig.redis, rig.keys, WEIGHT_SERVER, WeightServerStatus)

    def config(self, **settings: Any) -> WeightsConfig:
        return WeightsConfig(**{"store": str(self._folder), "transport": "gloo", "bucket_mb": 1, "group_deadline_s": 60.0, **settings})

    async def start_server(self, **settings: Any) -> subprocess.Popen[str]:
        """A server process; returns once it has announced itself."""
        config = self.config(**settings)
        sets = [f"run.name={self.rig.keys.run}", f"run.dir={self._folder}", f"redis.url={self._redis_url}"]
        sets += [f"weights.{name}={getattr(config, name)}" for name in ("store", "transport", "bucket_mb", "group_deadline_s")]
        file = self._folder / "run.toml"
        file.write_text(f'[run]\nname = "{self.rig.keys.run}"\n')
        command = [sys.executable, "-c", _SERVER, WEIGHT_SERVER, "-c", str(file), *(word for one in sets for word in ("--set", one))]
        process = self._start(command)
        async with asyncio.timeout(PATIENCE_S):
            while process.pid not in {server.pid for server in await self.presence.members()}:
                assert process.poll() is None, "the weight server ended"
                await asyncio.sleep(0.05)
        return process

    async def start_engine(self, *flags: str) -> Engine:
        return (await self.start_engines(1, *flags))[0]

    async def start_engines(self, count: int, *flags: str) -> list[Engine]:
        command = [sys.executable, str(ROOT / "tests/weightsync/receiver.py"), *flags]
        processes = [self._start(command, stdout=subprocess.PIPE) for _ in range(count)]
        return [Engine(one, (await asyncio.to_thread(one.stdout.readline)).strip(), self.rig.session) for one in processes if one.stdout]

    async def publish(self, n: int, *, megabytes: int = 3) -> Manifest:
        await self.rig.attach(1, n)
        manifest = await asyncio.to_thread(self.store.write, big_snapshot(Version(1, n), megabytes=megabytes))
        await self.rig.channel.publish(manifest, 1)
        return manifest

    def transport(self, engine: Engine, kind: Any = CollectiveTransport, **settings: Any) -> Any:
        transport = kind(
            control=engine.control,
            session=self.rig.session,
            presence=self.presence,
            config=self.config(**settings),
            engine_id=EngineId(f"engine-{engine.process.pid}"),
            boot_nonce="b1",
        )
        self._stack.push_async_callback(transport.aclose)
        return transport

    async def server_status(self, condition: Any) -> WeightServerStatus:
        """Of the one server, once `condition` holds of it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                mark = self.rig.wakes.mark(Topic.WEIGHTS)
                for status in await self.presence.members():
                    if condition(status):
                        return status
                await self.rig.wakes.wait(Topic.WEIGHTS, since=mark, timeout_s=0.05)

    def _start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL, **options)
        self._stack.callback(_end, process)
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(60)
    if process.stdout:
        process.stdout.close()


@contextlib.asynccontextmanager
async def served_rig(rig: Any, redis_url: str, folder: Path) -> AsyncIterator[ServedRig]:
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(server_line, "HEARTBEAT_S", PATIENCE_S)
        for name in ("_CONNECT_S", "_RETAKE_S", "_GIVE_S"):
            patch.setattr(served, name, PATIENCE_S)
        yield ServedRig(rig, redis_url, folder, stack)


def checksums(manifest: Manifest) -> dict[str, str]:
    return {entry.name: entry.checksum for entry in manifest.tensors}
