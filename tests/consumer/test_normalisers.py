"""The step's loss is the same number however the step is cut into chunks, micro-batches and ranks, for every normaliser and advantage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from buffer.contract import ChunkRecord, StepRecord
from buffer.shares import Share
from consumer.advantages import ADVANTAGES, Advantage, needs_whole_step
from consumer.batch import ChunkBatch, collate, collate_step, micro_batches, step_divisor
from consumer.losses.config import Normaliser
from consumer.micro_batches import LossTokens
from consumer.normalisers import normalise
from consumer.packing import packed_batches
from protocol.messages import GroupHeader, RolloutGroup
from tests.consumer.test_batch import random_group

NORMALISERS: tuple[Normaliser, ...] = get_args(Normaliser)
MAX_NEW_TOKENS = 9
Leased = tuple[ChunkRecord, list[tuple[GroupHeader, RolloutGroup]]]


@pytest.fixture
def record(make_record: Callable[..., StepRecord]) -> StepRecord:
    return make_record(step=6, bound=3)


@pytest.fixture
def groups(header_of: Callable[..., GroupHeader]) -> list[tuple[GroupHeader, RolloutGroup]]:
    return [random_group(seq, header_of, size=(4, 1, 4, 2, 3)[seq % 5]) for seq in range(24)]


def cut(record: StepRecord, groups: Sequence[tuple[GroupHeader, RolloutGroup]], size: int) -> list[Leased]:
    parts = [groups[i : i + size] for i in range(0, len(groups), size)]
    last = len(parts) - 1
    return [
        (ChunkRecord(step=6, chunk=i, revision=0, headers=tuple(header for header, _ in part), last=i == last, record=record), list(part))
        for i, part in enumerate(parts)
    ]


def loss_of(age: Any, behaviour: Any, advantage: Any) -> Any:
    """Anything that differs from token to token."""
    return advantage * np.exp(np.float64(behaviour)) * (1 + age)


def step_loss(batches: Sequence[ChunkBatch], layout: Callable[[ChunkBatch], Iterator[LossTokens]]) -> float:
    total = sum(
        float((part.weight.astype(np.float64) * loss_of(part.age, part.behaviour, part.advantage.astype(np.float64))).sum())
        for batch in batches
        for part in layout(batch)
    )
    return total / step_divisor(batches)


def by_loops(record: StepRecord, groups: Sequence[tuple[GroupHeader, RolloutGroup]], advantage: Advantage, normaliser: Normaliser) -> float:
    """The normaliser's definition."""
    sizes = [len(group.rollouts) for _, group in groups]
    rollouts = [rollout for _, group in groups for rollout in group.rollouts]
    values = advantage(np.array([rollout.reward for rollout in rollouts]), np.cumsum([0, *sizes])).tolist()
    terms = []
    for rollout, value in zip(rollouts, values, strict=True):
        inside = [
            loss_of(record.step - 1 - span.version.n, rollout.logprobs[t], value)
            for span in rollout.spans
            for t in range(span.start, span.end)
            if rollout.mask[t] and span.version.n >= record.cutoff
        ]
        terms.append(inside)
    if normaliser == "token_mean":
        return float(np.mean([one for inside in terms for one in inside]))
    if normaliser == "rollout_mean":
        return float(np.mean([np.mean(inside) for inside in terms if inside]))
    return sum(sum(inside) for inside in terms) / (len(rollouts) * MAX_NEW_TOKENS)


