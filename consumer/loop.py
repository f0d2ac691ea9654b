"""The training loop of one attachment.

    open_step(s) ─► lease, fetch chunk 0 ─► train it │ lease, fetch chunk 1 ─► train it │ … ─► optimizer step ─► snapshot ─► witness ─► trained(s) ─► publish
                                            └────────┴─ meanwhile the next is fetched                                                       (background)

The witness line is written before `trained(s)`. A kill between the two leaves a line for a step that the ledger never took: nothing of it survives, since what
comes back resumes from a checkpoint before it and forks the line of history there, or, with nobody coming back, it is the one step after the newest trained.
The other order would leave a trained step that no witness saw, which is exactly what losing the file's tail looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from buffer.client import TrainerBuffer
from buffer.contract import Attachment, ChunkRecord, Ledger
from buffer.witness import Witness, WitnessLine
from consumer.advantages import find_advantage, needs_whole_step
from consumer.backend import Backend, SharesDevice, StepReport, digest_now
from consumer.batch import ChunkFigures, collate_step, step_divisor
from consumer.checkpoint import Progress
from consumer.config import PUBLISH_S, StopConfig, TrainerConfig
from consumer.device import Device, OwnDevice
from consumer.keeper import Keeper
from consumer.losses.config import Normaliser
from consumer.mending import Mender
from consumer.ranks.crew import Crew
from consumer.stats import REWARD_WINDOW, MetricsFile, step_diagnostics, step_stats
from consumer.stopping import stop_reason
from consumer.worker import Worker
from protocol.errors import LedgerRegressed, StepOrder
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Edge, GroupHeader, JsonValue, RolloutGroup, TrainerStatus
from protocol.versions import Version
from weightsync.publisher import Publisher
from weightsync.snapshot import HeldWeights, Snapshot, TensorBytes, digest_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with; each is open while it runs."""

    ledger: Ledger
    buffer: TrainerBuffer
    backend: Backend
    crew: Crew
    worker: Worker
    publisher: Publisher
    keeper: Keeper
    mender: Mender
    witness: Witness
    metrics: MetricsFile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Taken:
    """A chunk that was leased and fetched."""

    chunk: ChunkRecord
    groups: list[tuple[GroupHeader, RolloutGroup]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Gathered:
    """A whole step, ready for the optimizer."""

    chunks: list[ChunkRecord]
    figures: list[ChunkFigures]
    wait_s: float
    since: int
    """`Mender.mended` before its first group was taken."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Weights:
    """The weights as they are."""

    digest: str
    tensors: Mapping[str, TensorBytes] | None
    """None: they are not to be published."""
    snapshot_s: float
    """Copying took so long, and training waited for it."""
    digest_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stepped:
    """An optimizer step."""

    report: StepReport
    weights: _Weights


class TrainingLoop:
    """Trains until a stop criterion, `stop`, or an error.

    Consumes: READY groups. Produces: trained steps, versions, checkpoints, one witness line and one line of metrics.jsonl a step.
    Waits for: groups (edge no group). Unblocked by: producers, `stop`.
    """

    def __init__(
        self,
        attachment: Attachment,
        progress: Progress,
        *,
        trainer: TrainerConfig,
        publish_every: int,
        stop: StopConfig,
        parts: Parts,
        trainer_id: str,
        normaliser: Normaliser = "token_mean",
        max_new_tokens: int = 0,
    ) -> None:
        """`max_new_tokens` is what the normaliser constant divides by."""
        self._attachment = attachment
        self._incarnation = attachment.incarnation
        self._fork = attachment.lineage.forks[attachment.incarnation]
        advantage = find_advantage(trainer.advantage)
        self._whole_step = needs_whole_step(advantage)
        self._collate = functools.partial(collate_step, advantage=advantage, normaliser=normaliser, max_new_tokens=max_new_tokens)
        self._publish_every = publish_every
        self._stop = stop
        self._parts = parts
        self._started_s = time.monotonic()
        self._elapsed_before_s = progress.elapsed_s
        self._published = -1
        self._idle = False
        self.device: Device = OwnDevice()
        self.progress = progress
        self.status = TrainerStatus(
            trainer_id=trainer_id, incarnation=self._incarnation, step=progress.step, trained=progress.step, host=socket.gethostname(), pid=os.getpid()
        )

    def live_status(self, *, busy_s: float) -> TrainerStatus:
        """For a heartbeat."""
        return dataclasses.replace(self.status, busy_s=busy_s, uptime_s=time.monotonic() - self._started_s)

    async def publish_now(self, deadline_s: float) -> Version:
        """Publish the weights as they are and return their version once engines can see it."""
        version = Version(self._incarnation, self.progress.step)
        if self._published != version.n:
            self._submit(await self._parts.worker.call(self._look, publish=True))
        await self._parts.publisher.drain(deadline_s)
        return version

    @contextlib.contextmanager
    def waiting_for(self, edge: Edge) -> Iterator[None]:
        """What heartbeats say while the context is open, where no step waits."""
        self._show(edge=edge)
        try:
            yield
        finally:
            self._show()

    async def run(self, stop: asyncio.Event) -> str:
        """Why training ended, at a step's edge: nothing of an unfinished step is in the weights, and no checkpoint is in flight.

        Order of stopping: the fetch under way, the chunk that is being trained, then the checkpoint in flight.
        """
        stopped = asyncio.create_task(stop.wait(), name="trainer:stop")
        try:
            async with asyncio.TaskGroup() as background:
                while True:
                    if (reason := stop_reason(self.progress, self._stop)) is not None:
                        break
                    if not await self._step(background, self.progress.step + 1, stopped):
                        reason = "signal"
                        break
                await self._parts.keeper.settle()
        finally:
            stopped.cancel()
        return reason

    async def checkpoint_now(self) -> None:
        """A checkpoint of the step just trained, registered on return, unless it has one."""
        if self._parts.keeper.step != self.progress.step:
            async with asyncio.TaskGroup() as group:
                await self._checkpoint(group)

    # -- a step ----------------------------------------------------------------------------------------------------------------------------------

    async def _step(self, background: asyncio.TaskGroup, step: int, stopped: asyncio.Task[bool]) -> bool:
        """Train one step; False if `stopped` came first, with the weights as before it."""
        parts, started_s, busy_s = self._parts, time.monotonic(), self._parts.worker.busy_s
        gathered = await self._gather(step, stopped)
        if gathered is None:
            return False
        after = await parts.worker.call(self._finish, step, gathered.figures)
        parts.mender.stepped(step, gathered.chunks)
        stats = step_stats(
            gathered.figures,
            after.report,
            seconds=time.monotonic() - started_s,
            wait_s=gathered.wait_s,
            train_s=parts.worker.busy_s - busy_s,
            snapshot_s=after.weights.snapshot_s,
            digest_s=after.weights.digest_s,
        )
        reply = await parts.mender.trained(self._incarnation, step, after.weights.digest, stats, since=gathered.since)
        failpoint(Failpoint.TRAINER_TRAINED)
        told = stats | step_diagnostics(gathered.figures, after.report)
        await self._edge(background, step, after.weights, told, wanted=reply.checkpoint_wanted)
        if self.device.shared:  # engines that have the device again find the new version at once
            await parts.publisher.drain(PUBLISH_S)
            await self.device.give()
        return True

    async def _gather(self, step: int, stopped: asyncio.Task[bool]) -> _Gathered | None:
        """All chunks of the step, their gradients accumulated; None, and nothing accumulated, if `stopped` came first. Where the ledger forgot what it had
        leased, the step begins again once the ledger is mended (rule R1).
        """
        mender = self._parts.mender
        while True:
            since, forgot = mender.mended, None
            try:
                gathered = await self._take_all(step, stopped, since)
            except* LedgerRegressed as problems:
                forgot = cast("LedgerRegressed", problems.exceptions[0])
            except* StepOrder:  # what was leased before it was mended, at somebody else's call, is not leased any more
                if await mender.told() == since:
                    raise
            else:
                if gathered is not None and await mender.told() == since:
                    return gathered
            await self._parts.worker.call(self._parts.backend.abandon_step)
            await self.device.give()  # groups may have to be generated anew
            if stopped.done():
                return None
            if forgot is not None:
                await mender.mend(forgot, since=since)

    async def _take_all(self, step: int, stopped: asyncio.Task[bool], since: int) -> _Gathered | None:
        parts, wait_s = self._parts, 0.0
        self._show(step=step)
        await parts.ledger.open_step(self._incarnation, step)
        failpoint(Failpoint.TRAINER_STEP_OPENED)
        chunks: list[ChunkRecord] = []
        figures: list[ChunkFigures] = []
        held: list[_Taken] = []
        async with asyncio.TaskGroup() as fetching:
            upcoming = fetching.create_task(self._take(step, 0), name="trainer:fetch")
            for index in itertools.count(1):
                waiting_s, self._idle = time.monotonic(), True
                await asyncio.wait((upcoming, stopped), return_when=asyncio.FIRST_COMPLETED)
                wait_s += time.monotonic() - waiting_s
                self._idle = False
                self._show(edge=None)
                if stopped.done():
                    upcoming.cancel()
                    break
                taken = await upcoming
                if not taken.chunk.last:
                    upcoming = fetching.create_task(self._take(step, index), name="trainer:fetch")
                chunks.append(taken.chunk)
                held.append(taken)
                if taken.chunk.last or not (self.device.shared or self._whole_step):
                    if not await self._have_device(stopped):
                        break
                    for together in [held] if self._whole_step else [[one] for one in held]:
                        figures += await parts.worker.call(self._accumulate, together)
                    held = []
                self.status = dataclasses.replace(self.status, moved_at=time.time())
                if taken.chunk.last:
                    break
        return None if stopped.done() else _Gathered(chunks=chunks, figures=figures, wait_s=wait_s, since=since)

    async def _have_device(self, stopped: asyncio.Task[bool]) -> bool:
        """False if `stopped` came first: others may take long to let go."""
        taking = asyncio.ensure_future(self.device.take())
        try:
            await asyncio.wait((taking, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not taking.done():
                taking.cancel()
                await asyncio.wait((taking,))
        if taking.cancelled():
            return False
        taking.result()
        return True

    async def _take(self, step: int, index: int) -> _Taken:
        leased = await self._parts.buffer.lease(step, index, self._blocked)
        failpoint(Failpoint.TRAINER_CHUNK_LEASED)
        chunk, groups = await self._parts.crew.fetch(leased, self._blocked)
        failpoint(Failpoint.TRAINER_CHUNK_FETCHED)
        return _Taken(chunk=chunk, groups=groups)

    async def _edge(self, background: asyncio.TaskGroup, step: int, weights: _Weights, told: dict[str, JsonValue], *, wanted: bool) -> None:
        """Between two steps: count, publish, checkpoint, tell."""
        rewards = (*self.progress.rewards, cast("float", told["reward"]))[-REWARD_WINDOW:]
        elapsed_s = self._elapsed_before_s + time.monotonic() - self._started_s
        tokens = self.progress.tokens + cast("int", told["tokens"])
        self.progress = Progress(step=step, tokens=tokens, elapsed_s=elapsed_s, rewards=rewards)
        self._show(step=step + 1)
        if weights.tensors is not None:
            self._submit(weights)
        begun = time.monotonic()
        if wanted:  # a checkpoint in flight is of an earlier step and may free nothing; asked for only here, the wish must not be lost
            await self._parts.keeper.settle()
        if due := self._parts.keeper.due(step, wanted=wanted):
            await self._checkpoint(background)
        blocked_s = time.monotonic() - begun if due or wanted else 0.0
        self._parts.metrics.append(
            {
                "step": step,
                "version": str(Version(self._incarnation, step)),
                "at": time.time(),
                "elapsed_s": elapsed_s,
                "tokens_total": tokens,
                "checkpoint_blocked_s": blocked_s,
                **told,
                **self._publishing(),
            }
        )

    def _publishing(self) -> dict[str, JsonValue]:
        """The newest version that engines can see, and what publishing it took."""
        published = self._parts.publisher.published
        return {} if published is None else {"published": str(published.version), "publish_s": self._parts.publisher.publish_s}

    def _submit(self, weights: _Weights) -> None:
        tensors = weights.tensors
        assert tensors is not None
        self._published = self.progress.step
        known = "" if isinstance(tensors, HeldWeights) and not tensors.plain else weights.digest
        snapshot = Snapshot(version=Version(self._incarnation, self.progress.step), tensors=tensors, digest=known)
        self._parts.publisher.submit(snapshot, self._incarnation, acknowledged=True)

    async def _checkpoint(self, group: asyncio.TaskGroup) -> None:
        state = await self._parts.worker.call(self._parts.backend.capture)
        self._parts.keeper.begin(group, self.progress, state, self._parts.crew.write)

    def _blocked(self, edge: Edge) -> None:
        """Called at least once a second while a chunk is waited for; one that is fetched while another trains holds nobody up."""
        if self._idle:
            self._show(edge=edge)

    def _show(self, *, step: int | None = None, edge: Edge | None = None) -> None:
        """What the next heartbeat says: a step, or the edge waited on, since when it began to wait."""
        now = time.time()
        if step is not None:
            self.status = dataclasses.replace(self.status, step=step, trained=self.progress.step, moved_at=now)
        elif edge is None:
            self.status = dataclasses.replace(self.status, waiting_for=None, waiting_since=0.0, moved_at=now)
        elif edge != self.status.waiting_for:
            self.status = dataclasses.replace(self.status, waiting_for=edge, waiting_since=now)

    # -- in the worker's thread ------------------------------------------------------------------------------------------------------------------

    def _accumulate(self, held: Sequence[_Taken]) -> list[ChunkFigures]:
        """Chunks whose rollouts are compared with each other. Their figures stay and the payloads go, but where a whole step is compared."""
        taken = [(one.chunk, one.groups) for one in held]
        collated = self._parts.crew.collate([chunk for chunk, _ in taken], lambda: self._collate(taken))
        for one in collated:
            self._parts.backend.accumulate(one.mine)
            failpoint(Failpoint.TRAINER_ACCUMULATED)
        return [one.told for one in collated]

    def _finish(self, step: int, figures: list[ChunkFigures]) -> _Stepped:
        tokens = sum(one.tokens for one in figures)
        failpoint(Failpoint.TRAINER_BEFORE_OPTIMIZER)
        report = self._parts.backend.finish_step(step, step_divisor(figures))
        failpoint(Failpoint.TRAINER_STEPPED)
        if self.device.shared and isinstance(self._parts.backend, SharesDevice):
            self._parts.backend.offload()  # first: what is copied for publishing would lie on the device too
        weights = self._look(publish=step % self._publish_every == 0)
        line = WitnessLine(
            incarnation=self._incarnation,
            parent=self._fork.parent,
            fork_step=self._attachment.resume_step,
            step=step,
            seqs=tuple(seq for one in figures for seq in one.seqs),
            tokens=tokens,
            masked=sum(one.masked for one in figures),
            max_staleness=max((age for one in figures for age in one.staleness), default=0),
            digest=weights.digest,
            at=time.time(),
        )
        self._parts.witness.append(line)
        failpoint(Failpoint.TRAINER_WITNESSED)
        return _Stepped(report=report, weights=weights)

    def _look(self, *, publish: bool) -> _Weights:
        """What the weights are known by, with a copy of them if they are to be published."""
        begun = time.monotonic()
        if not publish:
            digest = digest_now(self._parts.backend)
            return _Weights(digest=digest, tensors=None, snapshot_s=0.0, digest_s=time.monotonic() - begun)
        tensors = self._parts.backend.snapshot()
        copied = time.monotonic()
        digest = digest_of(tensors)
        return _Weights(digest=digest, tensors=tensors, snapshot_s=copied - begun, digest_s=time.monotonic() - copied)
