"""From leased groups to what a backend trains on: the loss mask after the staleness guard, advantages, and micro-batches cut by tokens.

A chunk becomes `Siblings` (a group each, ragged), which are laid out as `MicroBatch`es in one of two ways:

    plain    one rollout a row                    shared   one group a row, its prompt once
    P P P a a a .                                 P P P a a b b b c      each sibling sees the prompt and itself,
    P P P b b b b                                                        at the positions it would have alone
    P P P c c .

Both give the same logits at the same tokens; shared costs a third of the arithmetic where prompts are as long as responses. Padding stands at the end of a
row, so causal attention needs no mask for it. Nothing is trimmed: a rollout longer than the micro-batch gets one of its own.
Invariant: everything here is a pure function of the journalled record and the payloads, so a replay computes the same numbers bit by bit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from buffer.bias import length_bucket
from buffer.contract import StepRecord
from consumer.advantages import Advantages, Rewards
from consumer.siblings import Counts, IndexArray, Siblings, Spans, judge_spans, lay, sums
from protocol.arrays import FloatArray, IntArray
from protocol.errors import RollstreamError
from protocol.groups import columns
from protocol.messages import GroupHeader, RolloutGroup, Seq

__all__ = ["SHARED_ROW_LIMIT", "ChunkBatch", "IndexArray", "MicroBatch", "Siblings", "collate", "micro_batches"]

SHARED_ROW_LIMIT = 1024
"""Tokens of a shared row. Its attention is quadratic in all siblings together, so past this one row a rollout is cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkBatch:
    """The groups of a chunk, ready for a backend, and what is to be told of them."""

    groups: tuple[Siblings, ...]
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


