"""The one right to send from a device: engines take turns, in the order in which they asked (rule W6).

    free ──take──► prepared ──use──► in use ──give, or its line breaks──► next in line
                      └── idle for `idle_s` while another waits, or at once for one whose engine is paused: `lost()` ──► the other

A holder that waits for its engine to be paused keeps the right as long as nobody else wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Holder(Protocol):
    def lost(self) -> None:
        """The right went to another, because this one did not use it."""


class TransferRight:
    def __init__(self, *, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_s = idle_s
        self._clock = clock
        self._holder: Holder | None = None
        self._taken_at = 0.0
        self._in_use = False
        self._line: deque[tuple[Holder, asyncio.Future[None]]] = deque()

    async def take(self, who: Holder, *, deadline_s: float, urgent: bool = False) -> None:
        """Return once `who` has it; taking what one has renews it. `urgent`: its engine is paused, so who only prepared steps back. Raises: `TimeoutError`."""
        loser = self._holder
        if loser is None or loser is who or (urgent and not self._in_use):
            self._grant(who)
            if loser is not None and loser is not who:
                loser.lost()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (who, turn)
        self._line.append(entry)
        end = self._clock() + deadline_s
        try:
            while not turn.done() and (now := self._clock()) < end:
                idle_at = self._taken_at + self._idle_s
                if not self._in_use and now >= idle_at:
                    self._displace()
                    continue
                until = end if self._in_use else min(end, idle_at)
                await asyncio.wait([turn], timeout=until - now)
        except BaseException:
            if turn.done():
                self.give(who)
            raise
        finally:
            if entry in self._line:
                self._line.remove(entry)
        if not turn.done():
            raise TimeoutError(f"the transfer right was not free within {deadline_s:.1f} s")

    def use(self, who: Holder) -> None:
        """From now on it is not idle, however long it takes. Raises: `PermissionError` if `who` does not hold the right."""
        if self._holder is not who:
            raise PermissionError("another engine has the transfer right")
        self._in_use = True

    def give(self, who: Holder) -> None:
        """Whoever has it gives it on; for anybody else nothing changes."""
        if self._holder is who:
            self._next()

    def _displace(self) -> None:
        loser = self._holder
        self._next()
        if loser is not None:
            loser.lost()

    def _next(self) -> None:
        self._holder, self._in_use = None, False
        while self._line:
            who, turn = self._line.popleft()
            if not turn.done():
                self._grant(who)
                turn.set_result(None)
                return

    def _grant(self, who: Holder) -> None:
        self._holder = who
        self._taken_at = self._clock()
