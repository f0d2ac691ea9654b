"""From Redis to the spill: steps whose payloads should leave the buffer are recorded first, then let go.

    ledger.spillable() ──► chunks, payloads ──► Recording.write_step (durable) ──► ledger.spilled() ──► payloads leave Redis

A kill between the two writes the step again, whole, in place of itself. While the spill refuses, payloads stay where they are, and what is full is the budget:
reserve waits on the edge `no budget`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffer.contract import ChunkRecord, Ledger, TrainedStep
from buffer.recording import RecordedStep, Recording
from buffer.storage import Storage, read_step
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import GroupHeader, Seq, SlotToken

_LOG = logging.getLogger(__name__)
_AT_ONCE = 8
"""Steps asked for at a time; they are written one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillStatus:
    """For heartbeats."""

    steps: int = 0
    """Spilled by this process."""
    failing_since: float = 0.0
    """Unix seconds of the first failure in a row; 0: nothing is wrong."""
    problem: str = ""
    """The last failure, in words; "": nothing is wrong."""


class Spiller:
    """Spills for one attachment; `buffer.upkeep` calls it again and again, and tells it how that goes.

    Invariant: `spilled` follows only what is durable. A failure changes nothing.
    """

    def __init__(self, ledger: Ledger, storage: Storage, incarnation: int, *, clock: Callable[[], float] = time.time) -> None:
        if storage.spill is None:
            raise ValueError("a run without buffer.spill has nothing to spill to")
        self._ledger, self._storage, self._incarnation, self._clock = ledger, storage, incarnation, clock
        self._recording: Recording = storage.spill
        self.status = SpillStatus()

    async def flush(self) -> int:
        """Spill every step that should leave Redis now; how many did.

        Raises: `OSError` with the object's place, `RollstreamError`; nothing is lost then, and what was spilled before it stays spilled.
        """
        count = 0
        while steps := await self._ledger.spillable(_AT_ONCE):
            for step in steps:
                if not await self._spill(step):
                    return count
                count += 1
        return count

    def failed(self, problem: Exception, pause_s: float) -> None:
        since = self.status.failing_since or self._clock()
        self.status = SpillStatus(steps=self.status.steps, failing_since=since, problem=str(problem))
        _LOG.warning(
            "cannot spill to %s since %.0f s (%s): payloads stay in Redis until it works; trying again in %.0f s",
            self._recording.url,
            self._clock() - since,
            problem,
            pause_s,
        )

    def worked(self) -> None:
        if self.status.failing_since:
            _LOG.info("spilling to %s works again", self._recording.url)
            self.status = SpillStatus(steps=self.status.steps)

    async def _spill(self, step: int) -> bool:
        """False if the step changed meanwhile: it was rewound, or trained again by somebody else."""
        outcome = await self._ledger.trained_step(step)
        chunks = await self._ledger.chunks(step, step)
        if outcome is None or not chunks:
            return False
        payloads = await read_step(self._ledger, self._storage, step, chunks)
        record = _recorded(outcome, chunks, payloads)
        if await self._ledger.trained_step(step) != outcome:
            return False
        await asyncio.to_thread(self._recording.write_step, record)
        failpoint(Failpoint.SPILL_WRITTEN)
        await self._ledger.spilled(self._incarnation, step)
        failpoint(Failpoint.SPILL_SPILLED)
        self.status = SpillStatus(steps=self.status.steps + 1, failing_since=self.status.failing_since, problem=self.status.problem)
        return True


def _recorded(outcome: TrainedStep, chunks: Sequence[ChunkRecord], payloads: dict[tuple[Seq, SlotToken], bytes]) -> RecordedStep:
    for chunk in chunks:
        for header in chunk.headers:
            if (header.seq, header.token) not in payloads:
                _LOG.error("step %d is spilled without the payload of group %d: it is gone from Redis, or damaged", outcome.step, header.seq)
    return RecordedStep(
        step=outcome.step,
        incarnation=outcome.incarnation,
        digest=outcome.digest,
        at=outcome.at,
        chunks=tuple(chunks),
        payloads=tuple(tuple(_of(payloads, header) for header in chunk.headers) for chunk in chunks),
    )


def _of(payloads: dict[tuple[Seq, SlotToken], bytes], header: GroupHeader) -> bytes:
    return payloads.get((header.seq, header.token), b"")
