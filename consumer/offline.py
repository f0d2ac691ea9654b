"""Training on what was recorded: the usual backend, loss, advantages and metrics on a stream of steps, without a ledger, a publisher or an engine.

    shadow     the journal of a run that is alive, step by step as it is trained      ─┐
    replay     chosen steps of a run's journal                                         ├──► OfflineTraining ──► metrics.jsonl, checkpoint/
    recorded   a recording, an export, or what `rl-producer --rollout-only` wrote     ─┘

It takes nothing away from a run and writes nothing into Redis but its presence. The same steps from the same weights give the same bits as the run's own
trainer had (CPU, same number of threads): each line of metrics.jsonl has the digest of the weights beside the one that was recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from buffer.blobs import BlobStore
from buffer.contract import ChunkRecord
from buffer.recording import RecordedStep
from buffer.replay import decoded
from consumer.advantages import find_advantage, needs_whole_step
from consumer.backend import Backend, StepReport, digest_now
from consumer.batch import ChunkFigures, collate_step, step_divisor
from consumer.checkpoint import Checkpoint, Progress
from consumer.config import StopConfig, TrainerConfig
from consumer.losses.config import Normaliser
from consumer.shelf import Shelf
from consumer.stats import REWARD_WINDOW, MetricsFile, step_diagnostics, step_stats
from consumer.stopping import stop_reason
from consumer.worker import Worker
from protocol.codec import digest
from protocol.errors import ReplayGap
from protocol.fields import to_wire
from protocol.frames import write_frame
from protocol.messages import Edge, JsonValue

_LOG = logging.getLogger(__name__)

StepSource: TypeAlias = Callable[[int], AsyncGenerator[RecordedStep, None]]
"""The stream from a step on. A step that is not greater than the one before it takes its place and that of all after it: the run went back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineStep:
    """One step as it was trained here."""

    step: int
    incarnation: int
    digest: str
    """Of the weights here."""
    recorded_digest: str
    """Of the weights of the run; "": not known."""

    @property
    def same(self) -> bool | None:
        """Whether the weights are the run's, bit by bit; None: nobody knows."""
        return self.digest == self.recorded_digest if self.recorded_digest else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineParts:
    """What the training works with; each is open while it runs."""

    backend: Backend
    worker: Worker
    shelf: Shelf
    metrics: MetricsFile
    blobs: BlobStore | None


