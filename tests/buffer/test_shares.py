from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.config import BufferConfig
from buffer.shares import Share, check_enough, enough_for, split
from protocol.errors import ConfigError

WEIGHTS = st.lists(st.integers(0, 40_000), max_size=40)


@given(WEIGHTS, st.integers(1, 9))
def test_every_group_goes_to_exactly_one_rank_in_the_chunk_s_order(weights: list[int], ranks: int) -> None:
    parts = split(weights, ranks)
    assert len(parts) == ranks
    assert sorted(at for part in parts for at in part) == list(range(len(weights)))
    assert all(list(part) == sorted(part) for part in parts)


@given(WEIGHTS, st.integers(1, 9))
def test_no_rank_idles_where_there_is_a_group_for_each(weights: list[int], ranks: int) -> None:
    if len(weights) >= ranks:
        assert all(split(weights, ranks))


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=40), st.integers(1, 9))
def test_the_heaviest_rank_exceeds_the_mean_by_less_than_the_heaviest_group(weights: list[int], ranks: int) -> None:
    heaviest = max(sum(weights[at] for at in part) for part in split(weights, ranks))
    assert heaviest <= sum(weights) / ranks + max(weights)


def test_log_normal_lengths_are_balanced_within_a_few_percent() -> None:
    weights = [int(2000 * 2.718 ** ((i * 37 % 64 - 32) / 24)) for i in range(64)]
    loads = [sum(weights[at] for at in part) for part in split(weights, 8)]
    assert max(loads) <= 1.03 * sum(weights) / 8


def test_a_chunk_of_nobody_s_size_has_a_group_for_each_rank() -> None:
    assert enough_for(BufferConfig(groups_per_step=64), 16).chunk == 16
    assert enough_for(BufferConfig(groups_per_step=64), 4).chunk == 8
    assert enough_for(BufferConfig(groups_per_step=64, chunk_groups=2), 4).chunk == 2
    assert enough_for(BufferConfig(groups_per_step=4), 16).chunk == 4


@pytest.mark.parametrize(
    ("settings", "made", "todo"),
    [
        (BufferConfig(groups_per_step=64, chunk_groups=8), False, "8 would stay idle; set buffer.chunk_groups = 16 or more"),
        (BufferConfig(groups_per_step=4, chunk_groups=4), False, "12 would stay idle; set buffer.groups_per_step to 16 or more, or start at most 4"),
        (BufferConfig(groups_per_step=64), True, "start at most 8, or make another run with buffer.chunk_groups = 16"),
    ],
)
def test_ranks_that_would_never_have_a_group_are_refused(settings: BufferConfig, made: bool, todo: str) -> None:
    check_enough(settings, settings.chunk, made=made)
    with pytest.raises(ConfigError, match=todo):
        check_enough(settings, 16, made=made)


def test_one_rank_takes_all() -> None:
    assert split([5, 0, 3], 1) == ((0, 1, 2),)


def test_a_giant_leaves_the_others_their_group() -> None:
    parts = split([1_000_000, 1, 1], 3)
    assert sorted(parts) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_is_none_of_them_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="expected 0 to"):
        Share(rank, ranks)
