"""The producer daemon's life once it has joined a run.

first evaluation → groups until SIGTERM or the end of the run → drain, give back → final evaluation, if the run ended → gone
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Protocol

from buffer.contract import Ledger, LedgerStatus, RunState
from buffer.watchdog import EdgeLog
from producer.config import ProducerConfig
from producer.evaluation import Evaluation
from producer.outage import through_outage
from producer.pool import EnginePool
from producer.sampler import Sampler
from producer.stopping import unless
from producer.work import GroupWork
from protocol.errors import RedisUnavailable
from protocol.messages import Edge, ProducerStatus
from protocol.presence import Presence
from protocol.versions import Version

_LOG = logging.getLogger(__name__)
BEAT_S = 2.5
_SWEEP_S = 5.0
_LAG_S = 0.25
_LEAVE_S = 1.0
_SAID = 300
"""Characters of what an engine answered that are passed on."""


class Waits(Protocol):
    """Somebody else whom groups wait for: `producer.teacher`."""

    @property
    def waiting_since(self) -> float: ...

    @property
    def resting(self) -> Mapping[str, str]: ...


class ProducerLoop:
    """One producer of one run. `closing` is set to make it stop; `on_status` and `on_run_ended` tell it that the run is over."""

    def __init__(
        self,
        config: ProducerConfig,
        here: ProducerStatus,
        *,
        presence: Presence[ProducerStatus],
        slot_s: float,
        redis_deadline_s: float,
        stall_s: float = 60.0,
        teacher: Waits | None = None,
    ) -> None:
        self._config = config
        self._here = here
        self._presence = presence
        self._teacher = teacher
        self._beat_s = min(BEAT_S, slot_s / 4)
        self._deadline_s = redis_deadline_s
        self.closing = asyncio.Event()
        self._ended = False
        self._first_since = 0.0
        """Unix seconds since when the first evaluation has been waited for; 0: it is not."""
        self._lag_s = 0.0
        self._stalls = EdgeLog(_LOG, "generation", stall_s)

    def on_run_ended(self) -> None:
        if not self._ended:
            _LOG.info("the run has ended")
        self._ended = True
        self.closing.set()

    def on_status(self, status: LedgerStatus) -> None:
        if status.state is RunState.DRAINING:
            self.on_run_ended()

    async def run(self, stop: asyncio.Event, *, ledger: Ledger, pool: EnginePool, work: GroupWork, sampler: Sampler, evaluation: Evaluation | None) -> None:
        """Return when the producer has drained.

        Order of stopping: no new slots; groups under way finish (SIGTERM) or stop (end of the run); slots go back; the periodic evaluation stops; the final
        evaluation, at the end of a run; last the heartbeats, the engine watch and the presence, so that slots and engines live for as long as they are used.
        Raises: `RedisUnavailable` when Redis stays away.
        """
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._close_on(stop), name="producer:signals"),
                group.create_task(pool.watch(), name="producer:engines"),
                group.create_task(sampler.watch(), name="producer:progress"),
                group.create_task(self._heartbeats(work, pool, sampler), name="producer:heartbeats"),
                group.create_task(self._sweep(ledger), name="producer:sweep"),
                group.create_task(self._measure_lag(), name="producer:lag"),
            ]
            await self._live(stop, ledger, work, evaluation)
            for task in background:
                task.cancel()
        await self._leave()

    async def _live(self, stop: asyncio.Event, ledger: Ledger, work: GroupWork, evaluation: Evaluation | None) -> None:
        status = await self._status(ledger)
        first = evaluation is not None and status.trained == 0 and status.state is RunState.OPEN
        if evaluation is not None and first and evaluation.holds_up:
            self._first_since = time.time()
            await unless(self.closing, evaluation.first(), name="producer:first-evaluation")
            self._first_since = 0.0
        async with asyncio.TaskGroup() as group:
            beside = group.create_task(self._beside(evaluation, first), name="producer:evaluation") if evaluation is not None else None
            await work.run(lambda: 0.0 if self._ended else self._config.drain_seconds)
            if beside is not None:
                beside.cancel()
        if evaluation is not None and self._ended and not stop.is_set():
            status = await self._status(ledger)
            await unless(stop, evaluation.final(Version(status.incarnation, status.trained)), name="producer:final-evaluation")

    async def _beside(self, evaluation: Evaluation, first: bool) -> None:
        """Evaluations while groups are made."""
        if first and not evaluation.holds_up:
            await evaluation.first()
        await evaluation.periodic()

    async def _status(self, ledger: Ledger) -> LedgerStatus:
        status = await through_outage(ledger.status, deadline_s=self._deadline_s)
        self.on_status(status)
        return status

    async def _close_on(self, stop: asyncio.Event) -> None:
        await stop.wait()
        if not self.closing.is_set():
            _LOG.info("stopping: no new groups, up to %g s for those under way", self._config.drain_seconds)
        self.closing.set()

    async def _heartbeats(self, work: GroupWork, pool: EnginePool, sampler: Sampler) -> None:
        """Renew what is held, and say that we are here, for ever. Waits for: time."""
        while True:
            await work.renew()
            work.adapt(pool.loads)
            status = self._report(work, pool, sampler)
            self._stalls.see(status.waiting_for, status.waiting_since, time.time())
            await through_outage(lambda: self._presence.beat(self._here.producer_id, status), deadline_s=self._deadline_s)  # noqa: B023 - awaited at once
            await asyncio.sleep(self._beat_s)

    async def _sweep(self, ledger: Ledger) -> None:
        """Finish what others left half done (rule P1), for ever: on a cluster what was put stays only if somebody sweeps, and a run may be without a trainer
        for longer than that. Blobs wait for the trainer. Waits for: time.
        """
        while True:
            await through_outage(ledger.sweep, deadline_s=self._deadline_s)
            await asyncio.sleep(_SWEEP_S)

    def _report(self, work: GroupWork, pool: EnginePool, sampler: Sampler) -> ProducerStatus:
        edge, since = work.waiting_for, work.waiting_since
        if self._first_since:
            edge, since = Edge.FIRST_EVALUATION, self._first_since
        resting = dict(pool.resting)
        if self._teacher is not None:
            resting |= self._teacher.resting
            if self._teacher.waiting_since:
                edge, since = Edge.NO_TEACHER, self._teacher.waiting_since
        if pool.waiting_since:
            edge, since = Edge.NO_ENGINE, pool.waiting_since
        lag_s, self._lag_s = self._lag_s, 0.0
        return dataclasses.replace(
            self._here,
            inflight_groups=len(work),
            waiting_for=edge,
            waiting_since=since,
            groups_put=work.tally.put,
            groups_failed=work.tally.failed,
            samples_retried=sampler.retried,
            generated_tokens=work.tally.new_tokens,
            inflight_limit=work.inflight_limit,
            loop_lag_ms=round(lag_s * 1000, 1),
            resting={engine: reason[:_SAID] for engine, reason in resting.items()},
        )

    async def _measure_lag(self) -> None:
        """The worst delay of a timer since the last heartbeat: what a blocking reward function costs everybody."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lag_s = max(self._lag_s, clock() - due)

    async def _leave(self) -> None:
        with contextlib.suppress(RedisUnavailable, TimeoutError):  # then it expires
            async with asyncio.timeout(_LEAVE_S):
                await self._presence.leave(self._here.producer_id)
