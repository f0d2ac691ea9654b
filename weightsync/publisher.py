"""Publishing in the background: training never waits for a version to be written.

At most one version is being written and one waits; a newer one takes the place of the one that waits (rule W2). What is being written is never cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from types import TracebackType
from typing import NoReturn, Self

from protocol.errors import LedgerRegressed, StepOrder, Unavailable, WeightError
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest
from weightsync.channel import Channel
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

_LOG = logging.getLogger(__name__)
_RETRY_S = (0.5, 1.0, 2.0, 5.0)
_LAST_WRITE_S = 60.0
_POINTER_S = 2.0
"""While there is nothing to write: how often the pointer is looked at."""


class Publisher:
    """`async with Publisher(channel, store) as publisher: publisher.submit(snapshot, incarnation)`.

    consumes: snapshots / produces: durable versions and the pointer to them / waits for: the disk and Redis.
    A write that fails for lack of disk is tried again until a newer snapshot takes its place. Where Redis lost acknowledged writes, a version is offered again
    until the trainer has re-asserted them, and a pointer that fell back is moved forward again (rule R1). Any other error (`Fenced`, say, or a bug) is final:
    `failed` raises it at once, `submit` and `drain` from then on. A run whose publisher is gone soon waits for ever for a version, so somebody must await
    `failed`.
    """

    def __init__(self, channel: Channel, store: DirectoryStore, *, keep: int = 2) -> None:
        self._channel = channel
        self._store = store
        self._keep = keep
        self._pending: tuple[Snapshot, int, bool] | None = None
        self._running = False
        self._closing = False
        self._changed = asyncio.Condition()
        self._work = asyncio.Event()
        self._error: Exception | None = None
        self._task: asyncio.Task[None] | None = None
        self.published: Manifest | None = None
        """The newest version this publisher made visible."""
        self.trouble = ""
        """Why the version being written is not out yet; empty while all is well."""

    async def __aenter__(self) -> Self:
        known = await self._channel.versions()
        if self._store.folder.is_dir():
            await asyncio.to_thread(self._store.sweep, known)
        self._task = asyncio.create_task(self._run(), name="publisher:write")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        """Finish what is being written, drop what waits (call `drain` first to keep it)."""
        self._closing, self._pending = True, None
        self._work.set()
        task, self._task = self._task, None
        if task is None:
            return
        try:
            async with asyncio.timeout(_LAST_WRITE_S):
                await asyncio.shield(task)
        except TimeoutError:
            _LOG.warning("a version was still being written after %.0f s: given up", _LAST_WRITE_S)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def submit(self, snapshot: Snapshot, incarnation: int, *, acknowledged: bool = False) -> None:
        """Publish `snapshot` soon, after `trained` was acknowledged for its step. Never waits. Raises what ended the publisher before.

        `acknowledged`: it was, for certain, so a ledger that says otherwise has lost it (rule R1); without it, that is a bug and final.
        """
        self._check()
        self._pending = (snapshot, incarnation, acknowledged)
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
                    await self._look_after_pointer()
                while self._pending is not None:
                    (snapshot, incarnation, acknowledged), self._pending, self._running = self._pending, None, True
                    await self._publish(snapshot, incarnation, acknowledged=acknowledged)
                    await self._rest()
            except Exception as problem:  # noqa: BLE001 - kept, and raised by `failed`, `submit` and `drain`
                self._error = problem
                await self._rest()
                return

    async def _rest(self) -> None:
        self._running = False
        async with self._changed:
            self._changed.notify_all()

    async def _publish(self, snapshot: Snapshot, incarnation: int, *, acknowledged: bool) -> None:
        attempt = 0
        while True:
            started = time.monotonic()
            try:
                manifest = await asyncio.to_thread(self._store.write, snapshot)
                await self._channel.publish(manifest, incarnation, seconds=time.monotonic() - started)
                failpoint(Failpoint.VERSION_PUBLISHED)
                self.published, self.trouble = manifest, ""
            except OSError as problem:
                self.trouble = f"version {snapshot.version} cannot be written to {self._store.folder}: {problem}"
            except (LedgerRegressed, StepOrder) as problem:
                if isinstance(problem, StepOrder) and not acknowledged:
                    raise
                self.trouble = str(problem)
            else:
                await self._collect(incarnation)
                return
            _LOG.warning("%s; trying again", self.trouble)
            with contextlib.suppress(TimeoutError):  # a newer snapshot, or closing, ends the wait
                async with asyncio.timeout(_RETRY_S[min(attempt, len(_RETRY_S) - 1)]):
                    await self._work.wait()
            attempt += 1
            if self._pending is not None or self._closing:
                return

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
            _LOG.warning("old versions in %s cannot be deleted: %s", self._store.folder, problem)
