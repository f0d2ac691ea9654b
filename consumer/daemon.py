"""One life of the trainer: model, attachment, training, end of the run. Imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass

from buffer.audit import AuditSpill
from buffer.client import TrainerBuffer
from buffer.contract import Attachment, CheckpointRef, Ledger
from buffer.witness import Witness
from consumer.backend import Backend
from consumer.checkpoint import CheckpointDamaged, Progress, read_checkpoint, sweep
from consumer.config import PUBLISH_S, TrainerDaemonConfig
from consumer.journal import JournalTail
from consumer.keeper import Keeper
from consumer.loop import Parts, TrainingLoop
from consumer.stats import MetricsFile
from consumer.torch_backend import TorchBackend
from consumer.worker import Worker
from protocol.connection import Client
from protocol.durable import make_folder
from protocol.errors import ConfigError, RunExists
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import TrainerStatus
from protocol.presence import Presence
from protocol.wakeups import Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, store_folder
from weightsync.publisher import Publisher
from weightsync.registry import Registry
from weightsync.store import DirectoryStore

_LOG = logging.getLogger(__name__)
_BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where training starts: the starting weights, or a checkpoint that the backend has been restored to."""

    backend: Backend
    progress: Progress
    journal: JournalTail
    checkpoint: CheckpointRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """This attachment and what it holds open."""

    ledger: Ledger
    waker: Wakeups
    worker: Worker
    publisher: Publisher
    attachment: Attachment
    trainer_id: str


async def run_trainer(
    config: TrainerDaemonConfig,
    ledger: Ledger,
    client: Client,
    keys: Keys,
    stop: asyncio.Event,
    *,
    new_as: RunIdentity | None,
    from_step: int | None = None,
) -> None:
    """Train until the run ends. `new_as`: make the run with this identity; None: it is there. `from_step`: the checkpoint to resume from; None: the newest.

    Order of stopping: training ends at a step's edge, the final version is published, the final checkpoint registered, engines ack to a deadline, the run
    drains; then heartbeats, publisher, wake-ups and the spill of the audit stream close.
    Raises: `RunExists`; `Fenced` when another trainer attached: this one changes nothing more.
    """
    async with Worker() as worker:
        start = await _start_from(config, ledger, worker, new_as, from_step)
        await asyncio.to_thread(make_folder, config.run.folder)
        async with AuditSpill(client, keys, config.run.folder / "audit.jsonl"), wakeups(client, keys) as waker:
            trainer_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
            attachment = await ledger.attach(start.checkpoint, trainer_id=trainer_id)
            _LOG.info("attached as incarnation %d after step %d", attachment.incarnation, attachment.resume_step)
            kept = () if start.checkpoint is None else (await ledger.status()).checkpoints
            await asyncio.to_thread(sweep, config.checkpoint_folder, kept, incarnation=attachment.incarnation)
            store = DirectoryStore(store_folder(config.weights, config.run), config.model.path)
            async with Publisher(Channel(client, keys), store, keep=config.weights.keep) as publisher:
                here = _Here(ledger=ledger, waker=waker, worker=worker, publisher=publisher, attachment=attachment, trainer_id=trainer_id)
                with _training(config, start, here) as loop:
                    async with _heartbeats(Presence(client, keys, "trainer", TrainerStatus), loop, worker, publisher):
                        await _train_and_end(loop, ledger, Registry(client, keys), waker, stop, weights=config.weights)


async def _start_from(config: TrainerDaemonConfig, ledger: Ledger, worker: Worker, new_as: RunIdentity | None, from_step: int | None) -> _Start:
    backend = await worker.call(TorchBackend, config.model_folder, config.trainer, temperature=config.rollout.temperature, seed=config.run.seed)
    if new_as is not None:
        if not await ledger.create(new_as, config.buffer):
            raise RunExists(f"run {config.run.name!r} was made by somebody else just now: use --resume to go on with it, or another run.name")
        return _Start(backend=backend, progress=Progress(), journal=JournalTail(), checkpoint=None)
    registered = (await ledger.status()).checkpoints
    reference = _chosen(registered, from_step)
    if reference is None:
        return _Start(backend=backend, progress=Progress(), journal=JournalTail(), checkpoint=None)
    try:
        found = await asyncio.to_thread(read_checkpoint, reference, folder=config.checkpoint_folder)
    except CheckpointDamaged as problem:
        raise CheckpointDamaged(f"{problem}; {_instead(registered, reference)}") from problem
    await worker.call(backend.restore, found.state)
    return _Start(backend=backend, progress=found.progress, journal=JournalTail.load(found.journal), checkpoint=reference)


