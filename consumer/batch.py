"""From leased groups to a chunk that a backend trains on: the loss mask after the staleness guard, advantages, weights, and what is to be told of it.

Invariant: everything here is a pure function of the journalled record and the payloads, so a replay computes the same numbers bit by bit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from buffer.bias import length_bucket
from buffer.contract import ChunkRecord, StepRecord
from consumer.advantages import Advantage, Advantages
from consumer.losses.config import Normaliser
from consumer.micro_batches import SHARED_ROW_LIMIT, LossTokens, MicroBatch, empty_micro_batch, micro_batches
from consumer.normalisers import normalise
from consumer.siblings import Counts, IndexArray, Siblings, Spans, judge_spans, lay, sums
from consumer.teacher import with_teacher
from protocol.arrays import FloatArray
from protocol.errors import RollstreamError
from protocol.groups import Columns, columns
from protocol.messages import GroupHeader, RolloutGroup, Seq

__all__ = [
    "SHARED_ROW_LIMIT",
    "ChunkBatch",
    "ChunkFigures",
    "IndexArray",
    "LossTokens",
    "MicroBatch",
    "Siblings",
    "collate",
    "collate_step",
    "empty_micro_batch",
    "micro_batches",
    "step_divisor",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkFigures:
    """What is to be told of a chunk once it is trained: nothing here holds a payload."""

    seqs: tuple[Seq, ...]
    rewards: tuple[float, ...]
    """Of every rollout, in order."""
    tokens: int
    """Tokens that enter the loss."""
    masked: int
    """Trainable tokens that the guard took out."""
    staleness: Mapping[int, int]
    """Tokens that enter the loss, by staleness."""
    group_staleness: Mapping[int, int]
    """Groups, by the staleness of their oldest trainable token."""
    response_tokens: int
    masked_staleness: Mapping[int, int] = field(default_factory=dict)
    """Trainable tokens that the guard took out, by staleness."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """Tokens that enter the loss, by the length of their rollout (`buffer.bias.length_bucket`)."""
    masked_lengths: Mapping[int, int] = field(default_factory=dict)
    divisor: float = 0.0
    """What this chunk adds to the divisor of its step (`consumer.normalisers`)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBatch(ChunkFigures):
    """The groups of a chunk, ready for a backend, with its figures."""

    groups: tuple[Siblings, ...]
    """They lie in the payloads that were fetched, which live as long."""

    @property
    def figures(self) -> ChunkFigures:
        """Without the groups."""
        return ChunkFigures(**{one.name: getattr(self, one.name) for one in fields(ChunkFigures)})


def collate(
    record: StepRecord,
    groups: Sequence[tuple[GroupHeader, RolloutGroup]],
    advantage: Advantage,
    *,
    normaliser: Normaliser = "token_mean",
    max_new_tokens: int = 0,
) -> ChunkBatch:
    """The groups of a chunk, compared with no others; `record` is what the chunk was judged by when it was first journalled. `max_new_tokens` is what the
    normaliser constant divides by. Groups may have any number of rollouts.

    Raises: `RollstreamError` when a token older than the record's bound would enter a loss although the guard bounds it (never clipped, never skipped), when a
    group has a token that nothing can predict, or for advantages that are not one finite number a rollout.
    """
    laid = [columns(group) for _, group in groups]
    (values,) = _advantages([[one.rewards for one in laid]], advantage)
    return _chunk(record, groups, laid, values, normaliser=normaliser, max_new_tokens=max_new_tokens)


def collate_step(
    chunks: Sequence[tuple[ChunkRecord, Sequence[tuple[GroupHeader, RolloutGroup]]]],
    advantage: Advantage,
    *,
    normaliser: Normaliser = "token_mean",
    max_new_tokens: int = 0,
) -> list[ChunkBatch]:
    """As `collate`, of chunks whose rollouts are compared with each other: all of a step, where the advantage needs that (`needs_whole_step`).

    Of each chunk come the groups that are this rank's. Rewards of the others are in the chunk's headers, so every rank computes the same advantages, to the
    bit, as one rank would.
    """
    laid = [[columns(group) for _, group in groups] for _, groups in chunks]
    rewards, places = [], []
    for (chunk, groups), mine in zip(chunks, laid, strict=True):
        own = {header.seq: one.rewards for (header, _), one in zip(groups, mine, strict=True)}
        rewards.append([own.get(header.seq, header.rewards) for header in chunk.headers])
        places.append(np.repeat([header.seq in own for header in chunk.headers], [len(row) for row in rewards[-1]]).astype(np.bool_))
    values = _advantages(rewards, advantage)
    return [
        _chunk(chunk.record, groups, mine, value[place], normaliser=normaliser, max_new_tokens=max_new_tokens)
        for (chunk, groups), mine, value, place in zip(chunks, laid, values, places, strict=True)
    ]


