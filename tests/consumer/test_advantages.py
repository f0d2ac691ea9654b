"""Advantages against an independent computation in Python floats."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest

from consumer.advantages import ADVANTAGES, STD_FLOOR, group_mean, group_std


def random_rewards(groups: int, size: int) -> list[list[float]]:
    rng = random.Random(3)
    return [[rng.choice((0.0, 0.25, 0.5, 1.0)) + rng.random() * 0.01 for _ in range(size)] for _ in range(groups)]


def test_group_std_equals_the_formula():
    rewards = random_rewards(50, 8)
    result = group_std(np.array(rewards, dtype=np.float64)).tolist()
    for row, advantages in zip(rewards, result, strict=True):
        mean, deviation = statistics.fmean(row), statistics.stdev(row)
        assert advantages == pytest.approx([(r - mean) / (deviation + STD_FLOOR) for r in row], abs=1e-6)


def test_group_mean_equals_the_formula():
    rewards = random_rewards(50, 4)
    result = group_mean(np.array(rewards, dtype=np.float64)).tolist()
    for row, advantages in zip(rewards, result, strict=True):
        assert advantages == pytest.approx([r - statistics.fmean(row) for r in row], abs=1e-7)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.0] * 8, [1e30] * 4, [0.7], [-1e-9] * 7])
def test_equal_rewards_and_single_rollouts_have_exactly_no_advantage(name: str, rewards: list[float]):
    assert ADVANTAGES[name](np.array([rewards], dtype=np.float64)).tolist() == [[0.0] * len(rewards)]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_groups_do_not_mix(name: str):
    rewards = np.array(random_rewards(6, 5), dtype=np.float64)
    whole = ADVANTAGES[name](rewards)
    assert np.array_equal(whole, np.concatenate([ADVANTAGES[name](row[None]) for row in rewards]))
    assert whole.dtype == np.float32


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_nearly_equal_and_huge_rewards_stay_finite(name: str):
    rewards = np.array([[1.0, 1.0 + 1e-12, 1.0], [1e18, -1e18, 0.0]], dtype=np.float64)
    assert np.isfinite(ADVANTAGES[name](rewards)).all()
