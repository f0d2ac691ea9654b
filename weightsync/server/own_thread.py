"""A thread for calls that may never return: whoever waits for one has a deadline, and nobody else is kept waiting."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

Result = TypeVar("Result")


class OwnThread:
    """Runs calls one after another. A daemon thread: one that is stuck does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a call runs or waits."""
        return self._unfinished > 0

    async def call(self, work: Callable[[], Result], *, deadline_s: float) -> Result:
        """What `work` returns or raises. Raises: `TimeoutError` at the deadline; the call may still be running then."""
        if deadline_s <= 0:
            raise TimeoutError("no time left")
        future: Future[Result] = Future()
        self._unfinished += 1
        loop = asyncio.get_running_loop()

        def finished(_: Future[Result]) -> None:
            loop.call_soon_threadsafe(self._finished)

        future.add_done_callback(finished)
        self._calls.put((work, future))
        async with asyncio.timeout(deadline_s):
            return await asyncio.shield(_quiet(asyncio.wrap_future(future)))

    def close(self) -> None:
        """No call after this; the thread ends when those under way have returned."""
        self._calls.put(None)

    def _finished(self) -> None:
        self._unfinished -= 1

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
