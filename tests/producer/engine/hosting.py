"""A run with a trainer of our own, and engine hosts in it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from producer.engine.client import EngineClient, Sampling
from producer.engine.host import EngineHostConfig, run_host
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import store_folder
from weightsync.registry import Registry
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

WAIT_S = 240.0
PROCESS = """
import sys, warnings
warnings.simplefilter("error")
from producer.engine.host import EngineHostConfig, run_host
from protocol.config import load
from protocol.daemon import run_daemon
config = load(EngineHostConfig, sys.argv[1])
sys.exit(run_daemon("engine-0", lambda stop: run_host(config, 0, stop)))
"""


class Run:
    """A run with a trainer of our own: it attaches and publishes weights; engines follow."""

    def __init__(self, *, client: Client, keys: Keys, url: str, model: Path, folder: Path, waker: Wakeups) -> None:
        self.values: dict[str, Any] = {
            "run": {"name": keys.run, "dir": str(folder / "run")},
            "redis": {"url": url},
            "model": {"path": str(model)},
            "rollout": {"max_prompt_tokens": 20, "max_new_tokens": 30},
            "weights": {"store": str(folder / "store")},
            "engine": {"slots": 4},
            "eval": {},
            "producer": {},
        }
        self.keys, self.waker, self.folder, self.client = keys, waker, folder, client
        self.ledger, self.registry, self.channel = RedisLedger(client, keys), Registry(client, keys), Channel(client, keys)
        self._model = model

    def config(self, **sections: Any) -> EngineHostConfig:
        merged = {name: values | sections.get(name, {}) for name, values in self.values.items()}
        return validate(EngineHostConfig, merged, source="test")

    async def create(self) -> None:
        identity = RunIdentity(schema_major=1, seed=0, group_size=8, dataset="d", tokenizer="t")
        await self.ledger.create(identity, BufferConfig())

    async def publish(self, weights: Path) -> Version:
        """Attach anew and publish its version 0."""
        incarnation = (await self.ledger.attach(None, trainer_id="t")).incarnation
        config = self.config()
        store = DirectoryStore(store_folder(config.weights, config.run), self._model)
        version = Version(incarnation, 0)
        with open_tensors(weights / "model.safetensors") as tensors:
            manifest = store.write(Snapshot(version=version, tensors=tensors))
        await self.channel.publish(manifest, incarnation)
        return version

    async def until(self, found: Callable[[list[EngineStatus]], bool]) -> list[EngineStatus]:
        async with asyncio.timeout(WAIT_S):
            while True:
                mark = self.waker.mark(Topic.ENGINES)
                engines = await self.registry.engines()
                if found(engines):
                    return engines
                await self.waker.wait(Topic.ENGINES, since=mark)

    async def serving(self, version: Version) -> EngineStatus:
        (engine,) = await self.until(lambda engines: [e.version for e in engines if e.state is EngineState.ROUTABLE] == [version])
        return engine

    @contextlib.asynccontextmanager
    async def hosted(self, stop: asyncio.Event, *, index: int = 0, **sections: Any) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(run_host(self.config(**sections), index, stop), name="host")
        try:
            yield task
        finally:
            stop.set()
            await task

    @contextlib.asynccontextmanager
    async def two_hosted(self, first: asyncio.Event, second: asyncio.Event, **sections: Any) -> AsyncIterator[tuple[asyncio.Task[None], asyncio.Task[None]]]:
        """One after the other: transformers does not load two models at once in one process."""
        async with self.hosted(first) as one:
            await self.until(lambda engines: len(engines) == 1)
            async with self.hosted(second, index=1, **sections) as other:
                yield one, other


@pytest_asyncio.fixture
async def run(redis: Client, keys: Keys, redis_url: str, model_a: Path, tmp_path: Path) -> AsyncIterator[Run]:
    async with wakeups(redis, keys) as waker:
        yield Run(client=redis, keys=keys, url=redis_url, model=model_a, folder=tmp_path, waker=waker)


def ask(session: aiohttp.ClientSession, engine: EngineStatus, rid: str, tokens: int = 5, *, key: str = "") -> Awaitable[Any]:
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    return EngineClient(session, key).generate(engine.url, [1, 7, 9], sampling=sampling, rid=rid, deadline_s=120)


async def start_process(run: Run, tmp_path: Path) -> asyncio.subprocess.Process:
    """A host in a process of its own."""
    file = tmp_path / "run.toml"
    file.write_text("\n".join(f"[{name}]\n" + "\n".join(f"{key} = {value!r}" for key, value in section.items()) for name, section in run.values.items()))
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, str(file), stderr=asyncio.subprocess.PIPE)
