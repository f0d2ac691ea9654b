"""The [reward], [eval] and [producer] sections, and the tree that `rl-producer` reads."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from pydantic import Field, model_validator

from buffer.config import BufferConfig
from producer.teacher.config import TeacherConfig
from protocol.config import DataConfig, ModelConfig, RedisConfig, RolloutConfig, RunConfig, Section, Tree
from weightsync.config import WeightsConfig

_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SET_NAME = re.compile(r"[A-Za-z0-9._-]{1,40}")
MAIN_SET = "main"
"""Of eval.path."""
_LEAST_STOP_S, _GIVE_BACK_S = 20.0, 10.0


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
    path: str = Field("", description="JSONL file of held-out prompts, slice allowed as in data.path; its set is called main. Empty: none but those of sets.")
    sets: dict[str, str] = Field(
        default_factory=dict, description='More held-out files, each with a name of its own: {math = "math.jsonl", code = "code.jsonl"}.'
    )
    every_seconds: float = Field(60.0, gt=0, description="Seconds between two periodic evaluations.")
    samples: int = Field(256, ge=0, description="Rows used of each set, from the top of the file. 0: all.")
    max_new_tokens: int = Field(0, ge=0, description="Upper bound of sampled tokens. 0: as rollout.max_new_tokens.")
    concurrency: int = Field(64, ge=1, description="Requests of an evaluation under way at once; raise it for large engines.")
    engines: int = Field(
        0, ge=0, description="Engines of the evaluation's own, beyond engine.count: they stay on one version while it runs. 0: those of the run."
    )
    deadline_seconds: float = Field(900.0, gt=0, description="With engines of its own: one that takes longer is given up; the next is of a newer version.")
    final_deadline_seconds: float = Field(30.0, gt=0, description="How long the last evaluation waits for an engine that serves the final version.")

    @model_validator(mode="after")
    def _sets_are_named(self) -> EvalConfig:
        for name, path in self.sets.items():
            if not _SET_NAME.fullmatch(name):
                raise ValueError(f"the name {name!r} of a set: use 1 to 40 letters, digits, '.', '_' or '-'")
            if name == MAIN_SET and self.path:
                raise ValueError(f"eval.path is the set {MAIN_SET!r} already: give the one in eval.sets another name, or leave eval.path out")
            if not path:
                raise ValueError(f"the set {name!r} has no file: give the path of a JSONL file")
        return self

    @property
    def files(self) -> dict[str, str]:
        """File and slice of every set by its name; the first one is what the figures of a run mean by held-out."""
        return ({MAIN_SET: self.path} if self.path else {}) | self.sets

    def key(self, name: str) -> str:
        """The key of the configuration that names the file of a set, for messages."""
        return "eval.path" if name == MAIN_SET and self.path else f"eval.sets.{name}"


class ProducerConfig(Section):
    count: int = Field(1, ge=0, description="Producers that `rollstream up` starts.")
    max_inflight_groups: int = Field(64, ge=1, description="Groups one producer works on at once; also what it holds while Redis is away.")
    sample_retries: int = Field(3, ge=0, description="Further attempts of one rollout, on another engine where there is one, before its group fails.")
    sample_deadline_seconds: float = Field(300.0, gt=0, description="One generation request may take this long.")
    stream: bool = Field(True, description="Engines send what they write as they write it; when one dies, others go on from there. False: whole responses.")
    progress_seconds: float = Field(30.0, gt=0, description="An engine that generates nothing for so long, and is not paused for an update, is given up.")
    router_url: str = Field("", description="A SGLang router for requests; run it with --disable-retries: hosts put their engines behind it. Empty: none.")
    group_deadline_seconds: float = Field(900.0, gt=0, description="All attempts and rewards of one group together; waiting for an engine does not count.")
    drain_seconds: float = Field(10.0, ge=0, description="On SIGTERM, groups under way get this long to finish; the rest are given back.")
    filter: GroupFilter = Field(GroupFilter.NONE, strict=False, description="none, or zero_variance: drop groups whose rewards are all equal.")

    @model_validator(mode="after")
    def _router_is_a_url(self) -> ProducerConfig:
        if self.router_url and not _URL.fullmatch(self.router_url):
            raise ValueError(f"router_url is {self.router_url!r}: give http://host:port")
        return self

    @model_validator(mode="after")
    def _deadlines_nest(self) -> ProducerConfig:
        if self.sample_deadline_seconds > self.group_deadline_seconds:
            raise ValueError(
                f"sample_deadline_seconds {self.sample_deadline_seconds:g} exceeds group_deadline_seconds {self.group_deadline_seconds:g}: "
                "lower the first or raise the second"
            )
        return self


def stop_seconds(producer: ProducerConfig) -> float:
    """What a producer may take from SIGTERM to its exit: its groups under way, then giving the rest back. Who stops it must not kill it sooner."""
    return max(_LEAST_STOP_S, producer.drain_seconds + _GIVE_BACK_S)


class ProducerDaemonConfig(Tree):
    """What `rl-producer` reads. The settings of the buffer come from the run itself, in Redis."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    teacher: TeacherConfig = TeacherConfig()
    eval: EvalConfig = EvalConfig()
    producer: ProducerConfig = ProducerConfig()


class RolloutOnlyConfig(ProducerDaemonConfig):
    """What `rl-producer --rollout-only` reads: there is no trainer whose run it joins, so the run's own settings too."""

    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()

    @property
    def model_folder(self) -> Path:
        return Path(self.model.path).absolute()
