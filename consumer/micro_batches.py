"""A chunk cut into micro-batches by tokens: each one forward and backward, with what the loss needs of its tokens.

A chunk is `Siblings` (a group each, ragged), which are laid out as `MicroBatch`es in one of two ways:

    plain    one rollout a row                    shared   one group a row, its prompt once
    P P P a a a .                                 P P P a a b b b c      each sibling sees the prompt and itself,
    P P P b b b b                                                        at the positions it would have alone
    P P P c c .

Both give the same logits at the same tokens; shared costs a third of the arithmetic where prompts are as long as responses. Padding stands at the end of a
row, so causal attention needs no mask for it. `consumer.packing` is the third layout, without padding: that of a GPU (`trainer.packing`).
Invariant: nothing is trimmed: a rollout longer than the micro-batch gets one of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from consumer.siblings import IndexArray, Siblings, positions, taken
from protocol.arrays import FloatArray, IntArray

if TYPE_CHECKING:
    from consumer.batch import ChunkBatch

SHARED_ROW_LIMIT = 1024
"""Tokens of a shared row. Its attention is quadratic in all siblings together, so past this one row a rollout is cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The N tokens of a micro-batch that enter the loss, whichever way it is laid: whole rollouts, the tokens of one adjacent and in order."""

    logit_index: IndexArray
    """[N] into the logits that were asked for, flattened over rows: the logit that predicts the token."""
    targets: IndexArray
    """[N] int64 token ids"""
    behaviour: FloatArray
    """[N] float32, nats"""
    advantage: FloatArray
    """[N] float32, that of the token's rollout; of the token itself where a critic judged it"""
    weight: FloatArray
    """[N] float32: the step's loss is the sum of weight times loss, by the sum of the chunks' divisors."""
    rollout: IndexArray
    """[N] int64, ascending from 0 without gaps: which rollout of the micro-batch. One without a token in the loss is not counted."""
    age: IndexArray
    """[N] int64, staleness in steps"""
    teacher: FloatArray | None = None
    """[N] float32, nats: of the teacher at the token; None: not of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch(LossTokens):
    """One forward and backward.

    Shapes: R rows of L tokens, padded at the end.
    """

    input_ids: IndexArray
    """[R, L]"""
    position_ids: IndexArray | None
    """[R, L]; None: 0 to L - 1"""
    attention: NDArray[np.bool_] | None
    """[R, 1, L, L], True where the row's query may see the key; None: causal."""
    columns: tuple[int, int]
    """[first, last) columns whose logits are needed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """Tokens in a row, before padding. The N of them that enter the loss are predicted at `predictors`."""

    tokens: IntArray
    positions: IndexArray | None
    owner: IntArray | None
    """[L] 0: prompt, i: sibling i; padding gets -1."""
    predictors: IndexArray
    targets: IntArray
    behaviour: FloatArray
    age: IndexArray
    kept: IndexArray
    """[G] of the N tokens, those of each rollout in the row"""
    advantages: FloatArray
    """[G]"""
    judged: FloatArray | None
    """[N]; None: that of its rollout"""
    weight: FloatArray | None
    """[G]; None: 1 each"""
    teacher: FloatArray | None = None


def micro_batches(batch: ChunkBatch, *, max_tokens: int, share_prompts: bool) -> Iterator[MicroBatch]:
    """The chunk in rows of similar length, at most `max_tokens` with padding at a time (a single longer row goes alone)."""
    groups = [group for group in batch.groups if group.runs.size]
    if share_prompts and all(group.prefix and _shared_length(group) <= min(SHARED_ROW_LIMIT, max_tokens) for group in groups):
        rows = [_shared_row(group) for group in groups]
    else:
        rows = [row for group in groups for row in plain_rows(group)]
    rows.sort(key=lambda row: len(row.tokens))
    start = 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - start) * len(rows[end].tokens) > max_tokens:
            yield _pad(rows[start:end])
            start = end


def _shared_length(group: Siblings) -> int:
    return group.prefix + int(_after_prompt(group).sum())


def _after_prompt(group: Siblings) -> IndexArray:
    """[G] tokens of each sibling that follow the prompt, without its last, which predicts nothing. One that is all prompt has none."""
    following: IndexArray = np.maximum(np.diff(group.starts) - group.prefix - 1, 0)
    return following


def plain_rows(group: Siblings) -> Iterator[Row]:
    """A row for every rollout with a token in the loss. Its last token predicts nothing and stays out."""
    cuts, ages = group.cuts, group.age
    runs = itertools.pairwise(group.runs[0].searchsorted(group.starts).tolist())
    bounds = zip(itertools.pairwise(group.starts.tolist()), itertools.pairwise(cuts.tolist()), runs, strict=True)
    for i, ((start, end), (low, high), (first, last)) in enumerate(bounds):
        if low < high:
            mine = group.runs[:, first:last]
            yield Row(
                tokens=group.tokens[start : end - 1],
                positions=None,
                owner=None,
                predictors=positions(mine - 1 - start),
                targets=taken(group.tokens, mine),
                behaviour=taken(group.logprobs, mine),
                age=ages[low:high],
                kept=np.array([high - low]),
                advantages=group.advantages[i : i + 1],
                judged=None if group.judged is None else group.judged[low:high],
                weight=None if group.weight is None else group.weight[i : i + 1],
                teacher=None if group.teacher is None else group.teacher[low:high],
            )


def _shared_row(group: Siblings) -> Row:
    """The prompt, then of each sibling what follows it without its last token: that many tokens, `follow`, stand at `placed` in the row."""
    prefix, begins, follow = group.prefix, group.starts[:-1], _after_prompt(group)
    placed = prefix + np.cumsum(follow) - follow
    sibling = np.repeat(np.arange(len(follow)), follow)
    position = np.arange(int(follow.sum())) - (placed - prefix)[sibling] + prefix
    targets = group.targets
    of_target = np.searchsorted(group.starts, targets, side="right") - 1
    at = targets - begins[of_target]
    prompt = np.arange(prefix)
    return Row(
        tokens=np.concatenate((group.tokens[:prefix], group.tokens[begins[sibling] + position])),
        positions=np.concatenate((prompt, position)),
        owner=np.concatenate((np.zeros(prefix, dtype=np.int32), sibling.astype(np.int32) + 1)),
        predictors=np.where(at == prefix, prefix - 1, placed[of_target] + at - 1 - prefix),
        targets=taken(group.tokens, group.runs),
        behaviour=group.behaviour,
        age=group.age,
        kept=group.kept,
        advantages=group.advantages,
        judged=group.judged,
        weight=group.weight,
        teacher=group.teacher,
    )


def _pad(rows: Sequence[Row]) -> MicroBatch:
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
        **loss_arrays(rows),
    )


class LossArrays(TypedDict):
    """The fields of `LossTokens`, but for `logit_index`, which depends on the layout."""

    targets: IndexArray
    behaviour: FloatArray
    advantage: FloatArray
    weight: FloatArray
    rollout: IndexArray
    age: IndexArray
    teacher: FloatArray | None


def loss_arrays(rows: Sequence[Row]) -> LossArrays:
    """Those of the tokens in these rows, at least one row."""
    counts = np.concatenate([row.kept for row in rows])
    teacher = [row.teacher for row in rows if row.teacher is not None]
    judged = [row.judged for row in rows if row.judged is not None]
    weights = np.concatenate([np.ones(len(row.kept), dtype=np.float32) if row.weight is None else row.weight for row in rows])
    return {
        "targets": np.concatenate([row.targets for row in rows]).astype(np.int64),
        "behaviour": np.concatenate([row.behaviour for row in rows]),
        "advantage": np.concatenate(judged) if len(judged) == len(rows) else np.repeat(np.concatenate([row.advantages for row in rows]), counts),
        "weight": np.repeat(weights, counts),
        "rollout": np.repeat(np.cumsum(counts > 0) - 1, counts),
        "age": np.concatenate([row.age for row in rows]),
        "teacher": np.concatenate(teacher) if len(teacher) == len(rows) else None,
    }


def empty_loss_arrays() -> LossArrays:
    """Those of no token at all."""
    whole, real = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    return {"targets": whole, "behaviour": real, "advantage": real, "weight": real, "rollout": whole, "age": whole, "teacher": real}


def empty_micro_batch() -> MicroBatch:
    """One token, and none in the loss: for a rank that must run as many forwards as others."""
    return MicroBatch(
        input_ids=np.zeros((1, 1), dtype=np.int64),
        position_ids=None,
        attention=None,
        columns=(0, 1),
        logit_index=np.zeros(0, dtype=np.int64),
        **empty_loss_arrays(),
    )


def _siblings_apart(owner: IntArray) -> NDArray[np.bool_]:
    """[R, L] to [R, 1, L, L]: causal, and each sees the prompt and its own. Padding sees the prompt too, so that no softmax is over nothing."""
    length = owner.shape[1]
    causal = np.tri(length, dtype=np.bool_)
    keys, queries = owner[:, None, :], owner[:, :, None]
    seen: NDArray[np.bool_] = ((keys == 0) | (keys == queries)) & causal
    return seen[:, None]
