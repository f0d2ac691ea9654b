"""The three ways to train without taking anything from a run: shadow, replay, recorded stream. What each starts from, reads, and where it writes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffer.blobs import BlobStore
from buffer.config import BufferConfig
from buffer.contract import CheckpointRef, Ledger
from buffer.exchange import Export
from buffer.recording import RecordedStep, Recording
from buffer.replay import JournalReader, recorded_steps
from buffer.storage import open_storage
from consumer.backend import Backend
from consumer.checkpoint import Checkpoint, Progress, read_checkpoint
from consumer.config import StopConfig, TrainerDaemonConfig
from consumer.offline import OfflineParts, OfflineStep, OfflineTraining, StepSource
from consumer.ranks.making import make_backend
from consumer.shelf import Shelf, own_folder
from consumer.trackers.tracked import open_metrics
from consumer.worker import Worker
from protocol.config import PlacementConfig
from protocol.connection import Client
from protocol.errors import ConfigError, IdentityMismatch, ReplayGap
from protocol.identity import tokenizer_digest
from protocol.keys import Keys
from protocol.messages import TrainerStatus
from protocol.objects import object_store
from protocol.presence import Presence
from protocol.versions import Lineage, Version
from protocol.wakeups import wakeups

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHandle:
    """A run in Redis, for those that only read it."""

    client: Client
    keys: Keys
    ledger: Ledger
    settings: BufferConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    folder: Path
    """New: metrics.jsonl and checkpoints go there."""
    from_step: int | None = None
    """Start with the checkpoint of this step; None: of the one before the first that is replayed. With another, the weights are not the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Steps, and where their large extras lie."""

    steps: StepSource
    blobs: BlobStore | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A folder of our own with the model on it, nothing trained yet."""

    config: TrainerDaemonConfig
    folder: Path
    worker: Worker
    backend: Backend
    shelf: Shelf

    async def restore(self, start: Checkpoint) -> Progress:
        await self.worker.call(self.backend.restore, start.state)
        return start.progress

    @contextlib.contextmanager
    def training(
        self, source: _Source, progress: Progress, *, stop: StopConfig, on_step: Callable[[OfflineStep], None] = lambda _step: None
    ) -> Iterator[OfflineTraining]:
        """Over its parts, its files open."""
        run = f"{self.config.run.name}-{self.folder.name}"
        with open_metrics(self.folder, self.config.trackers, run=run, settings=self.config.told()) as metrics:
            parts = OfflineParts(backend=self.backend, worker=self.worker, shelf=self.shelf, metrics=metrics, blobs=source.blobs)
            yield OfflineTraining(
                source.steps,
                progress,
                trainer=self.config.trainer,
                stop=stop,
                parts=parts,
                on_step=on_step,
                normaliser=self.config.loss.normaliser,
                max_new_tokens=self.config.rollout.max_new_tokens,
            )


@contextlib.asynccontextmanager
async def _bench(config: TrainerDaemonConfig, folder: Path) -> AsyncIterator[_Bench]:
    """Raises: `ConfigError` if another process trains in `folder`."""
    async with Worker() as worker:
        with own_folder(folder):
            shelf = Shelf(folder / "checkpoint", config=config.checkpoint, trainer=config.trainer, model_path=config.model_folder)
            own = config.model_copy(update={"placement": PlacementConfig()})  # it shares its device with nobody's engines, whatever the run does
            backend = await worker.call(make_backend, own)
            yield _Bench(config=config, folder=folder, worker=worker, backend=backend, shelf=shelf)


async def run_shadow(config: TrainerDaemonConfig, run: RunHandle, stop: asyncio.Event, *, name: str, from_step: int | None) -> None:
    """Train on every step that the run trains, beside its trainer, until the run has drained or a stop criterion is met.

    It goes on from its own newest checkpoint on the run's line; else from the registered one of `from_step`, else from the starting weights. Writes
    `shadow-<name>/` in the run's folder and announces itself as a shadow. Order of stopping: the step under way, a checkpoint of it, the heartbeats.
    Raises: `ReplayGap` when a step has left the run before it was read: the run never waits for a shadow.
    """
    config.check_alone()
    member = f"shadow-{name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--shadow {name!r}: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit")
    reader = JournalReader(run.ledger, open_storage(run.settings, run.keys.run))
    async with wakeups(run.client, run.keys) as waker, _bench(config, config.run.folder / member) as bench:
        status = await run.ledger.status()
        start = await asyncio.to_thread(_newest_of_line, bench.shelf, status.lineage)
        if start is None and from_step:  # step 0 is the starting weights
            start = await registered_checkpoint(config, status.checkpoints, from_step)
        progress = Progress() if start is None else await bench.restore(start)
        if status.trained > progress.step and progress.step + 1 not in await reader.held():
            registered = ", ".join(str(one.step) for one in status.checkpoints) or "none"
            raise ReplayGap(
                f"step {progress.step + 1}, the next for {member}, has left the run: begin another shadow at a registered checkpoint with --from-step "
                f"(registered are {registered}), or keep more with buffer.retention or buffer.spill"
            )
        _LOG.info("%s begins after step %d", member, progress.step)
        source = _Source(steps=lambda step: reader.follow(member, waker, step), blobs=reader.blobs)
        with bench.training(source, progress, stop=config.stop) as training:
            async with _announced(Presence(run.client, run.keys, "shadow", TrainerStatus), member, training, bench.worker):
                reason = await training.run(stop)
        _LOG.info("%s ended after step %d: %s", member, training.progress.step, reason)


