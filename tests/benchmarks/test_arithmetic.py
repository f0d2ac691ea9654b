"""Arithmetic as data and reward of a run. The package it comes from is staged, but for the last test, which wants the real one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest

from benchmarks.gpu import arithmetic
from producer.config import RewardConfig
from producer.rewards import Reward, RewardSample, make_grader
from producer.source import read_rows
from protocol.config import DataConfig
from tests.benchmarks.staged import staged

REWARD = RewardConfig(kind="function", function="benchmarks.gpu.arithmetic:reward")  # type: ignore[arg-type]


@pytest.fixture
def _staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = staged()
    monkeypatch.setattr(arithmetic, "_package", lambda: module)
    arithmetic.data_set.cache_clear()
    yield
    arithmetic.data_set.cache_clear()


@pytest.fixture
def written(tmp_path: Path, _staged: None) -> arithmetic.Written:
    return arithmetic.write_rows(tmp_path, rows=60, held_out=8, seed=5)


def answer_to(row: dict[str, object], response: str, finish_reason: str = "stop") -> RewardSample:
    return RewardSample(
        prompt=row["prompt"],  # type: ignore[arg-type]
        response=response,
        response_ids=np.zeros(1, np.int32),
        label=row["label"],  # type: ignore[arg-type]
        finish_reason=finish_reason,
        metadata=row["metadata"],  # type: ignore[arg-type]
    )


def rows_of(path: Path) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_run_reads_what_is_written(written: arithmetic.Written):
    label_fault = make_grader(REWARD).label_fault
    train = read_rows("data.path", str(written.train), DataConfig(path=str(written.train)), label_fault=label_fault)
    held_out = read_rows("eval.path", str(written.held_out), DataConfig(path=str(written.held_out)), label_fault=label_fault)
    assert (len(train), len(held_out)) == (60, 8)
    assert {row.metadata["data_set"] for row in train} == set(arithmetic.LEVELS)
    assert [message["role"] for message in train[0].prompt] == ["user", "assistant"] * len(arithmetic.EXAMPLES) + ["user"]  # type: ignore[index]
    assert train[0].prompt[-1]["content"] == train[0].metadata["question"]  # type: ignore[index]


def test_no_question_is_both_trained_on_and_held_out(written: arithmetic.Written):
    train, held_out = ([row["metadata"]["question"] for row in rows_of(path)] for path in (written.train, written.held_out))  # type: ignore[index]
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)


def test_the_same_arguments_write_the_same_files(written: arithmetic.Written, tmp_path: Path):
    again = arithmetic.write_rows(tmp_path / "again", rows=60, held_out=8, seed=5)
    other = arithmetic.write_rows(tmp_path / "other", rows=60, held_out=8, seed=6)
    assert again.train.read_bytes() == written.train.read_bytes()
    assert other.train.read_bytes() != written.train.read_bytes()


async def test_the_last_number_is_the_answer_and_the_package_scores_it(written: arithmetic.Written):
    row = rows_of(written.train)[0]
    right = str(row["label"])
    grade = make_grader(REWARD).score
    assert await grade(answer_to(row, f"First 3, then 4: it is {right}.")) == Reward(1.0, exact=True)
    assert await grade(answer_to(row, f"{right} and not 99999")) == Reward(0.01, exact=False)


@pytest.mark.parametrize(("response", "finish_reason"), [("I do not know", "stop"), ("", "stop"), ("1e999999999", "stop"), ("{right}", "length")])
async def test_a_response_without_a_number_or_an_end_earns_nothing(written: arithmetic.Written, response: str, finish_reason: str):
    row = rows_of(written.train)[0]
    assert await make_grader(REWARD).score(answer_to(row, response.format(right=row["label"]), finish_reason)) == Reward(0.0, exact=False)


async def test_the_real_package_asks_and_scores_the_same_way(tmp_path: Path):
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed: this test wants the real data sets")
    arithmetic.data_set.cache_clear()
    written = arithmetic.write_rows(tmp_path, rows=40, held_out=4, seed=0)
    for row in rows_of(written.train):
        right = int(str(row["label"]))
        assert (await arithmetic.reward(answer_to(row, f"So it is {right}."))).exact
        assert not (await arithmetic.reward(answer_to(row, f"So it is {right + 1}."))).exact
