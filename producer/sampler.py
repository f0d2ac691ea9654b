"""One rollout: generate, judge, reward, with retries; a failure is the sample's, never the producer's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import numpy as np

from producer.config import ProducerConfig
from producer.draft import Decode, Draft
from producer.engine.client import ABORTED, EngineClient, Fault, Generation, Outcome, Sampling
from producer.pool import EnginePool, Seat
from producer.rewards import Grader, Reward, RewardSample
from producer.routing import ROLLOUT, Engine, EngineKey, cost_of
from producer.source import Chosen
from protocol.arrays import IntArray
from protocol.errors import SampleFailed
from protocol.messages import Rollout, Span
from protocol.versions import Version
from weightsync.lora import name_of

_FIRST_PACE_S, _LONGEST_PACE_S = 0.01, 0.5
"""A sample that is aborted again and again is asked for no more often than this: an engine that aborts whatever comes is not asked hotly."""
_TAKES_NONE = frozenset({Fault.GONE, Fault.AWAY, Fault.SILENT, Fault.WEDGED, Fault.REFUSED})
"""Faults that do not depend on the sample."""
_CERTAIN = frozenset({Fault.GONE, Fault.SILENT, Fault.WEDGED, Fault.REFUSED})
"""Faults of which one tells enough."""
_USELESS = frozenset({Fault.WEDGED, Fault.REFUSED, Fault.BROKEN})
"""Faults that nobody but a person, or new weights, mends: the engine is unfit, for others too, and the registry says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A rollout with its reward and what it took."""

    rollout: Rollout
    reward: Reward
    queue_s: float
    generate_s: float
    reward_s: float


class Sampler:
    """Makes single rollouts; the group and the evaluation share it."""

    def __init__(self, *, pool: EnginePool, client: EngineClient, grader: Grader, config: ProducerConfig, decode: Decode) -> None:
        """`decode`: of the model's tokenizer, for end and text of what several engines wrote."""
        self._decode = decode
        self._pool = pool
        self._client = client
        self._grader = grader
        self._config = config
        self.retried = 0
        """Samples that were asked for again, over the life of the producer."""
        self.aborted = 0
        """Those of them that an engine had ended on purpose, as an update does where `weights.pause_mode` is abort."""
        self.kept_tokens = 0
        """Tokens of responses that were ended or cut off, which others went on from."""

    async def watch(self) -> None:
        """Give requests up that wait for engines which do not get on, for ever."""
        await self._client.progress.watch()

    async def sample(
        self,
        chosen: Chosen,
        prompt: list[int],
        *,
        min_version: Version | None,
        sampling: Sampling,
        rid: str,
        exact: Version | None = None,
        fleet: str = ROLLOUT,
        prefix: str = "",
    ) -> Sampled:
        """One rollout, retried on another engine where there is one, inside the group's budget of seconds; waiting for an engine costs none of it.

        What an engine ended on purpose, or what was cut off, goes on from the tokens it has. It costs no attempt, and what was ended on purpose no seconds
        either: otherwise long responses, which meet more updates and more deaths, would fail more often than short ones, and that would bias the policy.

        `exact`, `fleet` and `prefix`: which engines are asked, as in `EnginePool.acquire`.

        Raises: `SampleFailed` when the attempts or the budget are used up.
        """
        attempts, draft = _Attempts(self._config), Draft(sampling, self._decode)
        queue_s = generate_s = 0.0
        while not draft.ended:
            began, ids, rest = time.monotonic(), draft.prompt(prompt), draft.rest()
            cost = cost_of(len(ids), rest.max_new_tokens)
            seat = await self._pool.acquire(min_version, attempts.failed, exact=exact, fleet=fleet, prefix=prefix, cost=cost)
            started = time.monotonic()
            queue_s += started - began
            outcome = await self._ask(seat, ids, rest, f"{rid}.{attempts.count}", attempts)
            took_s = time.monotonic() - started
            had, piece = draft.tokens, outcome.piece
            draft = draft if piece is None else draft.plus(piece)
            nobodys = outcome.fault is None or outcome.fault.nobodys
            if outcome.fault is None or not nobodys:
                generate_s += took_s
            if not nobodys or (piece is not None and piece.finish_reason != ABORTED):
                attempts.spent_s += took_s
            if draft.ended:
                continue
            self.retried += 1
            self.kept_tokens += draft.tokens - had
            if nobodys:
                self.aborted += 1
                await asyncio.sleep(attempts.aborted(took_s))
            else:
                attempts.failure(seat, outcome, gained=draft.tokens > had)
        await self._blame(attempts)
        generated, generation = time.monotonic(), draft.whole()
        reward = await self._reward(chosen, generation, attempts)
        rewarded = time.monotonic()
        return Sampled(
            rollout=_rollout(chosen.ids, generation, reward, seat.engine),
            reward=reward,
            queue_s=queue_s,
            generate_s=generate_s,
            reward_s=rewarded - generated,
        )

    async def _ask(self, seat: Seat, ids: list[int], sampling: Sampling, rid: str, attempts: _Attempts) -> Outcome:
        """What the engine of the seat answered, as far as it is to be believed."""
        engine = seat.engine
        try:
            outcome = await self._client.attempt(
                engine.url,
                ids,
                sampling=sampling,
                rid=rid,
                deadline_s=attempts.deadline_s,
                assumed=engine.version,
                span_lag=engine.span_lag,
                prefix_cache=engine.prefix_cache,
                salt=rid if engine.mixed else "",
                adapter=name_of(engine.adapters, engine.version) if engine.adapters else "",
                on_sign=lambda: self._pool.answers(seat),
            )
        except BaseException:
            self._pool.release(seat, answered=False)
            raise
        await self._settle(seat, outcome)
        try:
            if outcome.piece is not None and outcome.piece.spans:
                await self._pool.judge(seat, {span.version for span in outcome.piece.spans})
        except SampleFailed as problem:
            return Outcome(fault=Fault.FOREIGN, problem=str(problem))
        return outcome

    async def _settle(self, seat: Seat, outcome: Outcome) -> None:
        """Give the seat back, and say of the engine what the outcome tells (rule W3)."""
        fault, problem = outcome.fault, outcome.problem
        if fault is None or fault.nobodys:
            self._pool.release(seat)
        elif fault in (Fault.SLOW, Fault.REJECTED):
            self._pool.release(seat, answered=False)
        elif fault is Fault.FOREIGN:
            self._pool.release(seat, answered=False)
            await self._unfit(seat, f"answered without a version of this run ({problem})")
        else:
            exile = fault in _USELESS
            if self._pool.refused(seat, problem, certain=fault in _CERTAIN, exile=exile) and exile:
                await self._unfit(seat, f"is of no use ({problem})")

    async def _blame(self, attempts: _Attempts) -> None:
        """What one engine rejected and another wrote was not the request's fault: the first may have another model."""
        for seat, problem in attempts.rejected:
            if self._pool.blame(seat, problem):
                await self._unfit(seat, f"rejects what others take ({problem})")

    async def _unfit(self, seat: Seat, reason: str) -> None:
        with contextlib.suppress(SampleFailed):
            await self._pool.mark_unfit(seat, reason)

    async def _reward(self, chosen: Chosen, generation: Generation, attempts: _Attempts) -> Reward:
        row = chosen.row
        sample = RewardSample(
            prompt=row.prompt,
            response=generation.text,
            response_ids=generation.output_ids,
            label=row.label,
            finish_reason=generation.finish_reason,
            metadata=row.metadata,
        )
        while True:
            began = time.monotonic()
            try:
                return await self._grader.score(sample)
            except SampleFailed as problem:
                attempts.spent_s += time.monotonic() - began
                attempts.count_one(str(problem))
                self.retried += 1


