from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from producer.order import PromptOrder

ROWS, SEEDS = st.integers(1, 300), st.integers(0, 2**63)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=SEEDS, epoch=st.integers(0, 10_000))
def test_every_epoch_visits_every_row_once(rows: int, seed: int, epoch: int) -> None:
    order = PromptOrder(rows=rows, seed=seed)
    assert sorted(order.row(seq) for seq in range(epoch * rows, (epoch + 1) * rows)) == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=SEEDS, seqs=st.lists(st.integers(0, 10**9), min_size=1, max_size=20))
def test_a_row_depends_on_nothing_but_seed_and_seq(rows: int, seed: int, seqs: list[int]) -> None:
    there, back = PromptOrder(rows=rows, seed=seed), PromptOrder(rows=rows, seed=seed)
    assert [there.row(seq) for seq in seqs] == [back.row(seq) for seq in reversed(seqs)][::-1]


def test_the_order_is_the_same_in_every_version() -> None:
    order = PromptOrder(rows=10, seed=7)
    assert [order.row(seq) for seq in range(20)] == PINNED


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(PromptOrder(rows=50, seed=seed).row(epoch * 50 + i) for i in range(50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


PINNED = [3, 7, 1, 6, 4, 0, 9, 5, 8, 2, 2, 9, 1, 5, 3, 6, 0, 7, 4, 8]
