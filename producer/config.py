"""The [reward], [eval] and [producer] sections, and the tree that `rl-producer` reads."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from buffer.config import BufferConfig
from protocol.config import DataConfig, ModelConfig, RedisConfig, RolloutConfig, RunConfig, Section, Tree
from weightsync.config import WeightsConfig

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class RewardKind(StrEnum):
    """Where a rollout's reward comes from."""

    EXACT_MATCH = "exact_match"
    """1 if the response, without surrounding white space, is the label."""
    NUMERIC_MATCH = "numeric_match"
    """1 if the last number of the response equals the label."""
    CONTAINS = "contains"
    """1 if the label occurs in the response."""
    FUNCTION = "function"
    """A custom async function."""


class GroupFilter(StrEnum):
    """Groups that a producer sets aside instead of storing."""

    NONE = "none"
    ZERO_VARIANCE = "zero_variance"
    """Groups whose rollouts all have the same reward: no group advantage, nothing to learn."""


class RewardConfig(Section):
    kind: RewardKind = Field(RewardKind.EXACT_MATCH, strict=False, description="exact_match, numeric_match, contains, or function.")
    function: str = Field("", description="With kind function: package.module:name of `async def name(sample) -> float | Reward`.")
    timeout_seconds: float = Field(30.0, gt=0, description="A custom function that takes longer counts as a failed attempt.")

    @model_validator(mode="after")
    def _function_is_named(self) -> RewardConfig:
        if self.kind is RewardKind.FUNCTION and not _DOTTED.fullmatch(self.function):
            raise ValueError(f"function is {self.function!r}: with kind function, give package.module:name of an async function")
        if self.kind is not RewardKind.FUNCTION and self.function:
            raise ValueError(f"function is {self.function!r} but kind is {self.kind}: set kind to function, or leave function out")
        return self


class EvalConfig(Section):
    path: str = Field("", description="JSONL file of held-out prompts, slice allowed as in data.path. Empty: no evaluation.")
    every_seconds: float = Field(60.0, gt=0, description="Seconds between two periodic evaluations.")
    samples: int = Field(256, ge=0, description="Rows used, from the top of the file. 0: all.")
    max_new_tokens: int = Field(0, ge=0, description="Upper bound of sampled tokens. 0: as rollout.max_new_tokens.")
    concurrency: int = Field(64, ge=1, description="Requests of an evaluation under way at once; raise it for large engines.")
    final_deadline_seconds: float = Field(30.0, gt=0, description="How long the last evaluation waits for an engine that serves the final version.")


class ProducerConfig(Section):
    count: int = Field(1, ge=0, description="Producers that `rollstream up` starts.")
    max_inflight_groups: int = Field(64, ge=1, description="Groups one producer works on at once; also what it holds while Redis is away.")
    sample_retries: int = Field(3, ge=0, description="Further attempts of one rollout, on another engine where there is one, before its group fails.")
    sample_deadline_seconds: float = Field(300.0, gt=0, description="One generation request may take this long.")
    group_deadline_seconds: float = Field(900.0, gt=0, description="All attempts and rewards of one group together; waiting for an engine does not count.")
    drain_seconds: float = Field(10.0, ge=0, description="On SIGTERM, groups under way get this long to finish; the rest are given back.")
    filter: GroupFilter = Field(GroupFilter.NONE, strict=False, description="none, or zero_variance: drop groups whose rewards are all equal.")

    @model_validator(mode="after")
    def _deadlines_nest(self) -> ProducerConfig:
        if self.sample_deadline_seconds > self.group_deadline_seconds:
            raise ValueError(
                f"sample_deadline_seconds {self.sample_deadline_seconds:g} exceeds group_deadline_seconds {self.group_deadline_seconds:g}: "
                "lower the first or raise the second"
            )
        return self


class ProducerDaemonConfig(Tree):
    """What `rl-producer` reads. The settings of the buffer come from the run itself, in Redis."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    producer: ProducerConfig = ProducerConfig()


class RolloutOnlyConfig(ProducerDaemonConfig):
    """What `rl-producer --rollout-only` reads: there is no trainer whose run it joins, so the run's own settings too."""

    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()

    @property
    def model_folder(self) -> Path:
        return Path(self.model.path).absolute()
