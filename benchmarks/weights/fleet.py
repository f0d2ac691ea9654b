"""Embedded engines in processes of their own, under load, with a record of when each wrote how many tokens."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from benchmarks.weights.child import Answer, Child

_LOOK_S = 0.05
_START_S = 120.0


@dataclass(slots=True)
class Engine:
    name: str
    url: str
    boot_nonce: str
    process: asyncio.subprocess.Process
    load: Child | None = None
    written: list[tuple[float, int]] = field(default_factory=list)
    """`time.monotonic()` and tokens generated so far, where that number changed."""

    def rate(self, since: float, until: float) -> float:
        """Tokens a second from the first change in the window to the last: whole decode steps, so that the edges of the window cut none in two."""
        seen = [(at, count) for at, count in self.written if since <= at <= until]
        if len(seen) < 2:
            return 0.0
        (first, had), (last, has) = seen[0], seen[-1]
        return (has - had) / (last - first)


class Fleet:
    """`async with Fleet(...) as fleet: fleet.engines`. The load keeps every engine busy until the context ends, or `settle` is called."""

    def __init__(self, model: Path, work: Path, *, count: int, pace_s: float, vocabulary: int, requests: int, tokens: int, slow: Sequence[float]) -> None:
        """`slow`: of each engine, how many times as long it takes to load weights."""
        self._model, self._work = model, work
        self._count, self._pace_s, self._slow = count, pace_s, slow
        self._load = ["--requests", str(requests), "--streams", "0", "--tokens", str(tokens), "--prompt", "8", "--vocabulary", str(vocabulary)]
        self.engines: list[Engine] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        try:
            for index in range(self._count):
                self.engines.append(await self._start(index))
            for engine in self.engines:
                engine.load = await Child.start("load", ["benchmarks.weights.load", engine.url, *self._load], log=self._work / f"load-{engine.name}.log")
            self._watchers = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        await self._end()

    async def settle(self) -> list[Answer]:
        """No new requests; what every load saw, once what runs is finished."""
        loads = [engine.load for engine in self.engines if engine.load is not None]
        return list(await asyncio.gather(*(load.ask("stop", deadline_s=180) for load in loads)))

    async def _start(self, index: int) -> Engine:
        name, boot_nonce, port = f"engine{index}", uuid.uuid4().hex[:16], _free_port()
        argv = [sys.executable, "-m", "benchmarks.weights.engine", str(self._model), str(port), boot_nonce, str(self._pace_s), str(self._slow[index])]
        with (self._work / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)
        engine = Engine(name=name, url=f"http://127.0.0.1:{port}", boot_nonce=boot_nonce, process=process)
        try:
            await self._answers(engine)
        except BaseException:
            process.kill()
            raise
        return engine

    async def _answers(self, engine: Engine) -> None:
        assert self._session is not None
        async with asyncio.timeout(_START_S):
            while engine.process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with self._session.get(engine.url + "/model_info") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)
        raise RuntimeError(f"{engine.name} ended at its start: see {self._work / engine.name}.log")

    async def _watch(self, engine: Engine) -> None:
        assert self._session is not None
        while True:
            async with self._session.get(engine.url + "/server_info") as answer:
                state = (await answer.json())["internal_states"][0]
            count = int(state["generated_tokens"])
            if not engine.written or engine.written[-1][1] != count:
                engine.written.append((time.monotonic(), count))
            await asyncio.sleep(_LOOK_S)

    async def _end(self) -> None:
        for task in self._watchers:
            task.cancel()
        for engine in self.engines:
            if engine.load is not None:
                await engine.load.close(grace_s=2.0)
            if engine.process.returncode is None:
                engine.process.terminate()
                await engine.process.wait()
        if self._session is not None:
            await self._session.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