def step_divisor(batches: Sequence[ChunkFigures]) -> float:
    """What a step of these chunks divides by; 0, and the weights stay, where no token is in the loss."""
    return sum(batch.divisor for batch in batches) if any(batch.tokens for batch in batches) else 0.0


def _advantages(chunks: Sequence[Sequence[Sequence[float]]], advantage: Advantage) -> list[Advantages]:
    """Those of the rollouts of each chunk, given rewards by chunk, group and rollout."""
    sizes = [[len(group) for group in groups] for groups in chunks]
    starts = np.cumsum([0, *itertools.chain.from_iterable(sizes)], dtype=np.int64)
    rewards = np.array([reward for groups in chunks for group in groups for reward in group], dtype=np.float64)
    values = np.asarray(advantage(rewards, starts))
    if values.shape != rewards.shape or not np.isfinite(values).all():
        raise RollstreamError(
            f"trainer.advantage gave {values.size} values of which {int(np.isfinite(values).sum())} are finite for {rewards.size} rollouts; "
            "expected one finite number a rollout, look at the rewards, or at the function"
        )
    return _cut(values.astype(np.float32, copy=False), [sum(chunk) for chunk in sizes])


def _cut(values: FloatArray, sizes: Sequence[int]) -> list[FloatArray]:
    return [values[start:end] for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def _chunk(
    record: StepRecord,
    groups: Sequence[tuple[GroupHeader, RolloutGroup]],
    laid: Sequence[Columns],
    values: Advantages,
    *,
    normaliser: Normaliser,
    max_new_tokens: int,
) -> ChunkBatch:
    seqs = tuple(header.seq for header, _ in groups)
    spans = judge_spans(laid, record)
    siblings, counts = lay(laid, spans, values)
    _check(seqs, siblings, counts, spans, record)
    siblings = with_teacher(seqs, siblings, [group for _, group in groups])
    tokens, trainable = int(counts.kept.sum()), sum(sum(header.trainable.values()) for header, _ in groups)
    sampled, kept = counts.sampled[spans.present], counts.kept[spans.present]
    found, which = np.unique(sampled, return_inverse=True)
    buckets = np.array([length_bucket(length) for length in found.tolist()], dtype=np.int64)[which]
    weights, divisor = normalise(kept, normaliser, max_new_tokens=max_new_tokens)
    if weights is not None:
        siblings = tuple(replace(one, weight=weight) for one, weight in zip(siblings, _cut(weights, spans.sizes.tolist()), strict=True))
    return ChunkBatch(
        groups=siblings,
        seqs=seqs,
        rewards=tuple(reward for one in laid for reward in one.rewards),
        tokens=tokens,
        masked=trainable - tokens,
        staleness=_totals(spans.ages[spans.enter], counts.spans[spans.enter]),
        group_staleness=dict(sorted(Counter(record.lineage.staleness(header.oldest, record.step) for header, _ in groups).items())),
        masked_staleness=_totals(spans.ages[~spans.enter], counts.spans[~spans.enter]),
        lengths=_totals(buckets, kept),
        masked_lengths=_totals(buckets, sampled - kept),
        response_tokens=trainable,
        divisor=divisor,
    )


def _check(seqs: Sequence[Seq], siblings: Sequence[Siblings], counts: Counts, spans: Spans, record: StepRecord) -> None:
    bound = record.step - 1 - record.cutoff
    over = spans.enter & (counts.spans > 0) & (spans.ages > bound)
    if record.guard != "correct" and over.any():
        group = int(spans.groups[over][0])
        oldest = spans.ages[over & (spans.groups == group)].max()
        raise RollstreamError(
            f"group {seqs[group]}: a token of staleness {oldest} would enter the loss of step {record.step}, the bound is {bound}; "
            "this is a fault of the staleness guard, nothing was trained"
        )
    for i in np.flatnonzero((counts.context == 0).any(axis=1)).tolist():
        if np.isin(siblings[i].starts[:-1], siblings[i].targets).any():
            raise RollstreamError(f"group {seqs[i]}: the first token of a rollout is trainable, but nothing predicts it; a prompt has at least one token")


def _totals(keys: IndexArray, counts: IndexArray) -> dict[int, int]:
    """The sum of the counts by key, ascending; keys without any are left out."""
    found, which = np.unique(keys, return_inverse=True)
    return {key: count for key, count in zip(found.tolist(), sums(which, counts, len(found)).tolist(), strict=True) if count}
