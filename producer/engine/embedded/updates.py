"""New weights for one engine, one update at a time: from a folder, or in buckets through a process group within a session.

Staging happens in threads; applying is the worker's, between two decode steps. As in SGLang, a call of a session lets the running requests finish first, unless
generation is paused. Every method answers what went wrong, or nothing: a refusal is an answer here, and leaves the weights that were served in service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from producer.engine.embedded import weights
from producer.engine.embedded.groups import GroupFailed, Groups
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.session import Parcel, Session, announced
from producer.engine.embedded.worker import Worker
from protocol.errors import ManifestError

_NO_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


class Updates:
    """Owns the session, the groups, and what the engine says it serves.

    Invariant: `path` and `version` move only when an update succeeds as a whole. An update that was handed to the worker is followed to its end, also when the
    caller goes away.
    """

    def __init__(self, worker: Worker, model: SlotModel, *, version: str, group_timeout_s: float, apply_delay_factor: float = 1.0) -> None:
        self._worker, self._model, self._slowness = worker, model, apply_delay_factor - 1.0
        self.path, self.version = model.path, version
        self.groups = Groups(group_timeout_s)
        self._session: Session | None = None
        self._applying = asyncio.Lock()
        self._followed: set[asyncio.Task[str | None]] = set()

    async def from_disk(self, path: str, version: str | None, *, flush: bool, abort_all: bool) -> str | None:
        """Serve the weights in the folder `path`. A session that is open takes nothing more: its buckets belong to other weights."""
        return await self._follow(self._from_disk(path, version, flush=flush, abort_all=abort_all))

    async def _from_disk(self, path: str, version: str | None, *, flush: bool, abort_all: bool) -> str | None:
        async with self._applying:
            started = time.perf_counter()
            try:
                staged = await asyncio.to_thread(weights.stage, path, self._model.model)
            except ManifestError as problem:
                return f"Failed to update weights: {problem}. The old weights stay in service."
            await self._dawdle(started)
            if self._session is not None:
                self._session.spoil(f"weights were loaded from {path} meanwhile")
            problem_text = await self._worker.update(staged, version, flush=flush, abort_all=abort_all)
            if problem_text is None:
                self.path = path
                self.version = version if version is not None else self.version
            return problem_text

    async def begin(self) -> str | None:
        await self._worker.quiet()
        if self._session is not None:
            return "a weight-update session is already open; call end_weight_update() first"
        self._session = Session()
        return None

    async def end(self) -> str | None:
        """Closes the session in any case. What is staged and whole is applied, under the version that is served; what is not whole is dropped: its client
        died, or lost a bucket.
        """
        await self._worker.quiet()
        session, self._session = self._session, None
        if session is None:
            return "no weight-update session is open; call begin_weight_update() first"
        if session.broken:
            return f"the session is closed, and what it had is dropped: {session.broken}"
        if session.empty:
            return None
        missing, total = session.missing(self._model.model)
        if missing:
            return (
                f"the session ended with {total - missing} of {total} tensors and no weight_version: they were dropped, and the old weights stay in service. "
                "Name the version on the last bucket of a partial update"
            )
        return await self._follow(self._apply(session, None, flush=False, abort_all=False))

    async def from_group(
        self,
        group: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        flat: bool,
        version: str | None,
        flush: bool,
        abort_all: bool,
    ) -> str | None:
        """Receive one bucket and stage it; with a `version`, serve all that is staged under it. A refusal frees the group: its sender, who waits in the
        broadcast already or is one step ahead from now on, sees a closed connection instead of silence.
        """
        session = self._session
        problem = _NO_SESSION if session is None else session.broken and f"the session takes nothing more: {session.broken}; end it"
        if session is None or problem:
            self.groups.drop(group)
            return problem
        if abort_all:
            await self._worker.abort(None)
        try:
            await self._worker.quiet()
            await self._stage(session, group, announced(self._model.model, names, dtypes, shapes, flat=flat))
        except (ManifestError, GroupFailed) as failure:
            self.groups.drop(group)
            session.spoil(str(failure))
            return f"Failed to receive weights: {failure}. The old weights stay in service."
        except asyncio.CancelledError:
            self.groups.drop(group)
            session.spoil("its client went away while a bucket was received")
            raise
        if session is not self._session or session.broken:
            return f"the session ended while the bucket came{session.broken and ': ' + session.broken}; it was dropped"
        if version is not None:
            return await self._follow(self._apply(session, version, flush=flush, abort_all=abort_all))
        return await self._worker.flush_after_update() if flush else None

    async def _stage(self, session: Session, group: str, parcel: Parcel) -> None:
        started = time.perf_counter()
        landing = parcel.landing()
        await self.groups.receive(group, landing.windows())
        tensors = parcel.tensors(landing)
        await asyncio.to_thread(session.stage, self._model.model, tensors)
        await self._dawdle(started)

    async def _apply(self, session: Session, version: str | None, *, flush: bool, abort_all: bool) -> str | None:
        async with self._applying:
            if session.broken:
                return f"the session takes nothing more: {session.broken}; end it"
            staged = weights.Staged(tensors=session.take())
            problem = await self._worker.update(staged, version, flush=flush, abort_all=abort_all)
            if problem is None and version is not None:
                self.version = version
            return problem

    async def rename(self, version: str, *, abort_all: bool) -> None:
        await self._worker.rename(version, abort_all=abort_all)
        self.version = version

    async def checksums(self) -> dict[str, str]:
        """Of every parameter, all of the same moment."""
        async with self._applying:
            return await asyncio.to_thread(weights.checksums, self._model.model)

    async def close(self) -> None:
        for task in self._followed:
            task.cancel()
        await asyncio.gather(*self._followed, return_exceptions=True)
        self.groups.close()
        self._session = None

    async def _follow(self, update: Coroutine[Any, Any, str | None]) -> str | None:
        """Wait for `update`, which goes on when the caller stops waiting."""
        task = asyncio.create_task(update, name="engine:update")
        self._followed.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[str | None]) -> None:
        self._followed.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or is gone

    async def _dawdle(self, started: float) -> None:
        await asyncio.sleep(self._slowness * (time.perf_counter() - started))