class _Attempts:
    """What one sample has used of its budget. An engine that takes no request counts once, however often; what brought tokens does not count."""

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self.failed: set[EngineKey] = set()
        self.rejected: list[tuple[Seat, str]] = []
        """Where the request itself was found wanting."""
        self._away: set[EngineKey] = set()
        self.count = 0
        """Attempts so far, of any outcome."""
        self._counted = 0
        self._aborts = 0
        self.spent_s = 0.0

    @property
    def deadline_s(self) -> float:
        return max(0.001, min(self._config.sample_deadline_seconds, self._config.group_deadline_seconds - self.spent_s))

    def aborted(self, after_s: float) -> float:
        """Not counted. Seconds to rest before the next attempt; what the aborted one took is part of the pace."""
        self.count += 1
        self._aborts += 1
        pace_s: float = min(_LONGEST_PACE_S, _FIRST_PACE_S * 2.0 ** min(self._aborts - 1, 10))
        return max(0.0, pace_s - after_s)

    def failure(self, seat: Seat, outcome: Outcome, *, gained: bool) -> None:
        """An attempt failed; `gained`: it brought tokens nevertheless. Raises: `SampleFailed` when that was the last."""
        key, fault = seat.engine.key, outcome.fault
        self.failed.add(key)
        if fault is Fault.REJECTED:
            self.rejected.append((seat, outcome.problem))
        counts = not gained and not (fault in _TAKES_NONE and key in self._away)
        if fault in _TAKES_NONE:
            self._away.add(key)
        self.count_one(outcome.problem, counts=counts)

    def count_one(self, problem: str, *, counts: bool = True) -> None:
        """Raises: `SampleFailed` when attempts or seconds are used up."""
        self.count += 1
        self._counted += counts
        if self._counted > self._config.sample_retries:
            raise SampleFailed(f"{self._counted} attempts failed, the last one: {problem}")
        if self.spent_s >= self._config.group_deadline_seconds:
            raise SampleFailed(f"the group's {self._config.group_deadline_seconds:g} s are used up, the last attempt: {problem}")


def _rollout(prompt: IntArray, generation: Generation, reward: Reward, engine: Engine) -> Rollout:
    start, total = len(prompt), len(prompt) + len(generation.output_ids)
    tokens = np.empty(total, dtype=np.int32)
    tokens[:start], tokens[start:] = prompt, generation.output_ids
    mask = np.zeros(total, dtype=np.uint8)
    mask[start:] = 1
    logprobs = np.zeros(total, dtype=np.float32)
    logprobs[start:] = generation.logprobs
    return Rollout(
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        spans=tuple(Span(version=span.version, start=span.start + start, end=span.end + start) for span in generation.spans),
        reward=reward.value,
        finish_reason=generation.finish_reason,
        engine_id=engine.id,
    )
