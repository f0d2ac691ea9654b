"""Calls that come while others are on their way go together in the next round trip: nobody waits for company, and a burst shares its fixed cost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class GroupCommit(Generic[T, R]):
    """`await commit(item)` is the item's own result of `send(batch)`.

    Consumes: items. Produces: batches in the order of the calls, at most `at_once` under way, each of at most `most_items` and, unless one item alone is
    larger, `most_size` by `size`. A caller that is cancelled leaves its item in the batch: what is sent must be idempotent.
    Raises: what `send` raises, for every item of that batch; an item whose result is an exception raises it alone. One of `away` is raised for what has waited
    since before that batch left, too: who has waited out one deadline is not made to wait out another.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]],
        *,
        size: Callable[[T], int],
        most_size: int,
        most_items: int,
        at_once: int,
        away: tuple[type[Exception], ...] = (),
    ) -> None:
        self._send, self._size, self._away = send, size, away
        self._most_size, self._most_items, self._at_once = most_size, most_items, at_once
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._sending = 0
        self._senders: set[asyncio.Task[None]] = set()
        """Keeps the tasks alive; one that has nothing left to send is out of `_sending` before it is done."""

    async def __call__(self, item: T) -> R:
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._sending < self._at_once:
            self._sending += 1
            sender = asyncio.create_task(self._run(), name="ledger:group-commit")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await result

    async def _run(self) -> None:
        """Send until nothing waits. The first batch holds whatever the loop's present turn brings."""
        try:
            while batch := self._next():
                await self._round([item for item, _ in batch], [result for _, result in batch])
        finally:
            self._sending -= 1

    async def _round(self, items: list[T], results: list[asyncio.Future[R]]) -> None:
        answers: Sequence[R | Exception]
        waiting = [result for _, result in self._waiting]
        try:
            answers = await self._send(items)
        except asyncio.CancelledError:
            for result in results:
                result.cancel()
            raise
        except Exception as problem:  # noqa: BLE001 - it is raised where each item is awaited
            answers = [problem] * len(items)
            if isinstance(problem, self._away):
                self._give_up(waiting, problem)
        for result, answer in zip(results, answers, strict=True):
            if result.done():  # its caller was cancelled
                continue
            if isinstance(answer, Exception):
                result.set_exception(answer)
            else:
                result.set_result(answer)

    def _give_up(self, waited: list[asyncio.Future[R]], problem: Exception) -> None:
        """What waited then, and waits still, has the same problem."""
        over = set(waited) & {result for _, result in self._waiting}
        self._waiting = deque(one for one in self._waiting if one[1] not in over)
        for result in over:
            if not result.done():
                result.set_exception(problem)

    def _next(self) -> list[tuple[T, asyncio.Future[R]]]:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        size = 0
        while self._waiting and len(batch) < self._most_items:
            size += self._size(self._waiting[0][0])
            if batch and size > self._most_size:
                break
            batch.append(self._waiting.popleft())
        return batch
