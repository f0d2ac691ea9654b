"""Engines for the contract: made the way the project makes them, one real server at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.embedded.lora_rows import LoraLimits
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from producer.engine.key import ADMIN_VARIABLE, VARIABLE
from producer.engine.sglang.engine import SGLangServer
from weightsync.lora import LoraConfig

PYTHON_VARIABLE = "ROLLSTREAM_SGLANG_PYTHON"
CONTEXT = 2048
SLOTS = 16
BOOT = "contract"
_PACE_S = 0.003
"""A token of the embedded engine takes at least this long, as one of the real engine does, so that what happens meanwhile happens meanwhile."""
_START_S = 900.0


@dataclass(frozen=True, slots=True)
class Setup:
    """How a server is started. Every test says what it needs; starts are slow, so there are three."""

    dtype: str = "float32"
    api_key: str = ""
    admin_key: str = ""
    incremental: bool = False
    """Streams bring what is new instead of all."""
    overlap: bool = True
    """SGLang prepares a step while another is under way. The embedded engine never does."""
    lora: LoraConfig = LoraConfig()
    """With publish adapter: it takes adapters."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*(("--incremental-streaming-output",) if self.incremental else ()), *(() if self.overlap else ("--disable-overlap-schedule",)))


PLAIN = Setup()
ADAPTED = Setup(lora=LoraConfig(rank=4, publish="adapter"))
GUARDED = Setup(dtype="bfloat16", api_key="key-of-users", admin_key="key-of-admins", incremental=True, overlap=False)


def interpreter() -> str:
    """Raises: `AssertionError` saying what to run, where there is none: a contract that nobody checked is not kept."""
    own = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
    chosen = os.environ.get(PYTHON_VARIABLE) or str(own)
    assert Path(chosen).is_file(), f"no SGLang at {chosen}: run `make sglang-cpu`, or set {PYTHON_VARIABLE} to an interpreter that has it"
    return chosen


@contextlib.asynccontextmanager
async def embedded(model: Path, setup: Setup) -> AsyncIterator[str]:
    limits = LoraLimits(max_rank=setup.lora.rank, targets=setup.lora.target_modules) if setup.lora.adapters else None
    served = load(str(model), slots=SLOTS, dtype=setup.dtype, lora_targets=() if limits is None else limits.targets)
    async with (
        EmbeddedEngine(
            served,
            weight_version=f"boot:{BOOT}",
            seed=1,
            api_key=setup.api_key,
            admin_key=setup.admin_key,
            incremental=setup.incremental,
            lora=limits,
        ) as engine,
        ticking(engine),
    ):
        yield engine.url


@contextlib.asynccontextmanager
async def ticking(engine: EmbeddedEngine) -> AsyncIterator[None]:
    """The loop that serves both ends counts the time between two tokens: where it is late, the thread that decodes does not run ahead of it."""
    worker, ticks, taken = engine._worker, 0, 0

    def due() -> bool:
        nonlocal taken
        if not (worker._waiting or worker._batch.requests):
            return True
        if taken == ticks:
            time.sleep(_PACE_S / 4)
            return False
        taken = ticks
        return True

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(_PACE_S)
            ticks += 1

    worker._due = due  # type: ignore[method-assign]
    clock = asyncio.create_task(tick(), name="contract:clock")
    try:
        yield
    finally:
        clock.cancel()
        await asyncio.wait([clock])


class RealServers:
    """SGLang, one server at a time: one that is idle still costs two gigabytes. Each lives in a thread of its own, which is its parent."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self._setup: Setup | None = None
        self._url = ""
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._thread: threading.Thread | None = None

    def url(self, setup: Setup) -> str:
        """Of a server of this setup, started if it is not there."""
        if setup != self._setup:
            self.close()
            python, started = interpreter(), Future[str]()
            self._thread = threading.Thread(target=lambda: asyncio.run(self._live(setup, python, started)), name="sglang")
            self._thread.start()
            self._url, self._setup = started.result(_START_S + 30), setup
        return self._url

    def close(self) -> None:
        if self._stop is not None:
            loop, stop = self._stop
            loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join(120)
        self._stop = self._thread = self._setup = None

    async def _live(self, setup: Setup, python: str, started: Future[str]) -> None:
        stop = asyncio.Event()
        try:
            settings = EngineConfig(kind="sglang", device="cpu", python=python, slots=SLOTS, dtype=setup.dtype, args=setup.arguments, start_seconds=_START_S)
            async with aiohttp.ClientSession() as session:
                with _keys(setup):
                    kind = SGLangServer(settings, index=0, model=str(self._model), longest=CONTEXT, seed=lambda _: 1, log=self._log, lora=setup.lora)
                    async with kind.life(BOOT, Desk(session, api_key=setup.api_key, admin_key=setup.admin_key)) as life:
                        await life.ready()
                        self._stop = (asyncio.get_running_loop(), stop)
                        started.set_result(life.url)
                        await stop.wait()
        except BaseException as problem:
            if started.done():
                raise
            started.set_exception(problem)


@contextlib.contextmanager
def _keys(setup: Setup) -> Iterator[None]:
    """As a host finds them: in its environment."""
    before: dict[str, Any] = {name: os.environ.get(name) for name in (VARIABLE, ADMIN_VARIABLE)}
    os.environ.update({VARIABLE: setup.api_key, ADMIN_VARIABLE: setup.admin_key})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
