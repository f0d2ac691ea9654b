"""The engines a producer may use: the registry's news around the pure routing core.

consumes: wake-ups `engines` and `run`   produces: an engine for each request   waits for: a qualifying engine   unblocked by: acks, attachments, rests that end

With `router_url` the requests of the rollout fleet go to a SGLang router, which knows nothing of versions and picks the engine itself: to the pool all of that
fleet is one engine, which serves what its least does. So it qualifies only once each of them does, and answers below a request's minimum come from engines that
are not in the registry, or that restarted; nobody can tell which, so nobody is marked unfit for them. Run it with `--disable-retries`: what it asks for again
by itself is sampled anew, uncounted. An engine that freezes behind it is for its own health checks to find; requests there are held to their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from buffer.contract import Ledger, LedgerStatus
from producer.outage import through_outage
from producer.pace import Load
from producer.routing import EVAL, ROLLOUT, Engine, EngineKey, Routing
from protocol.errors import RedisUnavailable, SampleFailed
from protocol.messages import EngineStatus
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups

_EMBEDDED = "embedded"
"""The kind of engine that keeps nothing of a request that is over."""
_ROUTER = "router"
_LOG = logging.getLogger(__name__)


class Engines(Protocol):
    """What the pool needs of `weightsync.registry.Registry`."""

    async def routable(self) -> Sequence[EngineStatus]: ...

    async def mark_unfit(self, engine_id: str, boot_nonce: str, reason: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """The right to one request at an engine: give it back with `EnginePool.release` or `refused`."""

    engine: Engine
    cost: float
    number: int
    """Of the request, among those that its engine got."""
    probe: int
    """The number of the probe that tells whether an engine that rested is well again; 0: it is none."""

    @property
    def id(self) -> str:
        return self.engine.id

    @property
    def version(self) -> Version:
        """What the engine had acked when the seat was given."""
        return self.engine.version


class EnginePool:
    """Hands out engines, counts what each has outstanding, and believes answers over the registry (rule W3)."""

    def __init__(
        self,
        registry: Engines,
        ledger: Ledger,
        wakeups: Wakeups,
        *,
        deadline_s: float,
        router_url: str = "",
        on_status: Callable[[LedgerStatus], None] = lambda _: None,
        on_engines: Callable[[Sequence[EngineStatus]], None] = lambda _: None,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._wakeups = wakeups
        self._deadline_s = deadline_s
        self._router_url = router_url.rstrip("/")
        self._on_status = on_status
        self._on_engines = on_engines
        self._routing = Routing()
        self._changed = asyncio.Event()
        self._ledger_read_at = -RECHECK_S
        self._waiting: dict[int, float] = {}
        self.loads: tuple[Load, ...] = ()
        """Of the engines that rollouts may go to, as the registry had them last."""

    @property
    def waiting_since(self) -> float:
        """Unix seconds since when some request of the run's fleet has had no engine; 0: none waits."""
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
        self._routing.seen(_behind_router(self._router_url, engines) if self._router_url else engines, self._routing.lineage)
        self.loads = tuple(Load(kv_usage=one.kv_usage, running=one.running, queued=one.queued) for one in routable if one.fleet != EVAL)
        self._on_engines(routable)
        self._fire()

    async def acquire(
        self,
        min_version: Version | None,
        avoid: Collection[EngineKey] = (),
        *,
        exact: Version | None = None,
        fleet: str = ROLLOUT,
        prefix: str = "",
        cost: float = 1.0,
    ) -> Seat:
        """A seat at an engine on the current line at `min_version` or newer (None: any), rather not one of `avoid`; waits while there is none.

        `exact`: at one that serves just that version. `fleet`: whose request it is. `prefix` names what its prompt shares with others, `cost` is what it
        costs the engine (`routing.cost_of`).
        """

        def take() -> Seat | None:
            engine = self._routing.choose(min_version, avoid=avoid, now=time.monotonic(), exact=exact, fleet=fleet, prefix=prefix, cost=cost)
            if engine is None:
                return None
            probe = self._routing.started(engine.key, cost=cost, prefix=prefix)
            return Seat(engine=engine, cost=cost, number=self._routing.number(engine.key), probe=probe)

        if (seat := take()) is not None:
            return seat
        ticket = id(asyncio.current_task())
        if fleet != EVAL:  # what waits for engines of the evaluation's own holds up nothing
            self._waiting[ticket] = time.time()
        try:
            while True:
                changed = self._changed
                if (seat := take()) is not None:
                    return seat
                now = time.monotonic()
                rest_ends = self._routing.rest_ends(now)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if rest_ends is None else rest_ends - now + 0.001):
                        await changed.wait()
        finally:
            self._waiting.pop(ticket, None)

    def answers(self, seat: Seat) -> None:
        """The request goes on, and its engine has begun to answer it soundly."""
        if seat.probe and self._routing.answered(seat.engine.key, probe=seat.probe):
            self._well(seat)

    def release(self, seat: Seat, *, answered: bool = True) -> None:
        """The request is over, answered or given up by us."""
        if self._routing.finished(seat.engine.key, answered=answered, cost=seat.cost, probe=seat.probe, number=seat.number):
            if answered:
                self._well(seat)
            self._fire()

    def refused(self, seat: Seat, reason: str = "", *, certain: bool = False, exile: bool = False) -> bool:
        """The request is over by a fault of the engine. True: that was one too many, and it rests for a while.

        `certain`: one such failure is enough. `exile`: its answers are of no use, so it rests long, unless it is a router, behind which others are.
        """
        exile = exile and seat.id != _ROUTER
        rests = self._routing.refused(
            seat.engine.key,
            now=time.monotonic(),
            cost=seat.cost,
            probe=seat.probe,
            number=seat.number,
            reason=reason,
            certain=certain,
            exile=exile,
        )
        return self._rests(seat, reason) if rests else False

    def blame(self, seat: Seat, reason: str) -> bool:
        """A request that failed and is over was of the engine's making after all: another took it. True: that was one too many."""
        rests = self._routing.blamed(seat.engine.key, now=time.monotonic(), reason=reason, number=seat.number)
        return self._rests(seat, reason) if rests else False

    def _rests(self, seat: Seat, reason: str) -> bool:
        _LOG.warning("engine %s rests: %s", seat.id, reason)
        self._fire()
        return True

    def _well(self, seat: Seat) -> None:
        _LOG.info("engine %s answers again", seat.id)
        self._fire()

    @property
    def resting(self) -> dict[str, str]:
        """Engines that are left alone for a while, by id, and why."""
        return {key[0]: reason for key, reason in self._routing.resting.items()}

    async def judge(self, seat: Seat, versions: Collection[Version]) -> None:
        """Accept an answer written under `versions`.

        Raises: `SampleFailed` if one is unknown to the run, such as one newer than anything trained, or older than the engine acked; the engine is then marked
        unfit. `RedisUnavailable` when Redis stays away and cannot be asked.
        """
        engine = seat.engine
        if min(versions) < engine.version:
            await self.mark_unfit(seat, f"answered with version {min(versions)} after acking {engine.version}")
        if not all(self._routing.knows(version) for version in versions):
            await through_outage(self.refresh, deadline_s=self._deadline_s)
            if unknown := [str(version) for version in versions if not self._routing.knows(version)]:
                await self.mark_unfit(seat, f"answered with version {unknown[0]}, which this run does not have")

    async def mark_unfit(self, seat: Seat, reason: str) -> None:
        """Take the engine out of routing here and in the registry, or, behind a router, nobody. Raises: `SampleFailed`, always."""
        engine = seat.engine
        if engine.id != _ROUTER:
            if self._routing.unfit(engine.key):  # the first of all that it was asked tells
                _LOG.warning("engine %s is unfit: %s", engine.id, reason)
            with contextlib.suppress(RedisUnavailable):  # the sample has failed either way, and the next answer says it again
                await self._registry.mark_unfit(*engine.key, reason)
        raise SampleFailed(f"engine {engine.id} {reason}")

    def _fire(self) -> None:
        fired, self._changed = self._changed, asyncio.Event()
        fired.set()


def _engine(status: EngineStatus, version: Version) -> Engine:
    key = (status.engine_id, status.boot_nonce)
    return Engine(
        key=key, url=status.url, version=version, span_lag=status.span_lag, prefix_cache=status.kind != _EMBEDDED, fleet=status.fleet, adapters=status.adapters
    )


def _behind_router(url: str, engines: Sequence[Engine]) -> list[Engine]:
    """Engines of the evaluation's own, and the router as one that serves what the least of the others does.

    While they differ, a common salt would let an engine that is past it find keys and values of before its update: then each request has a salt of its own.
    """
    direct = [engine for engine in engines if engine.fleet == EVAL]
    others = [engine for engine in engines if engine.fleet != EVAL]
    if not others:
        return direct
    mixed = len({engine.version for engine in others}) > 1
    router = Engine(
        key=(_ROUTER, url),
        url=url,
        version=min(engine.version for engine in others),
        span_lag=max(engine.span_lag for engine in others),
        prefix_cache=not mixed and any(engine.prefix_cache for engine in others),
        mixed=mixed,
        adapters=others[0].adapters,
    )
    return [*direct, router]
