"""The engines a producer may use: the registry's news around the pure routing core.

consumes: wake-ups `engines` and `run`   produces: an engine for each request   waits for: a qualifying engine   unblocked by: acks, attachments, rests that end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from buffer.contract import Ledger, LedgerStatus
from producer.outage import through_outage
from producer.routing import Engine, EngineKey, Routing
from protocol.errors import RedisUnavailable, SampleFailed
from protocol.messages import EngineStatus
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups

_EMBEDDED = "embedded"
"""The kind of engine that keeps nothing of a request that is over."""
_LOG = logging.getLogger(__name__)


class Engines(Protocol):
    """What the pool needs of `weightsync.registry.Registry`."""

    async def routable(self) -> Sequence[EngineStatus]: ...

    async def mark_unfit(self, engine_id: str, boot_nonce: str, reason: str) -> object: ...


class EnginePool:
    """Hands out engines, counts what each has outstanding, and believes answers over the registry (rule W3)."""

    def __init__(
        self, registry: Engines, ledger: Ledger, wakeups: Wakeups, *, deadline_s: float, on_status: Callable[[LedgerStatus], None] = lambda _: None
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._wakeups = wakeups
        self._deadline_s = deadline_s
        self._on_status = on_status
        self._routing = Routing()
        self._changed = asyncio.Event()
        self._ledger_read_at = -RECHECK_S
        self._waiting: dict[int, float] = {}

    @property
    def waiting_since(self) -> float:
        """Unix seconds since when some request has had no engine; 0: none waits."""
        return min(self._waiting.values(), default=0.0)

    async def watch(self) -> None:
        """Follow registry and lineage for ever.

        Raises: `RedisUnavailable` when Redis stays away.
        """
        run_news = True
        while True:
            mark = self._wakeups.mark(Topic.ENGINES, Topic.RUN)
            await through_outage(lambda: self.refresh(ledger=run_news), deadline_s=self._deadline_s)  # noqa: B023 - awaited at once
            await self._wakeups.wait(Topic.ENGINES, Topic.RUN, since=mark, timeout_s=RECHECK_S)
            run_news = self._wakeups.mark(Topic.RUN)[Topic.RUN] != mark[Topic.RUN]

    async def refresh(self, *, ledger: bool = True) -> None:
        """Read the registry once, and the ledger if asked to, if that was a while ago, or if an engine serves a version we have not heard of."""
        routable = await self._registry.routable()
        engines = [_engine(engine, engine.version) for engine in routable if engine.version]
        news = any(not self._routing.knows(engine.version) for engine in engines)
        if ledger or news or self._routing.lineage is None or time.monotonic() - self._ledger_read_at >= RECHECK_S:
            status = await self._ledger.status()
            self._ledger_read_at = time.monotonic()
            self._routing.lineage, self._routing.trained = status.lineage, status.trained
            self._on_status(status)
        self._routing.seen(engines, self._routing.lineage)
        self._fire()

    async def acquire(self, min_version: Version | None, avoid: Collection[EngineKey] = ()) -> Engine:
        """An engine on the current line at `min_version` or newer (None: any), rather not one of `avoid`; waits while there is none.

        Give it back with `release` or `refused`.
        """
        if (engine := self._take(min_version, avoid)) is not None:
            return engine
        ticket = id(asyncio.current_task())
        self._waiting[ticket] = time.time()
        try:
            while True:
                changed = self._changed
                if (engine := self._take(min_version, avoid)) is not None:
                    return engine
                now = time.monotonic()
                rest_ends = self._routing.rest_ends(now)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if rest_ends is None else rest_ends - now + 0.001):
                        await changed.wait()
        finally:
            del self._waiting[ticket]

    def _take(self, min_version: Version | None, avoid: Collection[EngineKey]) -> Engine | None:
        engine = self._routing.choose(min_version, avoid=avoid, now=time.monotonic())
        if engine is not None:
            self._routing.started(engine.key)
        return engine

    def release(self, engine: Engine, *, answered: bool = True) -> None:
        """The request is over, answered or given up by us."""
        self._routing.finished(engine.key, answered=answered)

    def refused(self, engine: Engine) -> None:
        """The request is over because the engine did not answer; it rests for a while."""
        self._routing.refused(engine.key, now=time.monotonic())

    async def judge(self, engine: Engine, versions: Collection[Version]) -> None:
        """Accept an answer written under `versions`.

        Raises: `SampleFailed` if one is unknown to the run, such as one newer than anything trained, or older than the engine acked; the engine is then marked
        unfit. `RedisUnavailable` when Redis stays away and cannot be asked.
        """
        if min(versions) < engine.version:
            await self.mark_unfit(engine, f"answered with version {min(versions)} after acking {engine.version}")
        if not all(self._routing.knows(version) for version in versions):
            await through_outage(self.refresh, deadline_s=self._deadline_s)
            if unknown := [str(version) for version in versions if not self._routing.knows(version)]:
                await self.mark_unfit(engine, f"answered with version {unknown[0]}, which this run does not have")

    async def mark_unfit(self, engine: Engine, reason: str) -> None:
        """Take the engine out of routing here and in the registry. Raises: `SampleFailed`, always."""
        self._routing.unfit(engine.key)
        _LOG.warning("engine %s is unfit: %s", engine.id, reason)
        with contextlib.suppress(RedisUnavailable):  # the sample has failed either way, and the next answer says it again
            await self._registry.mark_unfit(*engine.key, reason)
        raise SampleFailed(f"engine {engine.id} {reason}")

    def _fire(self) -> None:
        fired, self._changed = self._changed, asyncio.Event()
        fired.set()


def _engine(status: EngineStatus, version: Version) -> Engine:
    key = (status.engine_id, status.boot_nonce)
    return Engine(key=key, url=status.url, version=version, span_lag=status.span_lag, prefix_cache=status.kind != _EMBEDDED)