def collate(record: StepRecord, groups: Sequence[tuple[GroupHeader, RolloutGroup]], advantages: Callable[[Rewards], Advantages]) -> ChunkBatch:
    """The groups of a chunk; `record` is what the chunk was judged by when it was first journalled.

    Raises: `RollstreamError` when a token older than the record's bound would enter a loss although the guard bounds it (never clipped, never skipped), or
    when a group has a token that nothing can predict or other than G rollouts.
    """
    laid = [columns(group) for _, group in groups]
    rewards = [one.rewards for one in laid]
    if odd := [header.seq for (header, _), row in zip(groups, rewards, strict=True) if len(row) != len(rewards[0])]:
        raise RollstreamError(f"group {odd[0]} has another number of rollouts than group {groups[0][0].seq}: rollout.group_size differs between producers")
    values = advantages(np.array(rewards, dtype=np.float64).reshape(len(rewards), len(rewards[0]) if rewards else 1))
    seqs = tuple(header.seq for header, _ in groups)
    spans = judge_spans(laid, record)
    siblings, counts = lay(laid, spans, values)
    _check(seqs, siblings, counts, spans, record)
    tokens, trainable = int(counts.kept.sum()), sum(sum(header.trainable.values()) for header, _ in groups)
    sampled, kept = counts.sampled.reshape(-1), counts.kept.reshape(-1)
    found, which = np.unique(sampled, return_inverse=True)
    buckets = np.array([length_bucket(length) for length in found.tolist()], dtype=np.int64)[which]
    return ChunkBatch(
        groups=siblings,
        seqs=seqs,
        rewards=tuple(reward for row in rewards for reward in row),
        tokens=tokens,
        masked=trainable - tokens,
        staleness=_totals(spans.ages[spans.enter], counts.spans[spans.enter]),
        group_staleness=dict(sorted(Counter(record.lineage.staleness(header.oldest, record.step) for header, _ in groups).items())),
        masked_staleness=_totals(spans.ages[~spans.enter], counts.spans[~spans.enter]),
        lengths=_totals(buckets, kept),
        masked_lengths=_totals(buckets, sampled - kept),
        response_tokens=trainable,
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


# -- micro-batches -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward and backward.

    Shapes: R rows of L tokens, padded at the end; N tokens that enter the loss, in no particular order.
    """

    input_ids: IndexArray
    """[R, L]"""
    position_ids: IndexArray | None
    """[R, L]; None: 0 to L - 1"""
    attention: NDArray[np.bool_] | None
    """[R, 1, L, L], True where the row's query may see the key; None: causal."""
    columns: tuple[int, int]
    """[first, last) columns whose logits are needed."""
    logit_index: IndexArray
    """[N] into the needed logits, flattened over rows: the logit that predicts the token."""
    targets: IndexArray
    """[N] token ids"""
    behaviour: FloatArray
    """[N]"""
    advantage: FloatArray
    """[N]"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """One row before padding. Its samples' targets are predicted at `predictors` [N]."""

    tokens: IntArray
    positions: IndexArray | None
    owner: IntArray | None
    """[L] 0: prompt, i: sibling i; padding gets -1."""
    predictors: IndexArray
    targets: IntArray
    behaviour: FloatArray
    advantage: FloatArray


def micro_batches(batch: ChunkBatch, *, max_tokens: int, share_prompts: bool) -> Iterator[MicroBatch]:
    """The chunk in rows of similar length, at most `max_tokens` with padding at a time (a single longer row goes alone)."""
    groups = [group for group in batch.groups if len(group.targets)]
    if share_prompts and all(group.prefix and _shared_length(group) <= SHARED_ROW_LIMIT for group in groups):
        rows = [_shared_row(group) for group in groups]
    else:
        rows = [row for group in groups for row in _plain_rows(group)]
    rows.sort(key=lambda row: len(row.tokens))
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * len(rows[end].tokens) > max_tokens:
            yield _pad(rows[start:end])
            start = end


def _shared_length(group: Siblings) -> int:
    return len(group.tokens) - (len(group.starts) - 2) * group.prefix - (len(group.starts) - 1)


def _plain_rows(group: Siblings) -> Iterator[_Row]:
    """A row for every rollout with a token in the loss. Its last token predicts nothing and stays out."""
    cuts = np.searchsorted(group.targets, group.starts)
    for (start, end), (low, high) in zip(itertools.pairwise(group.starts.tolist()), itertools.pairwise(cuts.tolist()), strict=True):
        if low < high:
            chosen = slice(low, high)
            yield _Row(
                tokens=group.tokens[start : end - 1],
                positions=None,
                owner=None,
                predictors=group.targets[chosen] - 1 - start,
                targets=group.tokens[group.targets[chosen]],
                behaviour=group.behaviour[chosen],
                advantage=group.advantage[chosen],
            )


def _shared_row(group: Siblings) -> _Row:
    """The prompt, then of each sibling what follows it without its last token: that many tokens, `kept`, stand at `placed` in the row."""
    prefix, begins, ends = group.prefix, group.starts[:-1], group.starts[1:]
    kept = ends - begins - prefix - 1
    placed = prefix + np.cumsum(kept) - kept
    sibling = np.repeat(np.arange(len(kept)), kept)
    position = np.arange(int(kept.sum())) - (placed - prefix)[sibling] + prefix
    of_target = np.searchsorted(group.starts, group.targets, side="right") - 1
    at = group.targets - begins[of_target]
    prompt = np.arange(prefix)
    return _Row(
        tokens=np.concatenate((group.tokens[:prefix], group.tokens[begins[sibling] + position])),
        positions=np.concatenate((prompt, position)),
        owner=np.concatenate((np.zeros(prefix, dtype=np.int32), sibling.astype(np.int32) + 1)),
        predictors=np.where(at == prefix, prefix - 1, placed[of_target] + at - 1 - prefix),
        targets=group.tokens[group.targets],
        behaviour=group.behaviour,
        advantage=group.advantage,
    )


def _pad(rows: Sequence[_Row]) -> MicroBatch:
    length = max(len(row.tokens) for row in rows)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros((len(rows), length), dtype=np.int64)
    owner = np.full((len(rows), length), -1, dtype=np.int32)
    first = min(int(row.predictors.min()) for row in rows)
    last = max(int(row.predictors.max()) for row in rows) + 1
    shared = False
    for i, row in enumerate(rows):
        size = len(row.tokens)
        input_ids[i, :size] = row.tokens
        if row.owner is not None and row.positions is not None:
            shared = True
            positions[i, :size] = row.positions
            owner[i, :size] = row.owner
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions if shared else None,
        attention=_siblings_apart(owner) if shared else None,
        columns=(first, last),
        logit_index=np.concatenate([row.predictors - first + i * (last - first) for i, row in enumerate(rows)]),
        targets=np.concatenate([row.targets for row in rows]).astype(np.int64),
        behaviour=np.concatenate([row.behaviour for row in rows]),
        advantage=np.concatenate([row.advantage for row in rows]),
    )


def _siblings_apart(owner: IntArray) -> NDArray[np.bool_]:
    """[R, L] to [R, 1, L, L]: causal, and each sees the prompt and its own. Padding sees the prompt too, so that no softmax is over nothing."""
    length = owner.shape[1]
    causal = np.tri(length, dtype=np.bool_)
    keys, queries = owner[:, None, :], owner[:, :, None]
    seen: NDArray[np.bool_] = ((keys == 0) | (keys == queries)) & causal
    return seen[:, None]