def _chosen(registered: Collection[CheckpointRef], from_step: int | None) -> CheckpointRef | None:
    """The newest, or the one asked for. Raises: `ConfigError` if that is not registered."""
    if from_step is None:
        return max(registered, key=lambda one: one.step, default=None)
    for one in registered:
        if one.step == from_step:
            return one
    steps = ", ".join(str(one.step) for one in registered) or "none"
    raise ConfigError(f"--from-step {from_step}: no checkpoint of that step is registered; registered are {steps}")


def _instead(registered: Collection[CheckpointRef], damaged: CheckpointRef) -> str:
    """What a person may do about a damaged checkpoint."""
    others = sorted((one.step for one in registered if one.step != damaged.step), reverse=True)
    if not others:
        return "no other is registered: restore its folder, or start another run"
    steps = ", ".join(str(step) for step in others)
    return f"restore its folder, or go back to another that is registered (step {steps}) with `rl-trainer --resume --from-step {others[0]}`"


@contextlib.contextmanager
def _training(config: TrainerDaemonConfig, start: _Start, here: _Here) -> Iterator[TrainingLoop]:
    """The loop over its parts, its files open."""
    with contextlib.closing(MetricsFile(config.run.folder / "metrics.jsonl")) as metrics:
        keeper = Keeper(
            here.ledger,
            here.attachment.incarnation,
            config=config.checkpoint,
            trainer=config.trainer,
            folder=config.checkpoint_folder,
            model_path=config.model_folder,
            journal=start.journal,
            last=start.checkpoint,
        )
        parts = Parts(
            ledger=here.ledger,
            buffer=TrainerBuffer(here.ledger, here.waker, here.attachment.incarnation),
            backend=start.backend,
            worker=here.worker,
            publisher=here.publisher,
            keeper=keeper,
            witness=Witness(config.run.folder / "witness.jsonl"),
            metrics=metrics,
        )
        yield TrainingLoop(
            here.attachment,
            start.progress,
            trainer=config.trainer,
            publish_every=config.weights.publish_every,
            stop=config.stop,
            parts=parts,
            trainer_id=here.trainer_id,
        )


async def _train_and_end(loop: TrainingLoop, ledger: Ledger, registry: Registry, waker: Wakeups, stop: asyncio.Event, *, weights: WeightsConfig) -> None:
    """Steps within `consumer.config.stop_seconds` once `stop` is set."""
    await loop.publish_now(PUBLISH_S)
    reason = await loop.run(stop)
    version = await loop.publish_now(PUBLISH_S)
    await loop.checkpoint_now()
    if behind := await registry.wait_acks(version, waker, apply_s=weights.apply_deadline_s, most_paused=weights.max_paused):
        _LOG.warning("the run ends without these engines at %s: %s", version, ", ".join(behind))
    await ledger.drain(version.incarnation, reason)
    _LOG.info("run ended after step %d: %s", version.n, reason)


@contextlib.asynccontextmanager
async def _heartbeats(presence: Presence[TrainerStatus], loop: TrainingLoop, worker: Worker, publisher: Publisher) -> AsyncIterator[None]:
    """Announce the trainer every second while the context is open, and take it back at its end. A heartbeat that fails and a publisher that is gone end it:
    without versions a trainer waits for groups that nobody may generate.
    """
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_beat(presence, loop, worker, done), name="trainer:heartbeat")
        published = group.create_task(publisher.failed(), name="trainer:publisher")
        try:
            yield
        finally:
            done.set()
            published.cancel()
    await presence.leave(loop.status.trainer_id)


async def _beat(presence: Presence[TrainerStatus], loop: TrainingLoop, worker: Worker, done: asyncio.Event) -> None:
    while not done.is_set():
        await presence.beat(loop.status.trainer_id, loop.live_status(busy_s=worker.busy_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await done.wait()
