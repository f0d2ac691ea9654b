"""Packing: every rollout once and whole, the bound kept, work balanced, and the same numbers as rows of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from buffer.contract import StepRecord
from consumer.advantages import group_mean
from consumer.batch import ChunkBatch, collate, micro_batches
from consumer.packing import PackedBatch, attention_cost, empty_packed_batch, packed_batches, partition
from protocol.messages import GroupHeader
from tests.consumer.test_batch import check_rollouts, random_group

Record = Callable[..., StepRecord]


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    quadratic=st.sampled_from([0.0, 0.01, 1.0]),
    max_tokens=st.integers(1, 60),
    at_least=st.integers(0, 12),
)
def test_every_rollout_is_in_one_part_within_the_bound(lengths: list[int], quadratic: float, max_tokens: int, at_least: int):
    costs = [length + quadratic * length * length for length in lengths]
    parts = partition(lengths, costs, max_tokens=max_tokens, at_least=at_least)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) <= 1 or sum(lengths[i] for i in part) <= max_tokens
    assert len(parts) >= max(at_least, -(-sum(min(length, max_tokens) for length in lengths) // max_tokens))
    assert sum(not part for part in parts) == max(0, len(parts) - len(lengths))


@given(
    lengths=st.lists(st.integers(1, 40), max_size=60),
    quadratic=st.sampled_from([0.0, 0.01, 1.0]),
    max_tokens=st.integers(1, 60),
    more=st.integers(0, 20),
)
def test_ranks_that_ask_for_the_greatest_count_get_exactly_that(lengths: list[int], quadratic: float, max_tokens: int, more: int):
    costs = [length + quadratic * length * length for length in lengths]
    needed = len(partition(lengths, costs, max_tokens=max_tokens, at_least=0))
    assert len(partition(lengths, costs, max_tokens=max_tokens, at_least=needed + more)) == needed + more


@given(lengths=st.lists(st.integers(1, 8), min_size=20, max_size=80), count=st.integers(1, 8))
def test_parts_with_room_differ_by_less_than_a_rollout(lengths: list[int], count: int):
    """In tokens; and no other assignment is better by more than that."""
    parts = partition(lengths, lengths, max_tokens=1000, at_least=count)
    sums = [sum(lengths[i] for i in part) for part in parts]
    assert len(parts) == count
    assert max(sums) - min(sums) <= max(lengths)


def test_parts_are_balanced_by_work_where_attention_costs():
    """Of equal tokens, a long rollout is worth more than short ones."""
    lengths = [1000, *[100] * 30]
    costs = [length + 0.002 * length**2 for length in lengths]
    by_tokens, by_cost = (partition(lengths, weights, max_tokens=10_000, at_least=2) for weights in (lengths, costs))
    assert {sum(lengths[i] for i in part) for part in by_tokens} == {2000}
    found = [sum(costs[i] for i in part) for part in by_cost]
    assert max(found) / min(found) < 1.05
    assert max(sum(costs[i] for i in part) for part in by_tokens) > 1.2 * max(found)


def test_a_bound_that_balance_breaks_is_kept_without_another_part():
    """Two long rollouts alone would leave the short ones over the bound: those without room elsewhere go to the long ones, one to each."""
    lengths = [80, 80, *[10] * 22]
    costs = [length + 1.0 * length**2 for length in lengths]
    parts = partition(lengths, costs, max_tokens=100)
    assert sorted(sum(lengths[i] for i in part) for part in parts) == [90, 90, 100, 100]
    assert max(sum(costs[i] for i in part) for part in parts) == costs[0] + costs[-1]


def test_what_attention_costs_is_the_share_of_its_operations():
    """By counting: 2 operations for each parameter and token, 2 * width for each pair in scores and again in values, half of the pairs seen."""
    parameters, layers, width, n = 1_000_000, 4, 128, 512
    dense, attention = 2 * parameters * n, layers * 2 * 2 * width * n * n / 2
    assert 1 + attention_cost(parameters=parameters, layers=layers, width=width) * n == pytest.approx((dense + attention) / dense)


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_tokens 0"):
        partition([1], [1], max_tokens=0)


# -- the layout --------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(make_record: Record, header_of: Callable[..., GroupHeader]) -> ChunkBatch:
    groups = [random_group(seq, header_of, size=(4, 1, 4, 2, 3)[seq % 5]) for seq in range(25)]
    return collate(make_record(step=6, bound=3), groups, group_mean, normaliser="rollout_mean")


def entries(part: Any, row: np.ndarray, column: np.ndarray, seen: Callable[[int, int], np.ndarray]) -> list[tuple[Any, ...]]:
    """What predicts each token of the loss, and all that the loss is told of it."""
    contexts = [tuple(part.input_ids[r, seen(r, c)].tolist()) for r, c in zip(row.tolist(), column.tolist(), strict=True)]
    check_rollouts(part.rollout.tolist(), [(*context, token) for context, token in zip(contexts, part.targets.tolist(), strict=True)])
    fields = (part.targets, part.behaviour, part.advantage, part.weight, part.age)
    return list(zip(contexts, *(field.tolist() for field in fields), strict=True))


def padded_entries(batch: ChunkBatch) -> list[tuple[Any, ...]]:
    found = []
    for part in micro_batches(batch, max_tokens=64, share_prompts=False):
        first, last = part.columns
        row, column = np.divmod(part.logit_index, last - first)
        found += entries(part, row, column + first, lambda _, c: np.arange(c + 1))
    return sorted(found)


@pytest.mark.parametrize("max_tokens", [1, 17, 64, 10_000])
@pytest.mark.parametrize("at_least", [1, 7])
def test_packed_and_padded_rows_give_the_same_tokens_and_predictors(batch: ChunkBatch, max_tokens: int, at_least: int):
    parts = packed_batches(batch, max_tokens=max_tokens, quadratic=0.01, at_least=at_least)
    found = []
    for part in parts:
        starts = part.cu_seqlens.tolist()
        assert (starts[0], starts[-1], part.cu_seqlens.dtype) == (0, part.input_ids.shape[1], np.int32)
        assert part.max_seqlen == max(high - low for low, high in itertools.pairwise(starts))
        assert part.input_ids.shape[1] <= max_tokens or len(starts) == 2
        assert part.position_ids[0].tolist() == [t for low, high in itertools.pairwise(starts) for t in range(high - low)]
        assert len(set(part.logit_index.tolist())) == len(part.logit_index)
        attention = part.attention
        found += entries(part, np.zeros_like(part.logit_index), part.logit_index, lambda _, c, seen=attention: np.flatnonzero(seen[0, 0, c]))  # type: ignore[misc]
        for column in part.logit_index.tolist():
            start = max(low for low in starts if low <= column)
            assert np.flatnonzero(attention[0, 0, column]).tolist() == list(range(start, column + 1))
    assert len(parts) >= at_least
    assert sorted(found) == padded_entries(batch)


def test_a_chunk_of_nothing_gives_empty_parts_that_a_model_can_run(make_record: Record):
    nothing = collate(make_record(), [], group_mean)
    parts = packed_batches(nothing, max_tokens=10, at_least=3)
    assert len(parts) == 3
    assert [(part.input_ids.shape, part.cu_seqlens.tolist(), len(part.targets)) for part in parts] == [((1, 1), [0, 1], 0)] * 3
    assert packed_batches(nothing, max_tokens=10, at_least=0) == []


def logprobs(model: Any, part: PackedBatch) -> torch.Tensor:
    logits = model(
        input_ids=torch.from_numpy(part.input_ids),
        position_ids=torch.from_numpy(part.position_ids),
        attention_mask=torch.from_numpy(part.attention),
        logits_to_keep=torch.from_numpy(part.logit_index),
        use_cache=False,
    ).logits[0]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.from_numpy(part.targets)[:, None])[:, 0]
    return found


def test_packed_rollouts_have_the_logprobs_of_rows_of_their_own(sampler: Any, model_path: Path, make_record: Record):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    batch = collate(make_record(), [sampler.headed(seq) for seq in range(5)], group_mean)
    found, expected = list[tuple[int, float]](), list[tuple[int, float]]()
    with torch.no_grad():
        for part in packed_batches(batch, max_tokens=40):
            values = logprobs(model, part)
            np.testing.assert_allclose(values.numpy(), part.behaviour, atol=2e-5)  # the sampler ran the same model
            found += zip(part.targets.tolist(), values.tolist(), strict=True)
        for group in batch.groups:
            for start, end in itertools.pairwise(group.starts.tolist()):
                ids = torch.from_numpy(group.tokens[start:end].astype(np.int64))
                alone = model(input_ids=ids[None]).logits[0].log_softmax(-1)
                inside = [t for t in group.targets.tolist() if start <= t < end]
                expected += [(int(group.tokens[t]), float(alone[t - start - 1, group.tokens[t]])) for t in inside]
        assert logprobs(model, empty_packed_batch()).shape == (0,)
    assert len(found) == batch.tokens > 40
    np.testing.assert_allclose(sorted(found), sorted(expected), atol=2e-5)