LAYOUTS: dict[str, Callable[[ChunkBatch], Any]] = {
    "plain": lambda batch: micro_batches(batch, max_tokens=30, share_prompts=False),
    "shared": lambda batch: micro_batches(batch, max_tokens=1000, share_prompts=True),
    "packed": lambda batch: packed_batches(batch, max_tokens=25, quadratic=0.1, at_least=2),
}


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_where_a_step_is_cut_does_not_change_its_loss(record: StepRecord, groups: list[Any], name: str, normaliser: Normaliser):
    advantage = ADVANTAGES[name]
    expected = by_loops(record, groups, advantage, normaliser)
    assert abs(expected) > 1e-4
    for size in (1, 5, 24):
        chunks = cut(record, groups, size)
        together = [chunks] if needs_whole_step(advantage) else [[chunk] for chunk in chunks]
        batches = [batch for part in together for batch in collate_step(part, advantage, normaliser=normaliser, max_new_tokens=MAX_NEW_TOKENS)]
        for layout in LAYOUTS.values():
            assert step_loss(batches, layout) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_ranks_have_the_advantages_of_one_to_the_bit_and_add_up(record: StepRecord, groups: list[Any], name: str, normaliser: Normaliser):
    chunks = cut(record, groups, 8)
    options: dict[str, Any] = {"normaliser": normaliser, "max_new_tokens": MAX_NEW_TOKENS}
    alone = collate_step(chunks, ADVANTAGES[name], **options)
    expected = {seq: one.advantage.tobytes() for batch in alone for seq, one in zip(batch.seqs, batch.groups, strict=True)}
    found, divisor, loss = dict[int, bytes](), 0.0, 0.0
    for rank in range(3):
        mine = list[Leased]()
        for chunk, part in chunks:
            own = {header.seq for header in Share(rank, 3).of(chunk.headers)}
            mine.append((chunk, [(header, group) for header, group in part if header.seq in own]))
        batches = collate_step(mine, ADVANTAGES[name], **options)
        found |= {seq: one.advantage.tobytes() for batch in batches for seq, one in zip(batch.seqs, batch.groups, strict=True)}
        divisor += sum(batch.divisor for batch in batches)
        loss += step_loss(batches, LAYOUTS["packed"]) * step_divisor(batches)
    assert found == expected
    assert divisor == step_divisor(alone)
    assert loss / divisor == pytest.approx(step_loss(alone, LAYOUTS["plain"]), rel=1e-5)


def test_chunks_collated_one_by_one_or_as_a_step_are_the_same_where_groups_do_not_mix(record: StepRecord, groups: list[Any]):
    chunks = cut(record, groups, 7)
    for name, advantage in ADVANTAGES.items():
        if not needs_whole_step(advantage):
            for (chunk, part), batch in zip(chunks, collate_step(chunks, advantage), strict=True):
                alone = collate(chunk.record, part, advantage)
                assert [one.advantage.tobytes() for one in alone.groups] == [one.advantage.tobytes() for one in batch.groups], name
                assert (alone.seqs, alone.tokens, alone.divisor) == (batch.seqs, batch.tokens, batch.divisor)


def test_the_constant_counts_rollouts_that_the_guard_took_out_but_no_step_without_tokens(record: StepRecord, groups: list[Any]):
    none_left = dataclasses.replace(record, cutoff=record.step)
    batch = collate(none_left, groups, ADVANTAGES["group_std"], normaliser="constant", max_new_tokens=MAX_NEW_TOKENS)
    assert batch.tokens == 0
    assert batch.divisor == len(batch.rewards) * MAX_NEW_TOKENS > 0
    assert step_divisor([batch]) == 0
    other = collate(record, groups, ADVANTAGES["group_std"], normaliser="constant", max_new_tokens=MAX_NEW_TOKENS)
    assert step_divisor([batch, other]) == 2 * other.divisor


def test_a_step_of_nothing_divides_by_nothing():
    for normaliser in NORMALISERS:
        weights, divisor = normalise(np.zeros(0, dtype=np.int64), normaliser, max_new_tokens=4)
        assert divisor == 0
        assert weights is None or len(weights) == 0
    assert step_divisor([]) == 0


def test_a_constant_that_nobody_gave_is_refused():
    with pytest.raises(ValueError, match=r"max_new_tokens 0.*rollout\.max_new_tokens"):
        normalise(np.array([3]), "constant", max_new_tokens=0)
