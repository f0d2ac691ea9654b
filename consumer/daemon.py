"""One life of the trainer: model, attachment, training, end of the run. What brings torch is the backend, imported when it is made."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.audit import AuditSpill
from buffer.client import TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import Attachment, CheckpointRef, Ledger, LedgerStatus
from buffer.recording import RecordingAbout
from buffer.shares import check_enough
from buffer.spill import Spiller
from buffer.storage import Storage, claim_storage, open_storage
from buffer.upkeep import upkeep
from buffer.watchdog import EdgeLog
from buffer.witness import Witness
from consumer.backend import Backend, OtherModel
from consumer.checkpoint import CheckpointDamaged, Incarnations, Progress, checkpoints_on_disk, read_checkpoint, sweep
from consumer.config import PUBLISH_S, TrainerDaemonConfig
from consumer.device import shared_device
from consumer.journal import JournalTail
from consumer.keeper import Keeper
from consumer.loop import Parts, TrainingLoop
from consumer.mending import Mender, beyond, checkpoints_on_line, freed_groups, history_on_disk, newest_incarnation, swept
from consumer.ranks.children import Children, StartOthers
from consumer.ranks.crew import Alone, Crew
from consumer.ranks.making import make_backend
from consumer.ranks.place import Place
from consumer.sentinel import Sentinel
from consumer.trackers.tracked import open_metrics
from consumer.worker import Worker
from protocol.connection import Client
from protocol.daemon import hearing
from protocol.durable import make_folder
from protocol.errors import EXIT_CONFIG, ConfigError, Fenced, RollstreamError, RunExists
from protocol.failpoints import Failpoint, failpoint
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Edge, Seq, TrainerStatus
from protocol.presence import Presence
from protocol.wakeups import Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher
from weightsync.registry import Registry
from weightsync.store import open_store
from weightsync.turns import Turns

if TYPE_CHECKING:
    from consumer.ranks.leader import Leading

_LOG = logging.getLogger(__name__)
_BEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Back:
    """Where a person goes back to."""

    step: int
    abandon: bool = False
    """Give up what followed instead of training it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where training starts: the starting weights, or a checkpoint that the backend has been restored to."""

    backend: Backend
    progress: Progress
    journal: JournalTail
    checkpoint: CheckpointRef | None
    incarnations: Incarnations = field(default_factory=dict)
    abandon: tuple[Seq, ...] | None = None
    """Give up what followed the checkpoint, these groups of freed steps too."""
    above: int = 0
    """The newest incarnation that left anything on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """This attachment and what it holds open."""

    ledger: Ledger
    waker: Wakeups
    worker: Worker
    publisher: Publisher
    attachment: Attachment
    kept: tuple[CheckpointRef, ...]
    trainer_id: str
    storage: Storage


