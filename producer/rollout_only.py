"""Rollouts without a trainer: this producer owns the run, publishes the starting weights, and takes the READY groups into a recording.

    engines ◄── version 1:0 ── Owner ── attach ──► ledger ◄── put ── producers (this one, and any that join)
                                 │                   │
                                 │   ready ──────────┤
                                 ▼                   │
                   recording (durable) ── set_aside ─┘        capacity comes back; a kill between the two records a group twice, which readers drop

What was recorded drives `rl-trainer --recorded`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from buffer.audit import AuditSpill, read_audit
from buffer.contract import Ledger
from buffer.payloads import by_bytes, check_payload
from buffer.recording import RecordedGroup, Recording, RecordingAbout
from buffer.redis_ledger import RedisLedger
from buffer.replay import self_contained
from buffer.storage import Storage, claim_storage, open_storage, read_payloads
from buffer.upkeep import upkeep
from producer.config import RolloutOnlyConfig
from producer.outage import through_outage
from producer.stopping import unless
from protocol.connection import Client
from protocol.durable import make_folder
from protocol.errors import ConfigError, DecodeError, PayloadLost, ReplayGap, RunExists, RunMissing
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import GroupHeader, Reason, Seq, SlotToken, TrainerStatus
from protocol.objects import object_store
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups
from weightsync.channel import Channel
from weightsync.publisher import Publisher
from weightsync.safetensors_file import open_model
from weightsync.snapshot import Snapshot
from weightsync.store import open_store

_LOG = logging.getLogger(__name__)
TRAINER_ID = "rollout-only"
"""Attaches under this name: a run that anybody else has attached to is somebody's training, and is left alone."""
_BEAT_S = 1.0
_PUBLISH_S = 600.0
_BATCH_GROUPS = 64
_BATCH_BYTES = 8 << 20
"""Groups of about so many bytes become one object of the recording."""
_RETRY_S = 2.0


