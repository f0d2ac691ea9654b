"""What gloo, NCCL and CUDA IPC have in common: a weight server stages the version, and its one transfer right is taken before the engine is paused.

    prepare: server ──► line ──► (group) ──► staged there ──► buckets equal ──► right ──► (handles)
    apply:   session ──► bytes ──► version ──► end of session ──► right given on

Whatever goes wrong: the line is closed, so the server forgets the engine and frees whatever of it waits, the engine's side is destroyed, `TransportFailed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import aiohttp

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable, ManifestError, RedisUnavailable, TransportFailed, VersionGone
from protocol.messages import EngineId, Manifest, WeightServerStatus
from protocol.presence import Presence
from weightsync.buckets import Bucket, plan
from weightsync.config import WeightsConfig
from weightsync.control import EngineControl
from weightsync.finish import finish, left
from weightsync.transports.server_line import ServerLine, choose

_BROKEN = (ApplyFailed, EngineUnavailable, DecodeError, TimeoutError)
_RESERVE_S = 2.0
"""Of every deadline, at most a fifth, kept back to leave both sides clean."""
_SLACK_S = 1.0
"""Beyond what each part of leaving is given."""
_CONNECT_S = 5.0
_RETAKE_S = 5.0
"""How long, at most a quarter of its deadline, a paused engine waits while another takes its bytes."""
_GIVE_S = 1.0
Ready = TypeVar("Ready")


class ServedTransport(Generic[Ready]):
    """One engine's way from a weight server. `Ready`: what `apply` needs of `prepare`."""

    def __init__(
        self,
        *,
        control: EngineControl,
        session: aiohttp.ClientSession,
        presence: Presence[WeightServerStatus],
        config: WeightsConfig,
        engine_id: EngineId,
        boot_nonce: str,
        ranks: int = 1,
        gpus: Collection[str] = (),
    ) -> None:
        """`presence`: of role `WEIGHT_SERVER`. `ranks`: tensor-parallel ranks of the engine. `gpus`: what its GPUs are called (`weightsync.gpus`); empty: not
        known.
        """
        self._control = control
        self._session = session
        self._presence = presence
        self._config = config
        self._who = f"{engine_id} {boot_nonce}"
        self._ranks, self._gpus = ranks, tuple(gpus)
        self._line: ServerLine | None = None
        self._ready: tuple[Manifest, Ready] | None = None

    @property
    def name(self) -> str:
        return self._config.transport

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The server has the version, the engine is connected to it, and the right to send is this engine's.

        Raises: `VersionGone` if the server is past it; `ManifestError` if its files are damaged; `TransportFailed`.
        """
        self._ready = None
        async with self._clean(deadline_s) as work_end:
            try:
                buckets = plan(manifest, self._config.bucket_mb << 20)
            except ManifestError as problem:
                raise TransportFailed(str(problem)) from problem  # the store can bring what no collective can
            line = await self._connected(manifest, work_end)
            staged = await line.ask("stage", deadline_s=left(work_end), version=str(manifest.version), digest=manifest.digest)
            _compare(manifest, buckets, staged.get("buckets"))
            await line.ask("take", deadline_s=left(work_end), version=str(manifest.version))
            self._ready = (manifest, await self._make_ready(line, manifest, buckets, work_end))

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The paused engine takes what was prepared. Raises: `VersionGone` before it was touched; `TransportFailed`: nobody knows what it holds."""
        ready, self._ready = self._ready, None
        line = self._line
        if ready is None or ready[0].version != manifest.version or line is None or not line.alive:
            raise VersionGone(f"{self.name}: what was prepared for {manifest.version} is lost with its weight server")
        end = time.monotonic() + deadline_s
        async with self._clean(deadline_s) as work_end:
            await self._take_now(line, manifest, min(_RETAKE_S, deadline_s / 4))
            in_session = await self._control.begin_session(deadline_s=left(work_end))
            await self._move(line, manifest, ready[1], work_end)
            if in_session:
                await self._control.end_session(deadline_s=left(work_end))
        await self._give(line, min(_GIVE_S, left(end)))
        await self._given(line, manifest)

    async def aclose(self) -> None:
        self._ready = None
        await self._drop_line()

    _same_host = False
    _reads_later = False
    """Whether the engine may still read the server's memory when it has answered."""

    async def _enter(self, line: ServerLine, end: float) -> None:
        """A new line: whatever must be there before the first version."""

    async def _make_ready(self, line: ServerLine, manifest: Manifest, buckets: Sequence[Bucket], end: float) -> Ready:
        raise NotImplementedError

    async def _move(self, line: ServerLine, manifest: Manifest, ready: Ready, end: float) -> None:
        raise NotImplementedError

    async def _leave(self, limit_s: float) -> None:
        """Free the engine of what it has of a line that is closed, within `limit_s`; never raises."""

    async def _given(self, line: ServerLine, manifest: Manifest) -> None:
        """The engine has answered, and others may go on."""

    async def _take_now(self, line: ServerLine, manifest: Manifest, wait_s: float) -> None:
        """The right again, which may have gone to another while the engine waited for its pause. Raises: `VersionGone`."""
        try:
            await line.ask("take", deadline_s=wait_s, version=str(manifest.version), use=True)
        except TransportFailed as problem:
            await self._drop_line()
            raise VersionGone(f"{self.name}: {manifest.version} cannot be sent now: {problem}") from problem

    async def _give(self, line: ServerLine, wait_s: float) -> None:
        """The engine has the version: others may go on. A server that breaks now costs this update nothing."""
        try:
            await line.ask("give", deadline_s=wait_s, reading=self._reads_later)
        except TransportFailed:
            await self._drop_line()
        except BaseException:  # a right that is in use and never given would stop all others for as long as the line is open
            await self._drop_line()
            raise

    async def _connected(self, manifest: Manifest, end: float) -> ServerLine:
        if self._line is not None and self._line.alive:
            return self._line
        await self._drop_line()
        try:
            servers = await self._presence.members()
        except RedisUnavailable as problem:
            raise TransportFailed(f"weight servers cannot be looked up: {problem}") from problem
        server = choose(servers, backend=self.name, version=manifest.version, same_host=self._same_host)
        self._line = line = await ServerLine.open(self._session, server, self._who, deadline_s=min(_CONNECT_S, left(end)))
        await self._enter(line, end)
        return line

    async def _drop_line(self, limit_s: float = _RESERVE_S) -> None:
        """Both sides are left, also while we are being cancelled: a line that only we know of would keep what its server has for the engine."""
        line, self._line = self._line, None
        if line is not None:
            await finish(self._part(line, limit_s), limit_s=limit_s + _SLACK_S)

    async def _part(self, line: ServerLine, limit_s: float) -> None:
        await line.aclose(limit_s=limit_s / 2)
        await self._leave(limit_s / 2)

    @contextlib.asynccontextmanager
    async def _clean(self, deadline_s: float) -> AsyncIterator[float]:
        """Work to a deadline that leaves time to clean up; any failure of the way or of the engine becomes `TransportFailed`, with both sides left."""
        reserve_s = min(_RESERVE_S, deadline_s / 5)
        work_s = deadline_s - reserve_s
        try:
            async with asyncio.timeout(work_s):
                yield time.monotonic() + work_s
        except ManifestError:
            self._ready = None  # the way is fine
            raise
        except _BROKEN as problem:
            self._ready = None
            await self._drop_line(reserve_s)
            text = str(problem) or f"not done within {work_s:.1f} s"
            raise TransportFailed(text if isinstance(problem, TransportFailed) else f"{self.name}: {text}") from problem
        except BaseException:
            self._ready = None
            await self._drop_line()
            raise


def _compare(manifest: Manifest, mine: Sequence[Bucket], theirs: object) -> None:
    """Both sides cut the version in the same way, or nothing is sent: a larger bucket than is expected aborts a gloo receiver's whole process."""
    digests = [bucket.digest for bucket in mine]
    if theirs != digests:
        count = len(theirs) if isinstance(theirs, list) else "no"
        at = next((i for i, pair in enumerate(zip(digests, theirs if isinstance(theirs, list) else [], strict=False)) if pair[0] != pair[1]), len(digests))
        first = f"; the first that differs begins with tensor {mine[at].names[0]}" if at < len(mine) else ""
        raise TransportFailed(
            f"version {manifest.version}: the weight server has {count} buckets, expected {len(digests)}{first}: set weights.bucket_mb alike everywhere"
        )


async def together(*calls: Coroutine[Any, Any, object]) -> None:
    """Run all; the first failure ends the others and is raised."""
    tasks = [asyncio.create_task(call, name="transport:part") for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()