async def run_trainer(
    config: TrainerDaemonConfig,
    ledger: Ledger,
    client: Client,
    keys: Keys,
    stop: asyncio.Event,
    *,
    new_as: RunIdentity | None,
    from_step: int | None = None,
    abandon: bool = False,
    settings: BufferConfig | None = None,
    place: Place | None = None,
    start_others: StartOthers | None = None,
) -> None:
    """Train until the run ends. `new_as`: make the run with this identity; None: it is there, with `settings` (None: those of `config`). `from_step`: the
    checkpoint to resume from; None: the newest, also where the ledger lost it (rule R1). `abandon`: what followed `from_step` is given up, not trained again.
    `place`: rank 0 of several; `start_others` starts those that it starts itself.

    Order of stopping: training ends at a step's edge, the final version is published, the final checkpoint registered, engines ack to a deadline, the run
    drains; then heartbeats, upkeep, publisher, wake-ups and the spill of the audit stream close.
    Raises: `RunExists`; `Fenced` when another trainer attached: this one changes nothing more.
    """
    storage = open_storage(settings or config.buffer, config.run.name)
    about = None if new_as is None else RecordingAbout(run=config.run.name, identity=new_as, settings=config.buffer)
    await asyncio.to_thread(claim_storage, storage, about)
    wish = hearing(signal.SIGUSR1, Sentinel(config.checkpoint_folder).ask)
    async with Worker(on_cpu=config.trainer.device == "cpu") as worker, _ranks(config, place, worker, start_others) as ranks:
        back = None if from_step is None else _Back(step=from_step, abandon=abandon)
        backend = await _backend(config, ranks, worker)
        if ranks is not None:
            check_enough(settings or config.buffer, ranks.shares, made=new_as is None)
        start = await _start_from(config, ledger, backend, worker, new_as=new_as, back=back)
        for folder in (config.run.folder, config.checkpoint_folder):  # a person may ask for a checkpoint there before there is one
            await asyncio.to_thread(make_folder, folder)
        async with AuditSpill(client, keys, config.run.folder / "audit.jsonl"), wakeups(client, keys) as waker:
            trainer_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
            failpoint(Failpoint.TRAINER_BEFORE_ATTACH)
            attachment = await ledger.attach(start.checkpoint, trainer_id=trainer_id, abandon=start.abandon, above=start.above)
            failpoint(Failpoint.TRAINER_ATTACHED)
            _LOG.info("attached as incarnation %d after step %d", attachment.incarnation, attachment.resume_step)
            kept = () if start.checkpoint is None else (await ledger.status()).checkpoints
            await asyncio.to_thread(sweep, config.checkpoint_folder, kept, incarnation=attachment.incarnation)
            store = open_store(config.weights, config.run, config.model.path, lora=config.lora)
            async with Publisher(Channel(client, keys), store, config=config.weights) as publisher:
                here = _Here(
                    ledger=ledger,
                    waker=waker,
                    worker=worker,
                    publisher=publisher,
                    attachment=attachment,
                    kept=kept,
                    trainer_id=trainer_id,
                    storage=storage,
                )
                turns = Turns(client, keys, waker) if config.placement.layout == "colocated" else None
                buffer = TrainerBuffer(ledger, waker, attachment.incarnation, storage)
                crew = Alone(buffer) if ranks is None else await ranks.begin(attachment.incarnation, buffer)
                with wish, _training(config, start, here, buffer, crew) as (loop, mender):
                    async with (
                        _device(turns, loop, mender, start.backend, here),
                        upkeep(ledger, storage, attachment.incarnation) as spiller,
                        _heartbeats(Presence(client, keys, "trainer", TrainerStatus), loop, here, spiller, stall_s=config.run.stall_seconds),
                    ):
                        await _train_and_end(loop, mender, Registry(client, keys), waker, stop, weights=config.weights)


@contextlib.asynccontextmanager
async def _ranks(config: TrainerDaemonConfig, place: Place | None, worker: Worker, start_others: StartOthers | None) -> AsyncIterator[Leading | None]:
    """The other ranks, if there are to be some."""
    if place is None:
        yield None
        return
    leader = await worker.call(importlib.import_module, "consumer.ranks.leader")  # torch
    async with leader.leading(config, place, worker, start_others or functools.partial(Children, ())) as found:
        yield found


async def _backend(config: TrainerDaemonConfig, ranks: Leading | None, worker: Worker) -> Backend:
    if ranks is not None:
        return ranks.backend
    return await worker.call(make_backend, config)  # torch: seconds, during which signals are still heard