class Owner:
    """The owner of a run that nobody trains."""

    def __init__(self, config: RolloutOnlyConfig, *, identity: RunIdentity, client: Client, keys: Keys, waker: Wakeups) -> None:
        self._config, self._identity, self._client, self._keys, self._waker = config, identity, client, keys, waker
        self._ledger = RedisLedger(client, keys)
        self._presence = Presence(client, keys, "trainer", TrainerStatus)

    async def run(self, stop: asyncio.Event, produce: Callable[[asyncio.Event], Awaitable[None]], *, where: str, groups: int | None) -> None:
        """Make the run or take it up again, then record what `produce` and others put, until there are `groups`, or `stop`.

        Order of stopping: the producer drains, what is READY is recorded, then heartbeats and upkeep end, the run drains, and the audit stream is spilled.
        Raises: `RunExists` for a run that has, or had, a trainer; `Fenced` when another owner has attached.
        """
        recording = Recording(object_store(where, key="--rollout-only"))
        await asyncio.to_thread(_check_model, self._config.model_folder)
        begun = await asyncio.to_thread(_check_recording, recording, self._keys.run, self._identity)
        await self._refuse_trained()
        await asyncio.to_thread(make_folder, self._config.run.folder)
        await self._ledger.create(self._identity, self._config.buffer)
        settings = await self._ledger.join(self._identity)
        storage = open_storage(settings, self._keys.run)
        about = RecordingAbout(run=self._keys.run, identity=self._identity, settings=settings)
        await asyncio.to_thread(claim_storage, storage, None if begun else about)
        if not begun:
            await asyncio.to_thread(recording.describe, about)
        async with AuditSpill(self._client, self._keys, self._config.run.folder / "audit.jsonl"):
            incarnation = (await self._ledger.attach(None, trainer_id=TRAINER_ID)).incarnation
            await self._publish(incarnation)
            recorder = await self._recorder(recording, incarnation, storage, groups)
            produced = asyncio.Event()
            async with upkeep(self._ledger, storage, incarnation), asyncio.TaskGroup() as group:
                beating = group.create_task(self._beat(incarnation), name="rollout-only:heartbeat")
                recorded = group.create_task(recorder.run(produced), name="rollout-only:record")
                await produce(stop)
                produced.set()
                await recorded
                beating.cancel()
            await self._drain(incarnation, recorder)
            await self._presence.leave(TRAINER_ID)

    async def _refuse_trained(self) -> None:
        """Raises: `RunExists`."""
        run = self._keys.run
        if others := [one.trainer_id for one in await self._presence.members() if one.trainer_id != TRAINER_ID]:
            raise RunExists(f"run {run!r} has a trainer ({others[0]}): --rollout-only makes a run of its own; use another run.name")
        try:
            await self._ledger.join(self._identity)
        except RunMissing:
            return
        events = await read_audit(self._config.run.folder / "audit.jsonl", self._client, self._keys)
        if any(event.op == "attached" and event.fields["trainer_id"] != TRAINER_ID for event in events) or (await self._ledger.status()).trained:
            raise RunExists(f"run {run!r} was made to be trained: --rollout-only would take its groups away; use another run.name")

    async def _publish(self, incarnation: int) -> None:
        """The starting weights, as the files of model.path have them, become version `incarnation:0`."""
        model = self._config.model_folder
        store = await asyncio.to_thread(open_store, self._config.weights, self._config.run, model)
        with open_model(model) as tensors:
            async with Publisher(Channel(self._client, self._keys), store, config=self._config.weights) as publisher:
                publisher.submit(Snapshot(version=Version(incarnation, 0), tensors=tensors), incarnation)
                await publisher.drain(_PUBLISH_S)

    async def _recorder(self, recording: Recording, incarnation: int, storage: Storage, groups: int | None) -> Recorder:
        already = (await self._ledger.status()).dead.get(Reason.RECORDED, 0)
        return Recorder(
            self._ledger,
            self._waker,
            recording,
            storage,
            incarnation=incarnation,
            already=already,
            groups=groups,
            deadline_s=self._config.redis.deadline_s,
        )

    async def _beat(self, incarnation: int) -> None:
        """Say that the run has somebody who takes its groups, for ever. Waits for: time."""
        started_s, host, pid = time.monotonic(), socket.gethostname(), os.getpid()
        while True:
            uptime_s = time.monotonic() - started_s
            status = TrainerStatus(trainer_id=TRAINER_ID, incarnation=incarnation, moved_at=time.time(), uptime_s=uptime_s, host=host, pid=pid)
            await through_outage(lambda: self._presence.beat(TRAINER_ID, status), deadline_s=self._config.redis.deadline_s)  # noqa: B023 - awaited at once
            await asyncio.sleep(_BEAT_S)

    async def _drain(self, incarnation: int, recorder: Recorder) -> None:
        await through_outage(lambda: self._ledger.drain(incarnation, f"{recorder.recorded} groups recorded"), deadline_s=self._config.redis.deadline_s)
        _LOG.info("%d groups are recorded in %s", recorder.recorded, recorder.url)


