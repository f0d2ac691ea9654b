"""What a rollout earns: built-in verifiers, or a custom async function by dotted path.

    # grading.py, with reward.kind = "function" and reward.function = "grading:length"
    async def length(sample: RewardSample) -> float:
        return min(1.0, len(sample.response) / 100)

A function that raises, takes too long or answers something that is no finite number has failed for that sample; the producer asks again, up to
`producer.sample_retries`, always with the same response: sampling again until the grader is content would bias the policy.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, cast

import numpy as np

from producer.config import RewardConfig, RewardKind
from producer.template import Prompt
from protocol.arrays import DTYPES, Array, IntArray
from protocol.dotted import load_dotted
from protocol.errors import ConfigError, SampleFailed
from protocol.messages import JsonValue

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardSample:
    """What a reward may look at."""

    prompt: Prompt
    """As in the data set: text or chat messages."""
    response: str
    """Without special tokens."""
    response_ids: IntArray
    """[N] int32, as sampled."""
    label: JsonValue
    finish_reason: str
    """stop or length"""
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and, where it is partial, whether the answer is right; None: right from 1.0 on."""

    value: float
    exact: bool | None = None
    extras: Mapping[str, Array] = field(default_factory=dict, compare=False)
    """Arrays that go to the trainer with this rollout, such as scores by token: `RolloutGroup.extras` has each as "name/i", i the rollout's place."""

    @property
    def is_exact(self) -> bool:
        return self.value >= 1.0 if self.exact is None else self.exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """`await score(sample)` and what the data set must hold for it."""

    score: Callable[[RewardSample], Awaitable[Reward]]
    """Raises: `SampleFailed` when there is no reward for this sample now."""
    label_fault: Callable[[JsonValue], str]
    """What is wrong with a row's label; "": nothing."""


def make_grader(config: RewardConfig) -> Grader:
    """The reward that [reward] asks for. Raises: `ConfigError` naming `reward.function` if it cannot be used."""
    if config.kind is RewardKind.FUNCTION:
        return Grader(score=_guarded(load_function(config.function), config), label_fault=lambda _: "")
    verify, fault = {
        RewardKind.EXACT_MATCH: (exact_match, _text_fault),
        RewardKind.CONTAINS: (contains, _text_fault),
        RewardKind.NUMERIC_MATCH: (numeric_match, _number_fault),
    }[config.kind]

    async def score(sample: RewardSample) -> Reward:
        return Reward(1.0 if verify(sample.response, sample.label) else 0.0)

    def label_fault(label: JsonValue) -> str:
        return f"{what}, and reward.kind {config.kind} needs it" if (what := fault(label)) else ""

    return Grader(score=score, label_fault=label_fault)


# -- verifiers ---------------------------------------------------------------------------------------------------------------------------------


def exact_match(response: str, label: JsonValue) -> bool:
    """Equal without surrounding white space."""
    return response.strip() == _text(label).strip()


def contains(response: str, label: JsonValue) -> bool:
    return _text(label).strip() in response


def numeric_match(response: str, label: JsonValue) -> bool:
    """The last number of the response equals the last one of the label: 1,234 is 1234.0; a label may be a worked solution."""
    answer = last_number(response)
    return answer is not None and answer == last_number(_text(label))


def last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def _text(label: JsonValue) -> str:
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def _text_fault(label: JsonValue) -> str:
    if label is None:
        return "is missing"
    return "" if isinstance(label, str | int | float) and _text(label).strip() else "is not text or a number"


def _number_fault(label: JsonValue) -> str:
    return _text_fault(label) or ("" if last_number(_text(label)) is not None else "holds no number")


# -- custom functions --------------------------------------------------------------------------------------------------------------------------


def load_function(dotted: str) -> Callable[[RewardSample], Awaitable[Any]]:
    """The async function at `package.module:name`; modules of the working directory are found too.

    Raises: `ConfigError` naming `reward.function`.
    """
    name = dotted.partition(":")[2]
    function = load_dotted("reward.function", dotted, define=f"async def {name}(sample)")
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))):  # noqa: B004 - its kind, not whether
        raise ConfigError(f"reward.function {dotted}: is not async; write `async def {name}(sample)`")
    found: Callable[[RewardSample], Awaitable[Any]] = function
    return found


def _guarded(function: Callable[[RewardSample], Awaitable[Any]], config: RewardConfig) -> Callable[[RewardSample], Awaitable[Reward]]:
    async def score(sample: RewardSample) -> Reward:
        try:
            async with asyncio.timeout(config.timeout_seconds):
                answer = await function(sample)
        except TimeoutError as problem:
            raise SampleFailed(f"reward.function {config.function} gave no answer in {config.timeout_seconds:g} s") from problem
        except Exception as problem:
            raise SampleFailed(f"reward.function {config.function} raised {type(problem).__name__}: {problem}") from problem
        return _checked(answer, config.function)

    return score


def _checked(answer: object, function: str) -> Reward:
    """What a custom function answered, as a reward. Raises: `SampleFailed` for anything that is none, however odd."""
    value, exact, extras = (answer.value, answer.exact, answer.extras) if isinstance(answer, Reward) else (answer, None, {})
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number):
        what = f"a {type(value).__name__} beyond every float" if isinstance(value, int) and not isinstance(value, bool) else f"{value!r:.60}"
        raise SampleFailed(f"reward.function {function} answered {what}, expected a finite number or a Reward")
    if not (exact is None or isinstance(exact, bool)):
        raise SampleFailed(f"reward.function {function} answered a Reward whose exact is {exact!r:.60}, expected true, false or nothing")
    return Reward(number, exact, _checked_extras(extras, function))


def _checked_extras(extras: Any, function: str) -> Mapping[str, Array]:
    for name, array in extras.items() if isinstance(extras, Mapping) else [(extras, None)]:
        if not (isinstance(name, str) and isinstance(array, np.ndarray) and array.dtype.newbyteorder("<").str in DTYPES):
            raise SampleFailed(f"reward.function {function} answered the extra {name!r:.60}, expected an array of one of {sorted(DTYPES)} under a name")
    return cast("Mapping[str, Array]", extras)
