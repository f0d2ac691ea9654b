"""A thread for calls that may never return: whoever waits for one has a deadline, and nobody else is kept waiting."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

Result = TypeVar("Result")
_MOST = 8
"""Calls that run or wait: a thread that is stuck collects no more."""


class OwnThread:
    """Runs calls one after another. A daemon thread: one that is stuck does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._when_free: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a call runs or waits."""
        return self._unfinished > 0

    async def call(self, work: Callable[[], Result], *, deadline_s: float) -> Result:
        """What `work` returns or raises.

        Raises: `TimeoutError` at the deadline; the call may still be running then. At once, and nothing is called, if too many wait already.
        """
        if deadline_s <= 0:
            raise TimeoutError("no time left")
        if self._unfinished >= _MOST:
            raise TimeoutError(f"{self._unfinished} calls run or wait already: expected fewer than {_MOST}")
        future: Future[Result] = Future()
        self._unfinished += 1
        loop = asyncio.get_running_loop()

        def finished(_: Future[Result]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
                loop.call_soon_threadsafe(self._finished)

        future.add_done_callback(finished)
        self._calls.put((work, future))
        async with asyncio.timeout(deadline_s):
            return await asyncio.shield(_quiet(asyncio.wrap_future(future)))

    def when_free(self, then: Callable[[], None]) -> None:
        """Call `then` once, in the loop, when no call runs or waits: now, if that is so."""
        if self._unfinished:
            self._when_free.append(then)
        else:
            then()

    def close(self) -> None:
        """No call after this; the thread ends when those under way have returned."""
        self._calls.put(None)

    def _finished(self) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            waiting, self._when_free = self._when_free, []
            for then in waiting:
                then()

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            work, future = entry
            try:
                result = work()
            except BaseException as problem:  # noqa: BLE001 - it belongs to whoever called
                _tell(future, problem=problem)
            else:
                _tell(future, result=result)
            del entry, work, future


def _tell(future: Future[Any], *, result: object = None, problem: BaseException | None = None) -> None:
    try:
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)
    except (RuntimeError, InvalidStateError):  # the loop is closed: nobody waits for it any more
        return


def _quiet(future: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """One whose failure after its deadline is nobody's news."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
