"""Both forms of the check say the same, of groups of every kind and in every company."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.arrays import IntArray, MaskArray
from protocol.errors import DecodeError
from protocol.span_checks import check_spans, spans_hold


@dataclass(frozen=True, kw_only=True)
class Group:
    lengths: list[int]
    mask: MaskArray
    spans: IntArray


def group(lengths: list[int], mask: list[int], rows: list[tuple[int, ...]]) -> Group:
    return Group(lengths=lengths, mask=np.array(mask, dtype=np.uint8), spans=np.array(rows, dtype=np.int32).reshape(-1, len(rows[0]) if rows else 5))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """Whole as a writer makes it, then perhaps changed in one place, and its spans perhaps in another order."""
    lengths, mask, rows = draw(st.lists(st.integers(0, 6), max_size=3)), list[int](), list[tuple[int, ...]]()
    for rollout, length in enumerate(lengths):
        cuts = draw(st.lists(st.integers(0, length), max_size=4, unique=True).map(sorted))
        runs = [run for run in itertools.pairwise(cuts) if draw(st.booleans())]
        rows += [(rollout, 1, 7, start, end) for start, end in runs]
        mask += [int(any(start <= t < end for start, end in runs) and draw(st.booleans())) for t in range(length)]
    rows = draw(st.permutations(rows)) if draw(st.booleans()) else rows
    if rows and draw(st.booleans()):
        at, column, by = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, 4)), draw(st.sampled_from([-9, -1, 1, 9]))
        rows[at] = tuple(value + by * (i == column) for i, value in enumerate(rows[at]))
    if mask and draw(st.booleans()):
        mask[draw(st.integers(0, len(mask) - 1))] = draw(st.sampled_from([0, 1, 2, 255]))
    return group(lengths, mask, rows)


def holds(one: Group) -> bool:
    try:
        check_spans(one)
    except DecodeError:
        return False
    return True


@given(st.lists(groups(), max_size=4))
@example([group([2, 2], [0, 1, 0, 1], [(1, 1, 7, 1, 2), (0, 1, 7, 1, 2)])])  # whole, in another order
@example([group([3], [1, 1, 1], [(0, 1, 7, 0, 3)]), group([3], [1, 0, 0], [])])  # the second is wrong where the first is right
@example([group([2], [0, 0], [(0, 1, 7, 0, 2, 9)])])  # six columns
def test_all_groups_hold_where_each_does(several: list[Group]) -> None:
    assert spans_hold(several) == all(holds(one) for one in several)


@pytest.mark.parametrize(
    "wrong",
    [
        group([4], [0, 1, 1, 1], [(0, 1, 7, 2, 4)]),
        group([4], [0, 0, 2, 1], [(0, 1, 7, 2, 4)]),
        group([4], [0, 0, 1, 1], [(1, 1, 7, 2, 4)]),
        group([4], [0, 0, 1, 1], [(0, 1, -7, 2, 4)]),
        group([4], [0, 0, 1, 1], [(0, 1, 7, 2, 5)]),
        group([4], [0, 0, 1, 1], [(0, 1, 7, 2, 2), (0, 1, 7, 2, 4)]),
        group([4], [0, 0, 1, 1], [(0, 1, 7, 3, 4), (0, 1, 7, 2, 3)]),
        group([4], [0, 0, 1, 1], [(0, 1, 7, 2, 4), (0, 1, 7, 3, 4)]),
    ],
)
def test_a_wrong_group_is_found_wherever_it_stands(wrong: Group) -> None:
    right = group([4, 4], [0, 0, 1, 1] * 2, [(0, 1, 7, 2, 4), (1, 1, 7, 2, 4)])
    assert spans_hold([right] * 3)
    assert not any(spans_hold([right] * i + [wrong] + [right] * (2 - i)) for i in range(3))


def test_many_mixed_spans_keep_their_order_within_a_rollout() -> None:
    rows = [(i % 2, 1, 7, i // 2, i // 2 + 1) for i in range(80)]
    assert spans_hold([group([40, 40], [1] * 80, rows)])
    rows[20], rows[22] = rows[22], rows[20]
    assert not spans_hold([group([40, 40], [1] * 80, rows)])
