"""The one thread that owns the model: a backend never runs on the event loop, and never in two places at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from protocol.priority import give_way

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """`async with Worker() as worker: await worker.call(function, …)`. Calls run in the order they are made.

    A cancelled call still runs to its end in the thread; leaving the context waits for it.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        """`on_cpu`: what it calls computes on the CPU, where others are to be answered meanwhile."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="trainer-model", initializer=give_way if on_cpu else None)
        self.busy_s = 0.0
        """Seconds spent in calls."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            started = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.busy_s += time.monotonic() - started

        return await asyncio.get_running_loop().run_in_executor(self._executor, timed)