class Recorder:
    """READY groups into a recording, then out of the ledger.

    Consumes: READY groups. Produces: recorded groups, free slots. Waits for: wake-up `ready`. Unblocked by: producers.
    Invariant: a group leaves the ledger only after it is durable in the recording, or because it is lost: then it is made again. It is recorded twice only
    where a kill fell between the two.
    """

    def __init__(
        self,
        ledger: Ledger,
        waker: Wakeups,
        recording: Recording,
        storage: Storage,
        *,
        incarnation: int,
        already: int,
        groups: int | None,
        deadline_s: float,
    ) -> None:
        self._ledger, self._waker, self._recording, self._blobs = ledger, waker, recording, storage.blobs
        self._incarnation, self._groups, self._deadline_s = incarnation, groups, deadline_s
        self.recorded = already
        """Groups that have left the ledger into a recording since the run was made."""

    @property
    def url(self) -> str:
        return self._recording.url

    async def run(self, produced: asyncio.Event) -> None:
        """Until there are enough groups, and then the run drains; or until nothing is READY after `produced`. A recording that cannot be written is tried
        again meanwhile: groups then stay READY, and producers wait for slots.
        """
        while True:
            mark, last = self._waker.mark(Topic.READY, Topic.RUN), produced.is_set()
            written = await self._take_all()
            if self._left() == 0:
                await through_outage(lambda: self._ledger.drain(self._incarnation, f"{self.recorded} groups recorded"), deadline_s=self._deadline_s)
                return
            if last:
                return
            if written:
                await unless(produced, self._waker.wait(Topic.READY, Topic.RUN, since=mark), name="rollout-only:wait")
            else:
                await unless(produced, asyncio.sleep(_RETRY_S), name="rollout-only:retry")

    def _left(self) -> int | None:
        """Groups still wanted; None: without end."""
        return None if self._groups is None else max(0, self._groups - self.recorded)

    async def _take_all(self) -> bool:
        """Everything READY, as far as it is wanted. False: the recording cannot be written now."""
        while (left := self._left()) != 0:
            count = _BATCH_GROUPS if left is None else min(left, _BATCH_GROUPS)
            headers = await through_outage(lambda: self._ledger.ready(count), deadline_s=self._deadline_s)  # noqa: B023 - awaited at once
            if not headers:
                break
            for batch in by_bytes(headers, _BATCH_BYTES):
                try:
                    await self._take(batch)
                except OSError as problem:
                    _LOG.warning("nothing can be recorded now, producers will wait: %s", problem)
                    return False
        return True

    async def _take(self, batch: list[GroupHeader]) -> None:
        payloads = await through_outage(lambda: read_payloads(self._ledger, Storage(), 0, batch), deadline_s=self._deadline_s)  # READY: of no step, in Redis
        written = await asyncio.to_thread(self._write, batch, payloads)
        named = [(header.seq, header.token) for header in written]
        self.recorded += await through_outage(lambda: self._ledger.set_aside(self._incarnation, named), deadline_s=self._deadline_s)
        if self._blobs is not None:
            await asyncio.to_thread(self._delete_blobs, written)
        if lost := [(header.seq, header.token) for header in batch if (header.seq, header.token) not in named]:
            await through_outage(lambda: self._ledger.set_aside(self._incarnation, lost, lost=True), deadline_s=self._deadline_s)

    def _write(self, batch: list[GroupHeader], payloads: Mapping[tuple[Seq, SlotToken], bytes]) -> list[GroupHeader]:
        """Those that are whole."""
        found: list[GroupHeader] = []
        groups: list[RecordedGroup] = []
        for header in batch:
            try:
                payload = check_payload(header, payloads.get((header.seq, header.token)))
                groups.append(self_contained(RecordedGroup(header=header, payload=payload), self._blobs))
            except (DecodeError, PayloadLost) as problem:
                _LOG.warning("group %d is not recorded and will be made again: %s", header.seq, problem)
                continue
            found.append(header)
        self._recording.write_groups(groups)
        return found

    def _delete_blobs(self, batch: list[GroupHeader]) -> None:
        """Their extras are in the recording now."""
        assert self._blobs is not None
        for header in batch:
            if header.blobs:
                with contextlib.suppress(OSError):  # then they stay as garbage, which hurts nobody
                    self._blobs.delete(self._blobs.folder(header.seq, header.attempt, header.token))


def _check_model(folder: Path) -> None:
    """Whether there is something to publish. Raises: `ConfigError` naming model.path."""
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path {folder}: has no config.json or no *.safetensors file; --rollout-only publishes its weights to the engines")


def _check_recording(recording: Recording, run: str, identity: RunIdentity) -> bool:
    """Whether it is begun already. Raises: `ConfigError` for a recording of something else."""
    try:
        found = recording.about()
    except ReplayGap:
        return False
    if found.identity != identity or found.run != run:
        raise ConfigError(f"--rollout-only {recording.url} holds a recording of run {found.run!r}: choose another folder, or go on with that run")
    return True
