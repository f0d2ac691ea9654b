"""Held-out evaluation, outside the ledger: greedy, tagged with the versions that served it, done by one producer at a time.

consumes: engines   produces: audit events `eval`   waits for: its turn, a due time, an engine   unblocked by: records, expiry of the lock, acks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from producer.config import EvalConfig
from producer.election import Election, Phase, Turn
from producer.engine.client import Sampling
from producer.outage import through_outage
from producer.pool import EnginePool
from producer.rewards import Reward
from producer.sampler import Sampler
from producer.source import Chosen, PromptSet
from protocol.errors import SampleFailed
from protocol.messages import JsonValue
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups

_LOG = logging.getLogger(__name__)
_AGAIN_S = 5.0
"""An evaluation of which nothing came is tried again after so long."""
_FIRST_TRIES = 3
"""After so many first evaluations of which nothing came, each producer lets the run begin without one: training is worth more than its first figure."""


@dataclass(slots=True)
class _Tally:
    rewards: list[Reward] = field(default_factory=list)
    versions: set[Version] = field(default_factory=set)
    failed: int = 0
    problem: str = ""

    def fields(self, phase: Phase, *, seconds: float, producer_id: str) -> dict[str, JsonValue]:
        count = len(self.rewards)
        return {
            "phase": phase.value,
            "versions": [str(version) for version in sorted(self.versions)],
            "samples": count,
            "reward": sum(reward.value for reward in self.rewards) / count,
            "exact": sum(reward.is_exact for reward in self.rewards) / count,
            "failed": self.failed,
            "seconds": round(seconds, 3),
            "producer_id": producer_id,
        }


class Evaluation:
    """The held-out rows of one producer and its part in evaluating them."""

    def __init__(
        self,
        config: EvalConfig,
        prompts: PromptSet,
        *,
        sampler: Sampler,
        sampling: Sampling,
        pool: EnginePool,
        election: Election,
        wakeups: Wakeups,
        producer_id: str,
        redis_deadline_s: float,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._sampler = sampler
        self._sampling = sampling
        self._pool = pool
        self._election = election
        self._wakeups = wakeups
        self._producer_id = producer_id
        self._deadline_s = redis_deadline_s

    async def first(self) -> None:
        """Return once the first evaluation is recorded, by whomever, as failed if it came to nothing for several times. Until then nothing is generated for
        training.
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
                    if claim is Turn.MINE:
                        await self._evaluate(Phase.FINAL, await self._best(version), version)
                    if claim in (Turn.MINE, Turn.DONE):
                        return
                    await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=min(wait_s, RECHECK_S))
        except TimeoutError:
            _LOG.warning("the final evaluation was not done in %g s", 2 * self._config.final_deadline_seconds)

    async def _best(self, version: Version) -> Version | None:
        """`version` once an engine serves it; after the deadline, anything on the line."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.final_deadline_seconds):
                self._pool.release(await self._pool.acquire(version), answered=False)
                return version
        _LOG.warning("no engine serves the final version %s; evaluating what there is", version)
        return None

    async def _claim(self, phase: Phase, version: Version | None = None) -> tuple[Turn, float]:
        text = "" if version is None else str(version)
        return await through_outage(lambda: self._election.claim(phase, text), deadline_s=self._deadline_s)

    async def _evaluate(self, phase: Phase, min_version: Version | None, version: Version | None = None, *, give_up: bool = False) -> bool:
        """Evaluate and record, while the lock is ours; False if nothing came of it. `give_up`: then record that, and it is over."""
        text = "" if version is None else str(version)

        async def work() -> bool:
            began = time.monotonic()
            tally = await self._sample_all(phase, min_version)
            if not tally.rewards:
                _LOG.warning("evaluation (%s) failed for all %d samples, the last one: %s", phase, tally.failed, tally.problem)
                if not give_up:
                    return False
                _LOG.warning("the run begins without a first evaluation")
                failure: dict[str, JsonValue] = {"phase": phase.value, "failed": tally.failed, "problem": tally.problem[:500], "producer_id": self._producer_id}
                return await through_outage(lambda: self._election.record_failure(phase, text, failure), deadline_s=self._deadline_s)
            fields = tally.fields(phase, seconds=time.monotonic() - began, producer_id=self._producer_id)
            _LOG.info(
                "evaluation (%s) of %s: reward %.3f, exact %.3f", phase, ",".join(str(v) for v in sorted(tally.versions)), fields["reward"], fields["exact"]
            )
            return await through_outage(lambda: self._election.record(phase, text, fields), deadline_s=self._deadline_s)

        return bool(await self._election.holding(phase, text, work()))

    async def _sample_all(self, phase: Phase, min_version: Version | None) -> _Tally:
        tally = _Tally()
        rows = iter(range(len(self._prompts)))  # shared by the workers: each row is taken once
        async with asyncio.TaskGroup() as workers:
            for i in range(min(self._config.concurrency, len(self._prompts))):
                workers.create_task(self._work(rows, phase, min_version, tally), name=f"producer:eval-{phase}-{i}")
        return tally

    async def _work(self, rows: Iterator[int], phase: Phase, min_version: Version | None, tally: _Tally) -> None:
        for index in rows:
            row, ids = self._prompts.rows[index], self._prompts.ids(index)
            chosen = Chosen(f"{self._prompts.path.name}:{row.line}", row, ids)
            try:
                sampled = await self._sampler.sample(
                    chosen, ids.tolist(), min_version=min_version, sampling=self._sampling, rid=f"{self._producer_id}-eval-{phase}-{index}"
                )
            except SampleFailed as problem:
                tally.failed += 1
                tally.problem = str(problem)
                continue
            tally.rewards.append(sampled.reward)
            tally.versions.update(span.version for span in sampled.rollout.spans)