class OfflineTraining:
    """Trains on `source` until it ends, a stop criterion is met, or `stop` is set.

    Consumes: recorded steps. Produces: one line of metrics.jsonl a step, checkpoints in a folder of its own. Waits for: the source. Unblocked by: `stop`.
    Invariant: at a step's edge the weights are those of `progress.step`, made from the steps that the source gave last.
    """

    def __init__(
        self,
        source: StepSource,
        progress: Progress,
        *,
        trainer: TrainerConfig,
        stop: StopConfig,
        parts: OfflineParts,
        on_step: Callable[[OfflineStep], None] = lambda _step: None,
        normaliser: Normaliser = "token_mean",
        max_new_tokens: int = 0,
    ) -> None:
        """`max_new_tokens` is what the normaliser constant divides by."""
        self._source, self._stop, self._parts, self._on_step = source, stop, parts, on_step
        advantage = find_advantage(trainer.advantage)
        self._whole_step = needs_whole_step(advantage)
        self._collate = functools.partial(collate_step, advantage=advantage, normaliser=normaliser, max_new_tokens=max_new_tokens)
        self._elapsed_before_s, self._started_s = progress.elapsed_s, time.monotonic()
        self._trained_on: dict[int, str] = {}
        """Digest of what each step was made of, since this process began."""
        self._incarnation = 0
        self._moved = False
        """Trained since the checkpoint that it began with, or went back to one."""
        self.progress = progress
        self.waiting_for: Edge | None = None
        self.waiting_since = 0.0
        self.moved_at = time.time()
        parts.shelf.start(progress.step)

    @property
    def incarnation(self) -> int:
        """That trained the newest step in the run; 0: none yet."""
        return self._incarnation

    async def run(self, stop: asyncio.Event) -> str:
        """Why it ended, at a step's edge, with a checkpoint of the newest step."""
        stopped = asyncio.create_task(stop.wait(), name="offline:stop")
        try:
            while True:
                again = await self._follow(self._source(self.progress.step + 1), stopped)
                if isinstance(again, str):
                    await self._keep()
                    return again
                await self._go_back(again.step)
        finally:
            stopped.cancel()
            await asyncio.wait([stopped])

    async def _follow(self, stream: AsyncGenerator[RecordedStep, None], stopped: asyncio.Task[bool]) -> str | RecordedStep:
        """Train along one stream. The reason to end, or the step that takes the place of others that are in the weights already."""
        upcoming: asyncio.Task[RecordedStep | None] | None = None
        try:
            while True:
                if (reason := stop_reason(self.progress, self._stop)) is not None:
                    return reason
                upcoming = upcoming or _next(stream)
                waiting_s = time.monotonic()
                self._wait(Edge.NO_GROUP)
                await asyncio.wait((upcoming, stopped), return_when=asyncio.FIRST_COMPLETED)
                self._wait(None)
                if stopped.done():
                    return "signal"
                step, upcoming = await upcoming, None
                if step is None:
                    return "the recorded steps are over"
                if step.step <= self.progress.step:
                    if self._trained_on.get(step.step) != _made_of(step):
                        return step
                    if step.step == self.progress.step:
                        self._incarnation = step.incarnation
                    continue
                if step.step != self.progress.step + 1:
                    raise ReplayGap(
                        f"step {step.step} follows step {self.progress.step}: what is between is missing; start at a checkpoint of step {step.step - 1}"
                    )
                upcoming = _next(stream)  # read while this one trains
                await self._train(step, wait_s=time.monotonic() - waiting_s)
        finally:
            await _end(stream, upcoming)

    async def _go_back(self, step: int) -> None:
        """To the newest checkpoint of our own before `step`. Raises: `ReplayGap` if there is none."""
        before = [one for one in await asyncio.to_thread(self._parts.shelf.kept) if one[0] < step]
        if not before:
            raise ReplayGap(
                f"the run went back and trained step {step} on other groups, and there is no checkpoint before it here: start anew in another folder"
            )
        found = await asyncio.to_thread(self._parts.shelf.read, *before[-1])
        await self._parts.worker.call(self._parts.backend.restore, found.state)
        self._adopt(found)
        _LOG.info("the run trained step %d again on other groups: went back to step %d", step, self.progress.step)

    def _adopt(self, checkpoint: Checkpoint) -> None:
        self.progress = dataclasses.replace(checkpoint.progress, elapsed_s=self.progress.elapsed_s)
        self._trained_on = {step: made for step, made in self._trained_on.items() if step <= self.progress.step}
        self._incarnation, self._moved = checkpoint.incarnation, True
        self._parts.shelf.start(self.progress.step)

    # -- a step ------------------------------------------------------------------------------------------------------------------------------------

    async def _train(self, step: RecordedStep, *, wait_s: float) -> None:
        parts, started_s, busy_s = self._parts, time.monotonic(), self._parts.worker.busy_s
        figures, report, digest_here = await parts.worker.call(self._take_step, step)
        seconds = time.monotonic() - started_s + wait_s
        stats = step_stats(figures, report, seconds=seconds, wait_s=wait_s, train_s=parts.worker.busy_s - busy_s)
        self._incarnation, self._moved = step.incarnation, True
        self._trained_on[step.step] = _made_of(step)
        self.progress = Progress(
            step=step.step,
            tokens=self.progress.tokens + cast("int", stats["tokens"]),
            elapsed_s=self._elapsed_before_s + time.monotonic() - self._started_s,
            rewards=(*self.progress.rewards, cast("float", stats["reward"]))[-REWARD_WINDOW:],
        )
        done = OfflineStep(step=step.step, incarnation=step.incarnation, digest=digest_here, recorded_digest=step.digest)
        parts.metrics.append(self._line(done, stats | step_diagnostics(figures, report)))
        self._on_step(done)
        if parts.shelf.due(step.step):
            await self._keep()

    def _line(self, done: OfflineStep, stats: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return {
            "step": done.step,
            "version": f"{done.incarnation}:{done.step}",
            "at": time.time(),
            "elapsed_s": self.progress.elapsed_s,
            "tokens_total": self.progress.tokens,
            "digest": done.digest,
            "recorded_digest": done.recorded_digest,
            **stats,
        }

    async def _keep(self) -> None:
        """A checkpoint of the newest step, unless there is one, or nothing was trained yet."""
        if not self._moved or (self.progress.step, self._incarnation) in await asyncio.to_thread(self._parts.shelf.kept):
            return
        state = await self._parts.worker.call(self._parts.backend.capture)
        await asyncio.to_thread(self._parts.shelf.write, self.progress, incarnation=self._incarnation, state=state)

    def _wait(self, edge: Edge | None) -> None:
        now = time.time()
        self.waiting_for, self.waiting_since = edge, now if edge is not None else 0.0
        if edge is None:
            self.moved_at = now

    def _take_step(self, step: RecordedStep) -> tuple[list[ChunkFigures], StepReport, str]:
        """In the worker's thread."""
        backend, figures = self._parts.backend, list[ChunkFigures]()
        chunks = decoded(step, self._parts.blobs)
        for together in [list(chunks)] if self._whole_step else ([chunk] for chunk in chunks):
            for batch in self._collate(together):
                backend.accumulate(batch)
                figures.append(batch.figures)
        report = backend.finish_step(step.step, step_divisor(figures))
        return figures, report, digest_now(backend)


def _made_of(step: RecordedStep) -> str:
    """Equal for steps that train the same: the same payloads in the same order and chunks, under the same mask."""
    return digest(write_frame("made_of", {"chunks": [_chunk_made_of(chunk) for chunk in step.chunks]}))


def _chunk_made_of(chunk: ChunkRecord) -> list[object]:
    lineage = chunk.record.lineage
    judged = [chunk.record.guard, chunk.record.cutoff, [[one, limit] for one, limit in sorted(lineage.limits().items())]]
    return [judged, [[header.payload_digest, to_wire(header.trainable)] for header in chunk.headers]]


def _next(stream: AsyncGenerator[RecordedStep, None]) -> asyncio.Task[RecordedStep | None]:
    async def take() -> RecordedStep | None:
        return await anext(stream, None)

    return asyncio.create_task(take(), name="offline:read")


async def _end(stream: AsyncGenerator[RecordedStep, None], upcoming: asyncio.Task[RecordedStep | None] | None) -> None:
    if upcoming is not None:
        upcoming.cancel()
        await asyncio.wait([upcoming])
        if not upcoming.cancelled():
            upcoming.exception()  # of a step that is not wanted any more
    await stream.aclose()
