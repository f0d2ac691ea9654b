"""Advantages of ragged groups against an independent computation in Python floats."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.advantages import (
    ADVANTAGES,
    STD_FLOOR,
    Advantage,
    Rewards,
    Starts,
    find_advantage,
    gae,
    group_mean,
    group_std,
    moments,
    needs_whole_step,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    whiten,
)
from protocol.errors import ConfigError

Groups = Sequence[Sequence[float]]
BY_GROUP = ["group_mean", "group_std", "rloo"]
OWN_MODULE = """
from consumer.advantages import whole_step

def ranked(rewards, starts):
    return rewards.argsort().argsort().astype("float32")

@whole_step
def centred(rewards, starts):
    return (rewards - rewards.mean()).astype("float32")
"""


def ragged(groups: Groups) -> tuple[Rewards, Starts]:
    flat = [reward for group in groups for reward in group]
    return np.array(flat, dtype=np.float64), np.cumsum([0, *(len(group) for group in groups)])


def random_groups(*, seed: int = 3, count: int = 50, sizes: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 8, 16)) -> list[list[float]]:
    """With groups that lost all siblings, or all but one, and with equal rewards in some."""
    rng = random.Random(seed)
    spread = [rng.choice((0.0, 0.01)) for _ in range(count)]
    return [[rng.choice((0.0, 0.25, 0.5, 1.0)) * (wide > 0) + rng.random() * wide for _ in range(rng.choice(sizes))] for wide in spread]


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def of_group_mean(groups: Groups) -> list[float]:
    return [reward - statistics.fmean(group) for group in groups for reward in group]


def of_group_std(groups: Groups) -> list[float]:
    return [(reward - statistics.fmean(group)) / (deviation(group) + STD_FLOOR) for group in groups for reward in group]


def of_rloo(groups: Groups) -> list[float]:
    return [
        reward - statistics.fmean([*group[:i], *group[i + 1 :]]) if len(group) > 1 else 0.0  # the others, one by one
        for group in groups
        for i, reward in enumerate(group)
    ]


def of_reinforce_pp(groups: Groups) -> list[float]:
    flat = [reward for group in groups for reward in group]
    return [(reward - statistics.fmean(flat)) / (deviation(flat) + STD_FLOOR) for reward in flat]


def of_baseline(groups: Groups) -> list[float]:
    return of_reinforce_pp([of_group_mean(groups)])


def of_none(groups: Groups) -> list[float]:
    return [reward for group in groups for reward in group]


REFERENCES: dict[str, Callable[[Groups], list[float]]] = {
    "group_mean": of_group_mean,
    "group_std": of_group_std,
    "rloo": of_rloo,
    "reinforce_pp": of_reinforce_pp,
    "reinforce_pp_baseline": of_baseline,
    "reinforce_pp_tokens": of_none,  # by token elsewhere
    "gae": of_none,
    "none": of_none,
}


def test_every_advantage_has_a_reference():
    assert REFERENCES.keys() == ADVANTAGES.keys()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("groups", [random_groups(), random_groups(seed=4, sizes=(8,)), [[]], [], [[0.5]], [[0.2, 0.7]], [[1.0, 1.0], [], [0.0]]])
def test_an_advantage_equals_its_formula(name: str, groups: list[list[float]]):
    result = ADVANTAGES[name](*ragged(groups))
    assert result.dtype == np.float32
    assert result.tolist() == pytest.approx(REFERENCES[name](groups) if result.size else [], abs=2e-6)


def as_matrix_mean(rewards: Rewards) -> Rewards:
    equal = rewards.max(1, keepdims=True) == rewards.min(1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(1, keepdims=True))


def as_matrix_std(rewards: Rewards) -> Rewards:
    centred = as_matrix_mean(rewards)
    return centred / (np.sqrt(np.square(centred).sum(1, keepdims=True) / (rewards.shape[1] - 1)) + STD_FLOOR)


@pytest.mark.parametrize("size", [2, 7, 8, 9, 16, 130])
def test_groups_of_one_size_are_computed_as_one_matrix_to_the_bit(size: int):
    """Recorded runs of equal groups replay to the same weights."""
    matrix = np.random.default_rng(size).random((40, size))
    matrix[3] = 0.7
    starts = np.arange(41) * size
    assert group_mean(matrix.reshape(-1), starts).tobytes() == as_matrix_mean(matrix).astype(np.float32).tobytes()
    assert group_std(matrix.reshape(-1), starts).tobytes() == as_matrix_std(matrix).astype(np.float32).tobytes()


@pytest.mark.parametrize("name", [*BY_GROUP, "reinforce_pp_baseline"])
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.0] * 8, [1e30] * 4, [0.7], [-1e-9] * 7])
def test_equal_rewards_and_single_rollouts_have_exactly_no_advantage(name: str, rewards: list[float]):
    """Whatever stands beside them."""
    beside = [0.0, 0.3, 1.0]
    assert ADVANTAGES[name](*ragged([rewards])).tolist() == [0.0] * len(rewards)
    assert ADVANTAGES[name](*ragged([beside, rewards, beside]))[3:-3].tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("rewards", [[[0.1] * 3, [0.1] * 4], [[1e30] * 7], [[0.3]], [[0.1 + 0.2, 0.3]]])
def test_a_step_of_equal_rewards_has_exactly_no_advantage(rewards: Groups):
    assert not reinforce_pp(*ragged(rewards)).any()


@pytest.mark.parametrize("name", BY_GROUP)
def test_groups_do_not_mix(name: str):
    groups = random_groups()
    rewards, starts = ragged(groups)
    whole = ADVANTAGES[name](rewards, starts)
    apart = [ADVANTAGES[name](*ragged([group])) for group in groups]
    assert whole.tobytes() == np.concatenate(apart).tobytes()
    assert not needs_whole_step(ADVANTAGES[name])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_order_of_groups_does_not_matter(name: str):
    groups = random_groups(count=20)
    order = list(range(20))
    random.Random(1).shuffle(order)
    found = dict(zip(order, np.split(*_cuts(name, [groups[i] for i in order])), strict=True))
    for i, expected in enumerate(np.split(*_cuts(name, groups))):
        np.testing.assert_allclose(found[i], expected, rtol=1e-6, atol=1e-7)


def _cuts(name: str, groups: Groups) -> tuple[np.ndarray, list[int]]:
    rewards, starts = ragged(groups)
    return ADVANTAGES[name](rewards, starts), starts[1:-1].tolist()


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_nearly_equal_and_huge_rewards_stay_finite(name: str):
    for groups in ([[1.0, 1.0 + 1e-12, 1.0]], [[1e18, -1e18, 0.0], [1e30, 0.0]], [[1e-300, 0.0]], [[1e30, 1.0, -1.0]]):
        assert np.isfinite(ADVANTAGES[name](*ragged(groups))).all()


def test_leave_one_out_goes_by_the_siblings_that_are_there():
    assert rloo(*ragged([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0]])).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 1, -1])


def test_equal_siblings_do_not_lower_those_of_other_groups_on_average():
    """What is centred by group is not centred again."""
    result = reinforce_pp_baseline(*ragged([[1.0, 0.0], [1.0, 1.0], [0.0]]))
    assert result[2:].tolist() == [0, 0, 0]
    assert result[0] == -result[1] > 0


@given(
    values=st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=2, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_whitening_does_not_depend_on_the_ranks(values: list[float], cuts: list[int]):
    whole = np.array(values)
    shares = np.split(whole, sorted(min(cut, len(values)) for cut in cuts))
    total = np.sum([moments(share) for share in shares], axis=0)
    found = np.concatenate([whiten(share, total) for share in shares])
    if statistics.pstdev(values) > 1e-5 * max(map(abs, values)):
        mean, std = statistics.fmean(values), statistics.stdev(values)
        assert found.tolist() == pytest.approx([(value - mean) / (std + STD_FLOOR) for value in values], rel=1e-4, abs=1e-6)
    elif len(set(values)) == 1:
        assert not found.any()


def test_whitening_of_nothing_is_nothing():
    nothing = np.zeros(0)
    assert whiten(nothing, moments(nothing)).shape == (0,)
    assert whiten(nothing, moments(nothing), centre=False).shape == (0,)


# -- with a critic -----------------------------------------------------------------------------------------------------------------------------------


def by_recursion(rewards: Sequence[float], values: Sequence[Sequence[float]], gamma: float, lam: float) -> list[float]:
    found: list[float] = []
    for reward, row in zip(rewards, values, strict=True):
        following, carried, turned = 0.0, 0.0, []
        for t in reversed(range(len(row))):
            delta = (reward if t == len(row) - 1 else 0.0) + gamma * following - row[t]
            carried = delta + gamma * lam * carried
            following = row[t]
            turned.append(carried)
        found += reversed(turned)
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0), (0.0, 0.5), (0.5, 0.5)])
@pytest.mark.parametrize("lengths", [[0], [], [1], [128], [129, 0, 127], [5, 300, 1, 0, 128, 257, 2]])
def test_generalised_advantages_equal_the_recursion(gamma: float, lam: float, lengths: list[int]):
    rng = random.Random(5)
    rewards = [rng.gauss(0, 1) for _ in lengths]
    values = [[rng.gauss(0, 1) for _ in range(length)] for length in lengths]
    flat, starts = np.array([value for row in values for value in row]), np.cumsum([0, *lengths])
    advantages, returns = gae(np.array(rewards), flat, starts, gamma=gamma, lam=lam)
    assert advantages.tolist() == pytest.approx(by_recursion(rewards, values, gamma, lam), rel=1e-9, abs=1e-9)
    np.testing.assert_array_equal(returns, advantages + flat)


def test_without_discount_every_return_is_the_reward():
    """Monte Carlo, whatever the critic says."""
    starts = np.array([0, 400, 403])
    _, returns = gae(np.array([2.0, -1.0]), np.random.default_rng(0).normal(size=403), starts)
    np.testing.assert_allclose(returns, np.repeat([2.0, -1.0], [400, 3]), atol=1e-10)


def test_a_critic_that_knows_the_reward_leaves_no_advantage():
    advantages, _ = gae(np.array([1.0, 0.25]), np.repeat([1.0, 0.25], [200, 9]), np.array([0, 200, 209]), lam=0.9)
    np.testing.assert_allclose(advantages, 0, atol=1e-12)


# -- names -------------------------------------------------------------------------------------------------------------------------------------------


def test_an_advantage_of_ones_own_is_found_by_its_dotted_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_advantages.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    ranked, centred = find_advantage("own_advantages:ranked"), find_advantage("own_advantages:centred")
    assert ranked(*ragged([[0.5, 0.1], [0.9]])).tolist() == [1, 0, 2]
    assert (needs_whole_step(ranked), needs_whole_step(centred)) == (False, True)
    assert [name for name in ADVANTAGES if needs_whole_step(find_advantage(name))] == ["reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", ["own_nowhere:f", "math:no_such"])
def test_a_name_that_is_nothing_names_the_key(name: str):
    with pytest.raises(ConfigError, match=r"trainer\.advantage"):
        find_advantage(name)


def test_groups_are_cut_where_starts_say():
    """Not by the first group's size."""
    advantage: Advantage = group_mean
    sizes = [3, 1, 4]
    rewards = np.arange(8, dtype=np.float64)
    result = advantage(rewards, np.cumsum([0, *sizes]))
    assert [math.fsum(result[low:high].tolist()) for low, high in itertools.pairwise([0, 3, 4, 8])] == [0, 0, 0]
