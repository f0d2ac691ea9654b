"""One pass over held-out rows, greedy: every row is asked for once, and what came of it is counted. A run's evaluations and `rollstream eval` share it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from producer.config import EvalConfig
from producer.engine.client import Sampling
from producer.rewards import Grader, Reward
from producer.sampler import Sampled, Sampler
from producer.source import Chosen, PromptSet, read_rows
from producer.template import PromptEncoder
from protocol.config import DataConfig
from protocol.errors import SampleFailed
from protocol.messages import JsonValue
from protocol.versions import Version

_PIN_TRIES = 3
"""A sample that is not of the version it was asked of, although its engine said it serves that, is taken so often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A named set of held-out rows."""

    name: str
    prompts: PromptSet


def read_held_out(config: EvalConfig, data: DataConfig, *, grader: Grader, encoder: PromptEncoder, max_tokens: int) -> tuple[HeldOut, ...]:
    """Every set of the configuration, read and encoded, the main one first. Raises: `ConfigError` naming file, line or key."""
    found = []
    for name, spec in config.files.items():
        rows = read_rows(config.key(name), spec, data, label_fault=grader.label_fault, limit=config.samples)
        found.append(HeldOut(name=name, prompts=PromptSet(config.key(name), spec, rows, encoder, max_tokens=max_tokens)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Which engines an evaluation asks, and for which version."""

    version: Version | None = None
    """What it is of, as far as engines allow; None: whatever they serve."""
    pinned: bool = False
    """Only engines that serve exactly `version`; else `version` or newer."""
    fleet: str = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said to one row, and what that is worth."""

    line: int
    """1-based line of the file."""
    reward: Reward
    output_ids: tuple[int, ...]
    versions: frozenset[Version]
    """That wrote its tokens."""
    finish_reason: str


@dataclass(slots=True)
class Outcome:
    """What one pass brought.

    Invariant: every row is either one of `answers` or counted in `failed`.
    """

    held_out: HeldOut
    demand: Demand
    answers: dict[int, Answer] = field(default_factory=dict)
    """By index of the row."""
    failed: int = 0
    problem: str = ""
    """Of the last that failed."""

    @property
    def versions(self) -> tuple[Version, ...]:
        """All that wrote a token, oldest first."""
        return tuple(sorted({version for answer in self.answers.values() for version in answer.versions}))

    def fields(self) -> dict[str, JsonValue]:
        """For the record; there is at least one answer.

        `version` is what the evaluation is of, `pinned` whether every token is that version's, and `mixed` counts the samples with a token that is not.
        """
        count, version = len(self.answers), self.demand.version
        if version is None and self.versions:
            version = self.versions[0]
        mixed = sum(answer.versions != {version} for answer in self.answers.values())
        return {
            "set": self.held_out.name,
            "version": str(version),
            "pinned": not mixed,
            "mixed": mixed,
            "versions": [str(one) for one in self.versions],
            "samples": count,
            "reward": sum(answer.reward.value for answer in self.answers.values()) / count,
            "exact": sum(answer.reward.is_exact for answer in self.answers.values()) / count,
            "tokens": sum(len(answer.output_ids) for answer in self.answers.values()),
            "failed": self.failed,
        }


async def answer_all(held_out: HeldOut, demand: Demand, *, sampler: Sampler, sampling: Sampling, concurrency: int, rid: str) -> Outcome:
    """One pass. `rid`: begins the id of every request. Raises: `RedisUnavailable` when Redis stays away."""
    outcome = Outcome(held_out, demand)
    rows = iter(range(len(held_out.prompts)))  # shared by the workers: each row is taken once
    async with asyncio.TaskGroup() as workers:
        for i in range(min(concurrency, len(held_out.prompts))):
            workers.create_task(_work(rows, outcome, sampler, sampling, rid), name=f"producer:{rid}-{i}")
    return outcome


async def _work(rows: Iterator[int], outcome: Outcome, sampler: Sampler, sampling: Sampling, rid: str) -> None:
    for index in rows:
        try:
            outcome.answers[index] = await _answer(index, outcome, sampler, sampling, f"{rid}-{index}")
        except SampleFailed as problem:
            outcome.failed += 1
            outcome.problem = str(problem)


async def _answer(index: int, outcome: Outcome, sampler: Sampler, sampling: Sampling, rid: str) -> Answer:
    """Raises: `SampleFailed`."""
    prompts, demand = outcome.held_out.prompts, outcome.demand
    row, ids = prompts.rows[index], prompts.ids(index)
    chosen = Chosen(f"{prompts.path.name}:{row.line}", row, ids)
    for attempt in range(_PIN_TRIES):
        sampled = await sampler.sample(
            chosen,
            ids.tolist(),
            min_version=None if demand.pinned else demand.version,
            exact=demand.version if demand.pinned else None,
            fleet=demand.fleet,
            sampling=sampling,
            rid=rid if not attempt else f"{rid}-{attempt}",
        )
        answer = _as_answer(row.line, len(ids), sampled)
        if not demand.pinned or answer.versions == {demand.version}:
            return answer
    raise SampleFailed(f"asked for version {demand.version} alone, and {', '.join(map(str, sorted(answer.versions)))} wrote it, {_PIN_TRIES} times")


def _as_answer(line: int, prompt_tokens: int, sampled: Sampled) -> Answer:
    rollout = sampled.rollout
    return Answer(
        line=line,
        reward=sampled.reward,
        output_ids=tuple(rollout.tokens[prompt_tokens:].tolist()),
        versions=frozenset(span.version for span in rollout.spans),
        finish_reason=rollout.finish_reason,
    )
