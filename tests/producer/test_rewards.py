from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.config import RewardConfig
from producer.rewards import Grader, Reward, RewardSample, contains, exact_match, make_grader, numeric_match
from protocol.errors import ConfigError, SampleFailed


def sample(response: str, label: Any = "x") -> RewardSample:
    return RewardSample(prompt="p", response=response, response_ids=np.zeros(1, np.int32), label=label, finish_reason="stop")


def grader(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, **config: Any) -> Grader:
    """A grader whose function is `score` of a module written for this test."""
    name = f"grading_{abs(hash((str(folder), body)))}"
    (folder / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(folder))
    return make_grader(RewardConfig(kind="function", function=f"{name}:score", **config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verify", "response", "label", "right"),
    [
        (exact_match, " 1234\n", "1234", True),
        (exact_match, "12345", "1234", False),
        (exact_match, "7", 7, True),
        (contains, "it is Paris.", "Paris", True),
        (contains, "it is paris.", "Paris", False),
        (numeric_match, "So 3 + 4 makes $1,234.50.", "1234.5", True),
        (numeric_match, "7", "3+4=7 #### 7", True),
        (numeric_match, "-7", 7, False),
        (numeric_match, "1e3", 1000, True),
        (numeric_match, "no number", 1, False),
        (numeric_match, "0.1", 0.1, True),
    ],
)
def test_verifiers(verify: Any, response: str, label: Any, right: bool) -> None:
    assert verify(response, label) is right


async def test_a_built_in_verifier_gives_one_or_nothing() -> None:
    score = make_grader(RewardConfig()).score
    assert await score(sample("x")) == Reward(1.0)
    assert await score(sample("y")) == Reward(0.0)


async def test_a_function_may_answer_a_number_or_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = grader(tmp_path, monkeypatch, "async def score(sample): return len(sample.response) / 4")
    assert (await number.score(sample("12"))) == Reward(0.5)
    partial = grader(tmp_path, monkeypatch, "from producer.rewards import Reward\nasync def score(sample): return Reward(0.5, exact=True)")
    reward = await partial.score(sample("12"))
    assert (reward.value, reward.is_exact) == (0.5, True)
    assert [Reward(1.0).is_exact, Reward(0.99).is_exact] == [True, False]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("async def score(sample): raise KeyError('x')", "raised KeyError: 'x'"),
        ("import asyncio\nasync def score(sample): await asyncio.Event().wait()", r"gave no answer in 0\.05 s"),
        ("async def score(sample): return float('nan')", "answered nan, expected a finite number"),
        ("async def score(sample): return None", "answered None, expected a finite number"),
        ("async def score(sample): return True", "answered True, expected a finite number"),
        ("async def score(sample): return 10**400", "answered a int beyond every float, expected a finite number"),
        ("async def score(sample): return 10**5000", "answered a int beyond every float, expected a finite number"),
        ("from producer.rewards import Reward\nasync def score(sample): return Reward(1.0, 'yes')", "exact is 'yes', expected true, false or nothing"),
        ("from producer.rewards import Reward\nasync def score(sample): return Reward('1')", "answered '1', expected a finite number"),
        (
            "from producer.rewards import Reward\nasync def score(sample): return Reward(1.0, extras={'a': [1.0]})",
            "answered the extra 'a', expected an array of",
        ),
        ("from producer.rewards import Reward\nasync def score(sample): return Reward(1.0, extras=3)", "answered the extra 3, expected an array of"),
        ("import numpy\nfrom producer.rewards import Reward\nasync def score(sample): return Reward(1.0, extras={'a': numpy.array(['x'])})", "the extra 'a'"),
    ],
)
async def test_a_faulty_function_fails_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str) -> None:
    with pytest.raises(SampleFailed, match=expected):
        await grader(tmp_path, monkeypatch, body, timeout_seconds=0.05 if "no answer" in expected else 60.0).score(sample("1"))


async def test_cancelling_a_reward_cancels_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = grader(tmp_path, monkeypatch, "import asyncio\nasync def score(sample): await asyncio.Event().wait()")
    task = asyncio.ensure_future(waiting.score(sample("1")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def score(sample): return 1.0", "is not async; write `async def score"),
        ("other = 1", "has no score; define `async def score"),
        ("import nothing_like_this", "cannot import .*ModuleNotFoundError"),
        ("1 / 0", "cannot import .*ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^reward\.function grading_.*{expected}"):
        grader(tmp_path, monkeypatch, body)


def test_kind_and_function_must_agree() -> None:
    with pytest.raises(ValueError, match=r"with kind function, give package\.module:name"):
        RewardConfig(kind="function")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set kind to function, or leave function out"):
        RewardConfig(function="a:b")
    assert math.isclose(RewardConfig().timeout_seconds, 30.0)