async def run_replay(
    config: TrainerDaemonConfig, run: RunHandle, steps: Sequence[int], stop: asyncio.Event, *, plan: ReplayPlan, on_step: Callable[[OfflineStep], None]
) -> str:
    """Train journalled steps again, from the registered checkpoint before the first of them. Why it ended.

    `on_step` hears of each: from that checkpoint, a CPU gives the run's weights again, bit by bit.
    """
    config.check_alone()
    before = steps[0] - 1
    reader = JournalReader(run.ledger, open_storage(run.settings, run.keys.run))

    async def read(start: int) -> AsyncGenerator[RecordedStep, None]:
        for step in steps:
            if step >= start:
                yield await reader.read(step)

    at = before if plan.from_step is None else plan.from_step
    start = await registered_checkpoint(config, (await run.ledger.status()).checkpoints, at) if at else None
    if await asyncio.to_thread((plan.folder / "metrics.jsonl").exists):
        raise ConfigError(f"{plan.folder} holds an earlier replay: move it away, or choose another folder with --dir")
    if at != before:
        _LOG.warning("step %d is trained on the weights of step %d, not of step %d: the weights will not be the run's", steps[0], at, before)
    async with _bench(config, plan.folder) as bench:
        found = Progress() if start is None else await bench.restore(start)
        progress = dataclasses.replace(found, step=before)
        with bench.training(_Source(steps=read, blobs=reader.blobs), progress, stop=StopConfig(), on_step=on_step) as training:
            return await training.run(stop)


async def run_recorded(config: TrainerDaemonConfig, where: str, stop: asyncio.Event) -> None:
    """Train on a recording (folder or URL) or an export (.parquet, .jsonl): no Redis, no producer, no engine.

    From model.path, or from its own newest checkpoint. Steps keep their numbers. Writes `recorded/` in the run's folder.
    """
    config.check_alone()
    source = await asyncio.to_thread(_recorded_source, config, where)
    before = await _before_first(source, where)
    async with _bench(config, config.run.folder / "recorded") as bench:
        kept = await asyncio.to_thread(bench.shelf.kept)
        progress = await bench.restore(await asyncio.to_thread(bench.shelf.read, *kept[-1])) if kept else Progress(step=before)
        start = f"after step {progress.step}, from the checkpoint of an earlier start in {bench.folder}" if kept else f"with step {before + 1}, from model.path"
        _LOG.info("begins %s", start)
        with bench.training(source, progress, stop=config.stop) as training:
            reason = await training.run(stop)
        _LOG.info("ended after step %d: %s; see %s", training.progress.step, reason, bench.folder)


async def registered_checkpoint(config: TrainerDaemonConfig, registered: Sequence[CheckpointRef], step: int) -> Checkpoint:
    """The run's checkpoint of `step`. Raises: `ConfigError` naming those that are registered, if it is not."""
    for reference in registered:
        if reference.step == step:
            return await asyncio.to_thread(read_checkpoint, reference, folder=config.checkpoint_folder)
    steps = ", ".join(str(one.step) for one in registered) or "none"
    raise ConfigError(
        f"the run has no checkpoint of step {step} to start from; registered are {steps}: begin with the step after one of these, or with step 1, give one of "
        "them, or 0 for the starting weights, as --from-step, or keep more with checkpoint.keep"
    )


# -- parts ---------------------------------------------------------------------------------------------------------------------------------------


def _recorded_source(config: TrainerDaemonConfig, where: str) -> _Source:
    """Raises: `ConfigError`, `ReplayGap` for what is no recording; `IdentityMismatch` for one of another tokenizer."""
    found: Callable[[], Iterator[RecordedStep]]
    if where.endswith((".parquet", ".jsonl")):
        export = Export(Path(where))
        about, found = export.about, lambda: export.steps(config.buffer)
    else:
        recording = Recording(object_store(where, key="--recorded"))
        about, found = recording.about(), lambda: recorded_steps(recording, config.buffer)
    if about.identity.tokenizer != tokenizer_digest(config.model):
        raise IdentityMismatch(f"{where} was recorded with another tokenizer than that of model.path {config.model.path}: set model.path to that run's")

    async def read(start: int) -> AsyncGenerator[RecordedStep, None]:
        steps = found()
        while (step := await asyncio.to_thread(next, steps, None)) is not None:
            if step.step >= start:
                yield step

    return _Source(steps=read, blobs=open_storage(about.settings, about.run).blobs)


async def _before_first(source: _Source, where: str) -> int:
    """The step before the first recorded one."""
    async with contextlib.aclosing(source.steps(0)) as steps:
        async for step in steps:
            return step.step - 1
    raise ConfigError(f"{where} has no whole step: fewer groups than buffer.groups_per_step, or none")


def _newest_of_line(shelf: Shelf, lineage: Lineage) -> Checkpoint | None:
    """A shadow's own newest checkpoint of a step that the run still has."""
    for step, incarnation in reversed(shelf.kept()):
        if lineage.contains(Version(incarnation, step)):
            return shelf.read(step, incarnation)
    return None


@contextlib.asynccontextmanager
async def _announced(presence: Presence[TrainerStatus], member: str, training: OfflineTraining, worker: Worker) -> AsyncIterator[None]:
    """Say every second that a shadow is here while the context is open, and take it back at its end."""
    done, started_s = asyncio.Event(), time.monotonic()

    async def beat() -> None:
        while not done.is_set():
            step = training.progress.step
            status = TrainerStatus(
                trainer_id=member,
                incarnation=training.incarnation,
                step=step + 1,
                trained=step,
                waiting_for=training.waiting_for,
                waiting_since=training.waiting_since,
                moved_at=training.moved_at,
                busy_s=worker.busy_s,
                uptime_s=time.monotonic() - started_s,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
            await presence.beat(member, status)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await done.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(beat(), name="shadow:heartbeat")
        try:
            yield
        finally:
            done.set()
    await presence.leave(member)
