"""What a trainer's process does beside training, for the run: it spills, finishes what scripts could not, and deletes blobs that nobody needs.

every second ──► Spiller.flush()                  steps that should leave Redis
             └─► ledger.sweep(delete_blobs)       expired slots, payload keys on a cluster, blobs of groups that are gone
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from redis.exceptions import RedisError

from buffer.contract import Ledger
from buffer.spill import Spiller
from buffer.storage import Storage
from protocol.errors import Fenced, RollstreamError
from protocol.messages import Attempt, Seq, SlotToken

_LOG = logging.getLogger(__name__)
_EVERY_S = 1.0
_LONGEST_PAUSE_S = 30.0
_CLOSE_S = 10.0


class Failures(Protocol):
    """Hears how rounds go."""

    def failed(self, problem: Exception, pause_s: float) -> None: ...

    def worked(self) -> None: ...


@contextlib.asynccontextmanager
async def upkeep(ledger: Ledger, storage: Storage, incarnation: int) -> AsyncIterator[Spiller | None]:
    """Runs while the context is open, and does one more round when it closes, within 10 s. Yields the spiller, for its status; None: the run has no spill."""
    stop = asyncio.Event()
    spiller = Spiller(ledger, storage, incarnation) if storage.spill is not None else None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rounds(sweeping(ledger, storage), stop, _Told("sweep the ledger")), name="upkeep:sweep")]
        if spiller is not None:
            tasks.append(group.create_task(rounds(spiller.flush, stop, spiller), name="upkeep:spill"))
        try:
            yield spiller
        finally:
            stop.set()
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in late:
                _LOG.warning("%s did not end within %.0f s; what is left stays in Redis", task.get_name(), _CLOSE_S)
                task.cancel()


async def rounds(work: Callable[[], Awaitable[int]], stop: asyncio.Event, told: Failures) -> None:
    """`work` again and again until `stop`, and once more then.

    Waits for: the next second; after failures in a row, up to 30 s. Unblocked by: `stop`. Returns early when another trainer is attached: that one works.
    """
    pause_s = _EVERY_S
    stopping = False
    while not stopping:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stop.wait()
        stopping = stop.is_set()
        try:
            await work()
        except Fenced:
            return
        except (RollstreamError, RedisError, OSError) as problem:
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            told.failed(problem, pause_s)
        else:
            pause_s = _EVERY_S
            told.worked()


def sweeping(ledger: Ledger, storage: Storage) -> Callable[[], Awaitable[int]]:
    """A round of `Ledger.sweep` with the run's blobs."""
    blobs = storage.blobs
    if blobs is None:
        return ledger.sweep

    async def delete(seq: Seq, attempt: Attempt, token: SlotToken) -> None:
        await asyncio.to_thread(blobs.delete, blobs.folder(seq, attempt, token))

    return lambda: ledger.sweep(delete)


class _Told:
    def __init__(self, what: str) -> None:
        self._what = what

    def failed(self, problem: Exception, pause_s: float) -> None:
        _LOG.warning("cannot %s (%s); trying again in %.0f s", self._what, problem, pause_s)

    def worked(self) -> None:
        """Nothing to say."""
