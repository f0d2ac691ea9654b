"""Publishing in the background: training never waits for a version to be written.

    snapshot ──► bytes on the host ──► weights.dtype ──► whole, or what changed since the version before ──► store ──► pointer
     (waits)    └──────────────────────────────── being written: never cancelled ────────────────────────────────────────────┘

At most one version is being written and one waits; a newer one takes the place of the one that waits (rule W2), and may take its memory before it is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from protocol.errors import LedgerRegressed, StepOrder, Unavailable, WeightError
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest
from weightsync.cast import cast
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.finish import finish
from weightsync.kinds import Kinds, Layout, layout_of
from weightsync.snapshot import HeldWeights, Snapshot, TensorBytes
from weightsync.store import VersionStore

_LOG = logging.getLogger(__name__)
_RETRY_S = (0.5, 1.0, 2.0, 5.0)
_LAST_WRITE_S = 60.0
_POINTER_S = 2.0
"""While there is nothing to write: how often the pointer is looked at."""
_FILES_S = 30.0
"""And how often the files of the newest version: behind a URL every look is a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What waits to be published."""

    snapshot: Snapshot
    incarnation: int
    acknowledged: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plain:
    """A snapshot as the bytes that are published."""

    snapshot: Snapshot
    held: Snapshot
    """Owns the memory of `snapshot`, and gives it back."""
    layout: Layout

    @property
    def tensors(self) -> Mapping[str, TensorBytes]:
        return self.snapshot.tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Written:
    manifest: Manifest
    tried_delta: bool


class Publisher:
    """`async with Publisher(channel, store, config=weights) as publisher: publisher.submit(snapshot, incarnation)`.

    consumes: snapshots / produces: durable versions and the pointer to them / waits for: the disk and Redis.
    With `weights.transport` delta it keeps the bytes of the version published last, and writes what changed where `Kinds` and the store find it worth it.
    A write that fails for lack of disk is tried again until a newer snapshot takes its place. Where Redis lost acknowledged writes, a version is offered again
    until the trainer has re-asserted them, and a pointer that fell back is moved forward again (rule R1). Any other error (`Fenced`, say, or a bug) is final:
    `failed` raises it at once, `submit` and `drain` from then on. A run whose publisher is gone soon waits for ever for a version, so somebody must await
    `failed`.
    """

    def __init__(self, channel: Channel, store: VersionStore, *, config: WeightsConfig) -> None:
        self._channel = channel
        self._store = store
        self._keep = config.keep
        self._dtype = config.dtype
        self._kinds = Kinds(config.full_every if config.transport == "delta" else 0)
        self._deltas = config.transport == "delta"
        self._base: _Plain | None = None
        """The bytes of `published`, which a delta is made against."""
        self._pending: _Job | None = None
        self._running = False
        self._closing = False
        self._swept = False
        self._files_at = 0.0
        """When the files of the newest version are looked at next."""
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self.published: Manifest | None = None
        """The newest version this publisher made visible."""
        self.publish_s = 0.0
        """What that took from the moment it was begun; 0 before the first."""
        self.trouble = ""
        """Why the version being written is not out yet; empty while all is well."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="publisher:write")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        """Finish what is being written, also when cancelled; drop what waits (call `drain` first to keep it)."""
        self._closing = True
        self._drop_pending()
        self._work.set()
        task, self._task = self._task, None
        if task is None:
            return
        try:
            await finish(task, limit_s=_LAST_WRITE_S)
        finally:
            self._hold(None)

    def submit(self, snapshot: Snapshot, incarnation: int, *, acknowledged: bool = False) -> None:
        """Publish `snapshot` soon, after `trained` was acknowledged for its step. Never waits. Raises what ended the publisher before.

        `HeldWeights` are given back once they are published, or something newer takes their place.
        `acknowledged`: it was, for certain, so a ledger that says otherwise has lost it (rule R1); without it, that is a bug and final.
        """
        self._check()
        self._drop_pending()
        self._pending = _Job(snapshot=snapshot, incarnation=incarnation, acknowledged=acknowledged)
        self._work.set()

    @property
    def busy(self) -> bool:
        """Something is being written or waits."""
        return self._running or self._pending is not None

    async def drain(self, deadline_s: float) -> None:
        """Return once everything submitted is published or was replaced by something newer that is.

        Raises: `WeightError` at the deadline; what ended the publisher.
        """
        self._check()
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._error is not None or not self.busy)
        except TimeoutError as problem:
            why = f": {self.trouble}" if self.trouble else ""
            raise WeightError(f"a version was not published within {deadline_s:.0f} s{why}") from problem
        self._check()

    async def failed(self) -> NoReturn:
        """Raise what ends the publisher, when it does. Waits for ever while all is well."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None)
        self._check()
        raise AssertionError

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._task is None or self._task.done():
            raise WeightError("this publisher is not running: use it as `async with Publisher(...)`")

    async def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POINTER_S):
                    await self._work.wait()
            idle = not self._work.is_set()
            self._work.clear()
            try:
                if idle:
                    await self._look_after_files()
                    await self._look_after_pointer()
                if self._pending is not None and not self._swept:
                    await self._sweep(self._pending.incarnation)
                while self._pending is not None:
                    job, self._pending, self._running = self._pending, None, True
                    await self._publish(job)
                    await self._rest()
            except Exception as problem:  # noqa: BLE001 - kept, and raised by `failed`, `submit` and `drain`
                self._error = problem
                await self._rest()
                return

    async def _sweep(self, incarnation: int) -> None:
        """Leftovers of trainers before this one go before it writes anything."""
        known = await self._channel.versions()
        try:
            await asyncio.to_thread(self._store.sweep, incarnation, known)
        except OSError as problem:  # tried again before the next version: what is there now is listed, and stays
            _LOG.warning("leftovers in %s cannot be deleted: %s", self._store.location, problem)
        else:
            self._swept = True

    async def _rest(self) -> None:
        self._running = False
        async with self._changed:
            self._changed.notify_all()

    async def _publish(self, job: _Job) -> None:
        begun = time.monotonic()
        try:
            plain = await asyncio.to_thread(self._materialise, job.snapshot)
        except BaseException:
            job.snapshot.release()
            raise
        if plain is None:  # a newer one is on its way here, in the memory of this one
            return
        try:
            written = await self._until_out(plain, job, begun)
        except BaseException:
            plain.held.release()
            raise
        if written is None or not self._deltas:
            plain.held.release()
        if written is not None:
            self._kinds.published(job.snapshot.version, written.manifest.kind, plain.layout, tried=written.tried_delta)
            if self._deltas:
                self._hold(plain)
            await self._collect(job.incarnation)

    async def _until_out(self, plain: _Plain, job: _Job, begun: float) -> _Written | None:
        """What was published; None where a newer snapshot came, or the publisher is closing, before it could be."""
        attempt, written, started, took = 0, None, begun, 0.0
        while True:
            try:
                if written is None:
                    written = await asyncio.to_thread(self._write, plain)
                    took = time.monotonic() - started
                await self._channel.publish(written.manifest, job.incarnation, seconds=took)
                failpoint(Failpoint.VERSION_PUBLISHED)
            except OSError as problem:
                self.trouble = f"version {job.snapshot.version} cannot be written to {self._store.location}: {problem}"
                await self._collect(job.incarnation)  # what nobody needs any more may be all that is in the way
            except (LedgerRegressed, StepOrder) as problem:
                if isinstance(problem, StepOrder) and not job.acknowledged:
                    raise
                self.trouble = str(problem)
            else:
                self.published, self.trouble, self.publish_s = written.manifest, "", time.monotonic() - begun
                return written
            _LOG.warning("%s; trying again", self.trouble)
            with contextlib.suppress(TimeoutError):  # a newer snapshot, or closing, ends the wait
                async with asyncio.timeout(_RETRY_S[min(attempt, len(_RETRY_S) - 1)]):
                    await self._work.wait()
            attempt, started = attempt + 1, time.monotonic()
            if self._pending is not None or self._closing:
                return None

    def _materialise(self, snapshot: Snapshot) -> _Plain | None:
        """In a thread: on the host, in the type that is published; None if the snapshot's memory went to a newer one."""
        tensors: Mapping[str, TensorBytes] | None = snapshot.tensors
        if isinstance(tensors, HeldWeights):
            tensors = tensors.host(self._dtype)
        if tensors is None:
            return None
        wanted = cast(tensors, self._dtype)
        if wanted is not tensors:
            snapshot.release()
        plain = Snapshot(version=snapshot.version, tensors=wanted, digest=snapshot.digest if wanted is tensors else "")
        return _Plain(snapshot=plain, held=snapshot, layout=layout_of(wanted))

    def _write(self, plain: _Plain) -> _Written:
        """In a thread: the version in the store, whole or as what changed."""
        base, parent = self._base, self.published
        if self._deltas and base is not None and parent is not None:
            applies_to = self._kinds.parent(plain.snapshot.version, self._store.versions(), plain.layout)
            if applies_to == parent.version:
                return _Written(manifest=self._store.write_delta(plain.snapshot, parent, base.tensors), tried_delta=True)
        return _Written(manifest=self._store.write(plain.snapshot), tried_delta=False)

    def _drop_pending(self) -> None:
        dropped, self._pending = self._pending, None
        if dropped is not None:
            dropped.snapshot.release()

    def _hold(self, plain: _Plain | None) -> None:
        before, self._base = self._base, plain
        if before is not None:
            before.held.release()

    async def _look_after_files(self) -> None:
        """Files that somebody removed cannot be made again here; it is told, and the next version mends it."""
        published, now = self.published, time.monotonic()
        if published is None or now < self._files_at:
            return
        self._files_at = now + _FILES_S
        try:
            there = await asyncio.to_thread(self._store.versions)
        except OSError as problem:
            _LOG.warning("%s cannot be looked at: %s", self._store.location, problem)
            return
        if published.version not in there:
            self.trouble = f"version {published.version} is gone from {self._store.location}, and not by us: engines that start now wait for the next version"
            _LOG.warning("%s", self.trouble)

    async def _look_after_pointer(self) -> None:
        """Redis may lose an acknowledged publish, and nobody else would notice: an engine never goes back, and on-policy producers wait for ever."""
        published = self.published
        try:
            if published is None or ((newest := await self._channel.newest_version()) is not None and newest >= published.version):
                return
            await self._channel.publish(published, published.version.incarnation)
        except (Unavailable, LedgerRegressed, StepOrder, WeightError) as problem:  # the next look, or the next version, finds it better
            _LOG.warning("version %s is not the newest in Redis any more: %s", published and published.version, problem)

    async def _collect(self, incarnation: int) -> None:
        try:
            await self._channel.collect(self._store, keep=self._keep)
            await asyncio.to_thread(self._store.drop_unlisted, incarnation, await self._channel.versions())
        except OSError as problem:  # they stay marked: the next collection deletes them
            _LOG.warning("old versions in %s cannot be deleted: %s", self._store.location, problem)
