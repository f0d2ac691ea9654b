"""The parts of a run started by hand, each as a process of its own against one Redis, as the README shows it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from buffer.redis_ledger import RedisLedger
from deploy.config import ReaderConfig
from deploy.demo import folder as folders
from deploy.summary import read_summary
from protocol.config import load
from protocol.connection import Client, connect
from protocol.errors import RunMissing
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.config import WeightsConfig, store_folder
from weightsync.registry import Registry

ROOT = Path(__file__).parents[2]
STEPS = 12
ENGINE, PRODUCER, TRAINER, SUMMARY = ("deploy.cli", "engine"), ("producer.main",), ("consumer.main",), ("deploy.cli", "summary")


class Terminals:
    """Processes by name, each with a log; whoever is left at the end of the test is killed."""

    def __init__(self, folder: Path, config: Path, url: str) -> None:
        self._folder = folder
        self._options = ("-c", str(config), "--set", f"redis.url={url}")
        self.open: dict[str, Process] = {}

    async def start(self, name: str, command: Sequence[str], *options: str) -> Process:
        with (self._folder / f"{name}.log").open("wb") as log:
            argv = [sys.executable, "-m", *command, *self._options, *options]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            self.open[name] = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=log, stderr=log, env=environment)
        return self.open[name]

    async def ended(self, *names: str) -> None:
        """Wait until each has left by itself, with exit code 0."""
        for name in names:
            assert await self.open[name].wait() == 0, self.log(name)
            del self.open[name]

    def log(self, name: str) -> str:
        return f"{name}:\n{(self._folder / f'{name}.log').read_text()[-3000:]}"

    def all_alive(self) -> None:
        for name, process in self.open.items():
            assert process.returncode is None, self.log(name)

    async def close(self) -> None:
        for process in self.open.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def redis_by_hand(folder: Path) -> AsyncIterator[str]:
    """`rollstream redis` in a terminal of its own; the URL it prints."""
    command = [sys.executable, "-m", "deploy.cli", "redis", "--dir", str(folder)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, env={**os.environ, "ROLLSTREAM_LOG": "ERROR"})
    try:
        assert process.stdout is not None
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0


@contextlib.asynccontextmanager
async def terminals(folder: Path, config: Path, url: str) -> AsyncIterator[Terminals]:
    found = Terminals(folder, config, url)
    try:
        yield found
    finally:
        await found.close()


@contextlib.asynccontextmanager
async def seen_through(url: str, keys: Keys) -> AsyncIterator[tuple[Client, Wakeups]]:
    client = connect(url, deadline_s=60.0)
    try:
        async with wakeups(client, keys) as waker:
            yield client, waker
    finally:
        await client.aclose()


async def until(waker: Wakeups, hands: Terminals, holds: Callable[[], Awaitable[bool]]) -> None:
    """Look again at every wake-up of the run, and as often as presences are announced."""
    while True:
        mark = waker.mark(*Topic)
        hands.all_alive()
        if await holds():
            return
        await waker.wait(*Topic, since=mark, timeout_s=1.0)


@pytest.mark.demo
@pytest.mark.timeout(1000)
async def test_parts_started_by_hand_end_by_themselves_and_a_producer_comes_and_goes_without_loss(tmp_path: Path) -> None:
    demo = folders.Demo(folder=tmp_path / "demo", seed=3, steps=STEPS)
    folders.claim(demo)
    folders.fill(demo)
    keys = Keys("demo")
    warm_start = [sys.executable, "-m", "deploy.demo.warm_start", str(demo.model), "--seed", str(demo.seed)]
    assert await (await asyncio.create_subprocess_exec(*warm_start, cwd=ROOT)).wait() == 0

    async with (
        asyncio.timeout(900),
        redis_by_hand(tmp_path / "redis") as url,
        terminals(tmp_path, demo.config, url) as hands,
        seen_through(url, keys) as (client, waker),
    ):
        ledger, producers = RedisLedger(client, keys), Presence(client, keys, "producer", ProducerStatus)
        engines = Registry(client, keys)

        async def has_trained() -> bool:
            with contextlib.suppress(RunMissing):
                return (await ledger.status()).trained >= 2
            return False

        trainer = await hands.start("trainer", TRAINER, "--new")
        for index in (0, 1):
            await hands.start(f"engine-{index}", ENGINE, "--index", str(index))
            await hands.start(f"producer-{index}", PRODUCER)
        await until(waker, hands, has_trained)

        # So short a run would be over before a third producer has come: the trainer is held until it is here, and then the others until it has worked.
        trainer.send_signal(signal.SIGSTOP)
        before = {one.producer_id for one in await producers.members()}
        assert len(before) == 2
        third = await hands.start("producer-2", PRODUCER)

        async def has_come() -> bool:
            return len(await producers.members()) == 3 and len(await engines.engines()) == 2

        async def has_worked() -> bool:
            return any(one.groups_put > 0 for one in await producers.members() if one.producer_id not in before)

        await until(waker, hands, has_come)
        others = [hands.open[f"producer-{index}"] for index in (0, 1)]
        for one in others:
            one.send_signal(signal.SIGSTOP)
        trainer.send_signal(signal.SIGCONT)
        await until(waker, hands, has_worked)
        for one in others:
            one.send_signal(signal.SIGCONT)
        third.terminate()
        await hands.ended("producer-2")
        assert {one.producer_id for one in await producers.members()} <= before, "it has signed off"
        await hands.ended("trainer", "producer-0", "producer-1", "engine-0", "engine-1")
        await hands.start("summary", SUMMARY)
        await hands.ended("summary")

    summary = read_summary(demo.folder)
    assert (summary["steps"], summary["groups_lost"], summary["groups_duplicated"], summary["disagreements"]) == (STEPS, 0, 0, [])
    assert summary["groups_trained"] == STEPS * 32
    assert (summary["over_k_tokens"], summary["producers_seen"], summary["incarnations"]) == (0, 3, 1)
    assert [engine["at_final"] for engine in summary["engines"].values()] == [True, True]
    run = load(ReaderConfig, str(demo.config)).run
    memory = store_folder(WeightsConfig(), run)
    assert not memory.exists(), "the last engine has cleared the run's versions from shared memory"
