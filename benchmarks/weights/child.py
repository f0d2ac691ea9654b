"""A process of the measurement that answers commands, one JSON line each: what it does cannot hold up the event loop that is being measured.

All clocks are `time.monotonic()`, which the processes of one machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

Answer = Mapping[str, Any]


class Failed(Exception):
    """A child refused a command, did not answer in time, or is gone."""


class Child:
    """A running child. Commands may overlap; `close` ends it, also one that does not listen."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read(), name=f"{name}:answers")

    @classmethod
    async def start(cls, name: str, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> Child:
        """Python's `-m`, with what it prints in `log`."""
        environment = {**os.environ, **(env or {})}
        pipe = asyncio.subprocess.PIPE
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", *argv, stdin=pipe, stdout=pipe, stderr=sink, env=environment, limit=1 << 24)
        return cls(name, process)

    async def ask(self, do: str, *, deadline_s: float, **arguments: Any) -> Answer:
        """Raises: `Failed`."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._reading.done():
            raise Failed(f"{self._name} has ended, before {do}")
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(deadline_s):
                self._process.stdin.write(orjson.dumps({"do": do, "number": number, **arguments}) + b"\n")
                await self._process.stdin.drain()
                answer: dict[str, Any] = await reply
        except (TimeoutError, OSError) as problem:
            raise Failed(f"{self._name}: no answer to {do} within {deadline_s:.0f} s ({problem!r})") from problem
        finally:
            del self._waiting[number]
        if "error" in answer:
            raise Failed(f"{self._name}, {do}: {answer['error']}")
        return answer

    async def close(self, *, grace_s: float = 10.0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        ends: list[Callable[[], None]] = [lambda: None, self._process.terminate, self._process.kill]
        for end in ends:
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                end()
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
                break
        self._reading.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):  # anything else is what libraries print while they are imported
                answer = orjson.loads(line)
                reply = self._waiting.get(answer.pop("number"))
                if reply is not None and not reply.done():  # nobody waits for it after its deadline
                    reply.set_result(answer)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result({"error": "it ended"})


Handler = Callable[[dict[str, Any]], Awaitable[Answer]]


async def answer_commands(handler: Handler) -> None:
    """The child's side: until stdin ends. What a handler raises is the answer."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to the log

    async def answer(command: dict[str, Any]) -> None:
        number = command.pop("number")
        try:
            found = dict(await handler(command))
        except Exception as problem:  # noqa: BLE001 - told to the parent, which goes on with the next row
            found = {"error": f"{type(problem).__name__}: {problem}"[:2000]}
        answers.write(orjson.dumps({"number": number, **found}) + b"\n")

    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    while line := await loop.run_in_executor(None, sys.stdin.buffer.readline):
        task = asyncio.create_task(answer(orjson.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