async def _start_from(
    config: TrainerDaemonConfig, ledger: Ledger, backend: Backend, worker: Worker, *, new_as: RunIdentity | None, back: _Back | None
) -> _Start:
    if new_as is not None:
        if not await ledger.create(new_as, config.buffer):
            raise RunExists(f"run {config.run.name!r} was made by somebody else just now: use --resume to go on with it, or another run.name")
        failpoint(Failpoint.TRAINER_CREATED)
        return _Start(backend=backend, progress=Progress(), journal=JournalTail(), checkpoint=None)
    folder, witness = config.checkpoint_folder, config.run.folder / "witness.jsonl"
    status = await _mended(ledger, folder, witness)
    known = status.checkpoints
    if back is not None and back.abandon:  # any that is still on disk will do
        known = (*known, *await asyncio.to_thread(checkpoints_on_line, folder, status.lineage))
    reference = _chosen(known, back)
    given_up = None if back is None or not back.abandon else await asyncio.to_thread(freed_groups, witness, status, back.step)
    store = open_store(config.weights, config.run, config.model.path, lora=config.lora)
    above = await asyncio.to_thread(newest_incarnation, folder, witness, store)
    if reference is None:
        return _Start(backend=backend, progress=Progress(), journal=JournalTail(), checkpoint=None, abandon=given_up, above=above)
    share = (0, getattr(backend, "readers", 1))  # other ranks verify what is left
    try:
        found = await asyncio.to_thread(read_checkpoint, reference, folder=folder, share=share)
        await worker.call(backend.restore, found.state)
    except OtherModel:
        raise
    except RollstreamError as problem:
        if problem.exit_code != EXIT_CONFIG:
            raise
        raise CheckpointDamaged(f"{problem}; {_instead(status.checkpoints, reference)}") from problem
    return _Start(
        backend=backend,
        progress=found.progress,
        journal=JournalTail.load(found.journal),
        checkpoint=reference,
        incarnations=found.incarnations,
        abandon=given_up,
        above=above,
    )


async def _mended(ledger: Ledger, folder: Path, witness: Path) -> LedgerStatus:
    """The ledger's state, once it knows of every checkpoint that is on disk (rule R1): the checkpoint is the truth."""
    on_disk = await asyncio.to_thread(checkpoints_on_disk, folder)  # first: what another trainer saves after our look at the ledger proves nothing
    status = await ledger.status()
    newer = beyond(status, on_disk, await asyncio.to_thread(swept, status, on_disk))
    if newer is None:
        return status
    found = await asyncio.to_thread(read_checkpoint, newer, folder=folder)
    _LOG.warning(
        "the ledger is at step %d of incarnation %d with checkpoints %s, and %s is of step %d of incarnation %d: "
        "Redis lost writes it had acknowledged; re-asserting them",
        *(status.trained, status.incarnation, ", ".join(str(one.step) for one in status.checkpoints) or "none", newer.path, newer.step, newer.incarnation),
    )
    history = await asyncio.to_thread(history_on_disk, newer, found, folder, witness)
    failpoint(Failpoint.TRAINER_BEFORE_REASSERT)
    incarnation = max(newer.incarnation, status.incarnation)  # of whoever died over the same, and trained on from this checkpoint
    since = {number: (*fork, "") for number, fork in status.lineage.forks.items() if number > newer.incarnation}
    history = dataclasses.replace(history, incarnations=since | dict(history.incarnations))
    try:
        await ledger.reassert(incarnation, history.incarnations[incarnation][2], history)
    except Fenced:
        _LOG.warning("another trainer has attached since incarnation %d: going on from what it registered, %s is given up", incarnation, newer.path)
    failpoint(Failpoint.TRAINER_REASSERTED)
    return await ledger.status()


def _chosen(known: Collection[CheckpointRef], back: _Back | None) -> CheckpointRef | None:
    """The newest, or the one asked for; None: the starting weights. Raises: `ConfigError` if that is not there."""
    if back is None:
        return max(known, key=lambda one: one.step, default=None)
    if back.step == 0 and back.abandon:
        return None
    for one in known:
        if one.step == back.step:
            return one
    steps = ", ".join(map(str, sorted({one.step for one in known}))) or "none"
    where = "registered or on disk" if back.abandon else "registered"
    raise ConfigError(f"--from-step {back.step}: no checkpoint of that step is {where}; {where} are {steps}")


def _instead(registered: Collection[CheckpointRef], damaged: CheckpointRef) -> str:
    """What a person may do about a damaged checkpoint."""
    others = sorted((one.step for one in registered if one.step != damaged.step), reverse=True)
    if not others:
        return "no other is registered: restore its folder, or start another run"
    steps = ", ".join(str(step) for step in others)
    return f"restore its folder, or go back to another that is registered (step {steps}) with `rl-trainer --resume --from-step {others[0]}`"


