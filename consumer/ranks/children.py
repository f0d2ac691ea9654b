"""Ranks that rank 0 starts itself, on its own host: they die with it, and their deaths are told."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from consumer.ranks.place import Place
from protocol.failpoints import VARIABLE, VICTIM_VARIABLE

_LOG = logging.getLogger(__name__)
_PARENT = "ROLLSTREAM_RANK_0_PID"
_PR_SET_PDEATHSIG = 1
KILL_S = 5.0
"""What a rank has to end by itself, once nobody needs it."""
Lost: TypeAlias = Callable[[int, int], None]
"""Hears of each rank that ends: its number, and its exit code, or the signal that killed it as a negative number."""


class Others(Protocol):
    """Ranks 1 and up of one life of rank 0, while the context is open: started when it is entered, gone when it is left."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None: ...

    async def ended(self, deadline_s: float) -> None:
        """Return once all have ended, or after `deadline_s`."""


StartOthers: TypeAlias = Callable[[Place, Lost], Others]
"""Where `Place.own_store` says that rank 0 starts them."""


class Children:
    """`Others` as processes: with `place.own_store` ranks 1 and up, started with `arguments`; otherwise somebody else started them, and none.

    `lost(rank, exit code)` hears of each that ends. On leaving, those that are still there get the time that a rank takes to end by itself, then SIGKILL.
    """

    def __init__(self, arguments: Sequence[str], place: Place, lost: Lost) -> None:
        self._place, self._arguments, self._lost = place, arguments, lost
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self._place.own_store:
            try:
                for rank in range(1, self._place.ranks):
                    self._processes[rank] = await self._start(rank)
            except BaseException:
                await self.__aexit__(None, None, None)
                raise
            self._watching = [asyncio.create_task(self._watch(rank, process), name=f"trainer:rank {rank}") for rank, process in self._processes.items()]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        await self.ended(KILL_S)
        for rank, process in self._processes.items():
            if process.returncode is None:
                _LOG.warning("rank %d did not end by itself: killed", rank)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    async def ended(self, deadline_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for process in self._processes.values():
                    await process.wait()

    async def _start(self, rank: int) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, VICTIM_VARIABLE)}  # a failpoint is rank 0's
        environment |= self._place.environment(rank) | {_PARENT: str(os.getpid())}
        return await asyncio.create_subprocess_exec(sys.executable, "-m", "consumer.main", *self._arguments, env=environment, stdin=asyncio.subprocess.DEVNULL)

    async def _watch(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self._lost(rank, await process.wait())


def die_with_rank_0() -> None:
    """In a rank that rank 0 started, when it begins: the kernel kills it when rank 0 is gone, which it may be already."""
    parent = os.environ.pop(_PARENT, "")
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(1)
