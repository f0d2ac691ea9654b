"""Held-out evaluation, outside the ledger: greedy, tagged with the versions that served it, done by one producer at a time.

consumes: engines   produces: audit events `eval`   waits for: its turn, a due time, an engine   unblocked by: records, expiry of the lock, acks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from producer.config import EvalConfig
from producer.election import Election, Phase, Turn
from producer.engine.client import Sampling
from producer.held_out import Demand, HeldOut, Outcome, answer_all
from producer.outage import through_outage
from producer.pinning import Pinning
from producer.sampler import Sampler
from protocol.errors import RedisUnavailable, VersionGone
from protocol.messages import JsonValue
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups

_LOG = logging.getLogger(__name__)
_AGAIN_S = 5.0
"""An evaluation of which nothing came is tried again after so long."""
_FIRST_TRIES = 3
"""After so many first evaluations of which nothing came, each producer lets the run begin without one: training is worth more than its first figure."""


class Evaluation:
    """The held-out sets of one producer and its part in evaluating them. All sets of an evaluation are asked of the same version."""

    def __init__(
        self,
        config: EvalConfig,
        sets: Sequence[HeldOut],
        *,
        sampler: Sampler,
        sampling: Sampling,
        pinning: Pinning,
        election: Election,
        wakeups: Wakeups,
        producer_id: str,
        redis_deadline_s: float,
    ) -> None:
        self._config = config
        self._sets = sets
        self._sampler = sampler
        self._sampling = sampling
        self._pinning = pinning
        self._election = election
        self._wakeups = wakeups
        self._producer_id = producer_id
        self._deadline_s = redis_deadline_s

    @property
    def holds_up(self) -> bool:
        """Whether training waits for the first evaluation, which is of what was there before it: engines of the evaluation's own keep that beside training."""
        return not self._pinning.separate

    async def first(self) -> None:
        """Return once the first evaluation is recorded, by whomever, as failed if it came to nothing for several times. Where it `holds_up`, nothing is
        generated for training until then.
        """
        tries = 0
        while True:
            mark = self._wakeups.mark(Topic.RUN)
            claim, wait_s = await self._claim(Phase.FIRST)
            if claim is Turn.DONE:
                return
            if claim is not Turn.MINE:
                await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=min(wait_s, RECHECK_S))
                continue
            tries += 1
            if not await self._evaluate(Phase.FIRST, None, give_up=tries >= _FIRST_TRIES):
                await asyncio.sleep(_AGAIN_S)

    async def periodic(self) -> None:
        """Evaluate whenever it is due and nobody else does, for ever."""
        while True:
            claim, wait_s = await self._claim(Phase.PERIODIC)
            if claim is not Turn.MINE:
                await asyncio.sleep(max(wait_s, 0.01))
            elif not await self._evaluate(Phase.PERIODIC, None):
                await asyncio.sleep(_AGAIN_S)

    async def final(self, version: Version) -> None:
        """Return once the evaluation of the version the run ended with is recorded, or its deadline has passed.

        Engines that serve `version` are waited for; if none comes, what is there is evaluated, and the record says which version that was.
        """
        try:
            async with asyncio.timeout(2 * self._config.final_deadline_seconds):
                while True:
                    mark = self._wakeups.mark(Topic.RUN)
                    claim, wait_s = await self._claim(Phase.FINAL, version)
                    if claim is Turn.DONE or (claim is Turn.MINE and await self._evaluate(Phase.FINAL, version)):
                        return
                    if claim is Turn.MINE:
                        await asyncio.sleep(_AGAIN_S)
                        continue
                    await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=min(wait_s, RECHECK_S))
        except TimeoutError:
            _LOG.warning("the final evaluation was not done in %g s", 2 * self._config.final_deadline_seconds)

    async def _claim(self, phase: Phase, version: Version | None = None) -> tuple[Turn, float]:
        text = "" if version is None else str(version)
        return await through_outage(lambda: self._election.claim(phase, text), deadline_s=self._deadline_s)

    async def _evaluate(self, phase: Phase, version: Version | None, *, give_up: bool = False) -> bool:
        """Evaluate and record, while the lock is ours; False if nothing came of it. `give_up`: then record that, and it is over."""
        text = "" if version is None else str(version)

        async def work() -> bool:
            began = time.monotonic()
            outcomes, problem = await self._outcomes(phase, version)
            failed = sum(outcome.failed for outcome in outcomes)
            if not any(outcome.answers for outcome in outcomes):
                _LOG.warning("evaluation (%s) failed: %s", phase, problem)
                if not give_up:
                    return False
                _LOG.warning("the run goes on without a first evaluation")
                failure: dict[str, JsonValue] = {"phase": phase.value, "failed": failed, "problem": problem[:500], "producer_id": self._producer_id}
                return await through_outage(lambda: self._election.record_failure(phase, text, failure), deadline_s=self._deadline_s)
            seconds = round(time.monotonic() - began, 3)
            fields = [outcome.fields() for outcome in outcomes if outcome.answers]
            results = [{"phase": phase.value, **of_set, "seconds": seconds, "producer_id": self._producer_id} for of_set in fields]
            for result in results:
                _LOG.info("evaluation (%s) of %s on %s: reward %.3f, exact %.3f", phase, *(result[name] for name in ("versions", "set", "reward", "exact")))
            return await through_outage(lambda: self._election.record(phase, text, results), deadline_s=self._deadline_s)

        return bool(await self._election.holding(phase, text, work()))

    async def _outcomes(self, phase: Phase, version: Version | None) -> tuple[list[Outcome], str]:
        """One outcome a set, and why something failed, if anything did."""
        outcomes: list[Outcome] = []
        try:
            async with self._demand(phase, version) as demand, asyncio.timeout(self._config.deadline_seconds if demand.pinned else None):
                for held_out in self._sets:
                    outcome = await answer_all(
                        held_out,
                        demand,
                        sampler=self._sampler,
                        sampling=self._sampling,
                        concurrency=self._config.concurrency,
                        rid=f"{self._producer_id}-eval-{phase}-{held_out.name}",
                    )
                    outcomes.append(outcome)
        except (VersionGone, RedisUnavailable) as problem:  # the second: its files were not held meanwhile
            return [], str(problem)
        except TimeoutError:
            return [], f"engines of its own did not do it within eval.deadline_seconds = {self._config.deadline_seconds:g}"
        return outcomes, "; ".join(_failure(outcome) for outcome in outcomes if outcome.failed)

    @contextlib.asynccontextmanager
    async def _demand(self, phase: Phase, version: Version | None) -> AsyncIterator[Demand]:
        """What the evaluation of `phase` asks for, with engines that can meet it. Raises: as `Pinning.pinned`."""
        if not self._pinning.separate:
            yield await (self._final(version) if version is not None else self._pinning.shared())
        elif version is None:
            newest = await self._pinning.newest()
            chosen = await self._pinning.starting(newest) if phase is Phase.FIRST else newest
            async with self._pinning.pinned(chosen, within_s=self._config.deadline_seconds) as demand:
                yield demand
        else:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    pinned = self._pinning.pinned(version, within_s=self._config.final_deadline_seconds / 2)
                    demand = await stack.enter_async_context(pinned)
                except (TimeoutError, VersionGone) as problem:
                    _LOG.warning(
                        "no engine of the evaluation's own serves the final version %s (%s): the run's are asked", version, str(problem) or "no time left"
                    )
                    demand = await self._final(version)
                yield demand

    async def _final(self, version: Version) -> Demand:
        """On `version` once an engine of the run serves it; after the deadline, on anything on the line."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.final_deadline_seconds):
                return await self._pinning.shared(version)
        _LOG.warning("no engine serves the final version %s; evaluating what there is", version)
        return await self._pinning.shared()


def _failure(outcome: Outcome) -> str:
    return f"{outcome.failed} of {len(outcome.held_out.prompts)} samples of {outcome.held_out.name}, the last one: {outcome.problem}"