@contextlib.contextmanager
def _training(config: TrainerDaemonConfig, start: _Start, here: _Here, buffer: TrainerBuffer, crew: Crew) -> Iterator[tuple[TrainingLoop, Mender]]:
    """The loop over its parts, its files open."""
    witness = config.run.folder / "witness.jsonl"
    mender = Mender(here.ledger, here.attachment, journal=start.journal, witness=witness, kept=here.kept, known=start.incarnations)
    with open_metrics(config.run.folder, config.trackers, run=config.run.name, settings=config.told()) as metrics:
        keeper = Keeper(
            mender,
            here.attachment.incarnation,
            config=config.checkpoint,
            trainer=config.trainer,
            folder=config.checkpoint_folder,
            model_path=config.model_folder,
            journal=start.journal,
            last=start.checkpoint,
            incarnations=lambda: mender.incarnations,
        )
        parts = Parts(
            ledger=here.ledger,
            buffer=buffer,
            backend=start.backend,
            crew=crew,
            worker=here.worker,
            publisher=here.publisher,
            keeper=keeper,
            mender=mender,
            witness=Witness(witness),
            metrics=metrics,
        )
        loop = TrainingLoop(
            here.attachment,
            start.progress,
            trainer=config.trainer,
            publish_every=config.weights.publish_every,
            stop=config.stop,
            parts=parts,
            trainer_id=here.trainer_id,
            normaliser=config.loss.normaliser,
            max_new_tokens=config.rollout.max_new_tokens,
        )
        yield loop, mender


@contextlib.asynccontextmanager
async def _device(turns: Turns | None, loop: TrainingLoop, mender: Mender, backend: Backend, here: _Here) -> AsyncIterator[None]:
    """The loop's device: its own, or with `turns` that of engines too."""
    if turns is None:
        yield
        return
    incarnation = here.attachment.incarnation
    async with shared_device(turns, mender, backend, here.worker, incarnation=incarnation, trainer_id=here.trainer_id) as device:
        loop.device = device
        yield


async def _train_and_end(loop: TrainingLoop, mender: Mender, registry: Registry, waker: Wakeups, stop: asyncio.Event, *, weights: WeightsConfig) -> None:
    """Steps within `consumer.config.stop_seconds` once `stop` is set."""
    await loop.publish_now(PUBLISH_S)
    reason = await loop.run(stop)
    version = await loop.publish_now(PUBLISH_S)
    await loop.checkpoint_now()
    with loop.waiting_for(Edge.NO_ACK):
        behind = await registry.wait_acks(version, waker, apply_s=weights.apply_deadline_s, most_paused=weights.max_paused)
    if behind:
        _LOG.warning("the run ends without these engines at %s: %s", version, ", ".join(behind))
    failpoint(Failpoint.TRAINER_BEFORE_DRAIN)
    await mender.drain(version.incarnation, reason)
    failpoint(Failpoint.TRAINER_DRAINED)
    _LOG.info("run ended after step %d: %s", version.n, reason)


@contextlib.asynccontextmanager
async def _heartbeats(presence: Presence[TrainerStatus], loop: TrainingLoop, here: _Here, spiller: Spiller | None, *, stall_s: float) -> AsyncIterator[None]:
    """Announce the trainer every second while the context is open, and take it back at its end. A heartbeat that fails and a publisher that is gone end it:
    without versions a trainer waits for groups that nobody may generate.
    """
    done = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_beat(presence, loop, here.worker, spiller, done, stall_s=stall_s), name="trainer:heartbeat")
        published = group.create_task(here.publisher.failed(), name="trainer:publisher")
        try:
            yield
        finally:
            done.set()
            published.cancel()
    await presence.leave(loop.status.trainer_id)


async def _beat(presence: Presence[TrainerStatus], loop: TrainingLoop, worker: Worker, spiller: Spiller | None, done: asyncio.Event, *, stall_s: float) -> None:
    stalls = EdgeLog(_LOG, "training", stall_s)
    while not done.is_set():
        status = loop.live_status(busy_s=worker.busy_s)
        if spiller is not None:
            status = dataclasses.replace(status, spill_failing_since=spiller.status.failing_since, spill_problem=spiller.status.problem)
        stalls.see(status.waiting_for, status.waiting_since, time.time())
        await presence.beat(status.trainer_id, status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BEAT_S):
                await done.wait()
