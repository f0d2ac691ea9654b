"""One rollout: generate, judge, reward, with retries; a failure is the sample's, never the producer's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import numpy as np

from producer.config import ProducerConfig
from producer.draft import Decode, Draft
from producer.engine.client import ABORTED, EngineClient, Generation, Sampling
from producer.pool import EnginePool
from producer.rewards import Grader, Reward, RewardSample
from producer.routing import Engine, EngineKey
from producer.source import Chosen
from protocol.arrays import IntArray
from protocol.errors import DecodeError, EngineUnavailable, SampleAborted, SampleFailed
from protocol.messages import Rollout, Span
from protocol.versions import Version

_FIRST_PACE_S, _LONGEST_PACE_S = 0.01, 0.5
"""A sample that is aborted again and again is asked for no more often than this: an engine that aborts whatever comes is not asked hotly."""


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
        """Tokens of ended responses that others went on from."""

    async def sample(self, chosen: Chosen, prompt: list[int], *, min_version: Version | None, sampling: Sampling, rid: str) -> Sampled:
        """One rollout, retried on another engine where there is one, inside the group's budget of seconds; waiting for an engine costs none of it.

        What an engine ended on purpose goes on from the tokens it has, costs neither seconds nor an attempt, and may go to the same engine: otherwise long
        responses, which meet more updates, would fail more often than short ones, and that would bias the policy.

        Raises: `SampleFailed` when the attempts or the budget are used up.
        """
        attempts, draft = _Attempts(self._config), Draft(sampling, self._decode)
        queue_s = generate_s = 0.0
        while not draft.ended:
            began = time.monotonic()
            engine = await self._pool.acquire(min_version, attempts.failed)
            started = time.monotonic()
            queue_s += started - began
            try:
                piece = await self._generate(engine, draft.prompt(prompt), draft.rest(), f"{rid}.{attempts.count}", attempts)
            except SampleAborted:
                await self._again(attempts, started)
                continue
            generated = time.monotonic()
            generate_s += generated - started
            had = draft.tokens
            if piece is None:
                self.retried += 1
            else:
                draft = draft.plus(piece)
            if piece is None or piece.finish_reason != ABORTED:
                attempts.spent_s += generated - started
            elif not draft.ended:
                self.kept_tokens += draft.tokens - had
                await self._again(attempts, started)
        generated, generation = time.monotonic(), draft.whole()
        reward = await self._reward(chosen, generation, attempts)
        rewarded = time.monotonic()
        return Sampled(
            rollout=_rollout(chosen.ids, generation, reward, engine),
            reward=reward,
            queue_s=queue_s,
            generate_s=generate_s,
            reward_s=rewarded - generated,
        )

    async def _again(self, attempts: _Attempts, started: float) -> None:
        self.retried += 1
        self.aborted += 1
        await asyncio.sleep(attempts.aborted(time.monotonic() - started))

    async def _generate(self, engine: Engine, prompt: list[int], sampling: Sampling, rid: str, attempts: _Attempts) -> Generation | None:
        """The answer of `engine`, or None if this attempt failed and another is allowed. Raises: `SampleAborted`."""
        try:
            generation = await self._client.generate(
                engine.url,
                prompt,
                sampling=sampling,
                rid=rid,
                deadline_s=attempts.deadline_s,
                assumed=engine.version,
                span_lag=engine.span_lag,
                prefix_cache=engine.prefix_cache,
            )
        except EngineUnavailable as problem:
            self._pool.refused(engine)
            attempts.unavailable(engine, problem)
            return None
        except SampleAborted:
            self._pool.release(engine)
            raise
        except SampleFailed as problem:
            self._pool.release(engine)
            await self._doubt(engine, problem)
            attempts.failure(engine, problem)
            return None
        except BaseException:
            self._pool.release(engine, answered=False)
            raise
        self._pool.release(engine)
        try:
            if generation.spans:
                await self._pool.judge(engine, {span.version for span in generation.spans})
        except SampleFailed as problem:
            attempts.failure(engine, problem)
            return None
        return generation

    async def _doubt(self, engine: Engine, problem: SampleFailed) -> None:
        """An answer under a version that is none of a run's, such as a fresh boot's, tells that the registry is behind (rule W3)."""
        cause = problem.__cause__
        if isinstance(cause, DecodeError) and cause.field == "version":
            with contextlib.suppress(SampleFailed):
                await self._pool.mark_unfit(engine, f"answered without a version of this run ({cause})")

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
                attempts.failure(None, problem)
                self.retried += 1


class _Attempts:
    """What one sample has used of its budget. An engine that stays away counts once, however often it is tried."""

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self.failed: set[EngineKey] = set()
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

    def unavailable(self, engine: Engine, problem: Exception) -> None:
        counts = engine.key not in self._away
        self._away.add(engine.key)
        self._note(engine, problem, counts=counts)

    def failure(self, engine: Engine | None, problem: Exception) -> None:
        self._note(engine, problem, counts=True)

    def _note(self, engine: Engine | None, problem: Exception, *, counts: bool) -> None:
        self.count += 1
        self._counted += counts
        if engine is not None:
            self.failed.add(engine.key)
        if self._counted > self._config.sample_retries:
            raise SampleFailed(f"{self._counted} attempts failed, the last one: {problem}") from problem
        if self.spent_s >= self._config.group_deadline_seconds:
            raise SampleFailed(f"the group's {self._config.group_deadline_seconds:g} s are used up, the last attempt: {problem}") from problem


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
