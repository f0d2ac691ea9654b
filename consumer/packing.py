"""Micro-batches without padding: whole rollouts end to end in one row, as many parts as are needed, about equal in work.

    P P P a a a │ Q Q b b b b │ P P P c c        one row, cu_seqlens 0 6 12 17: attention by variable lengths keeps rollouts apart

Invariant: every rollout with a token in the loss is in exactly one part, whole. A part has at most `max_tokens` tokens, or is one longer rollout alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from buffer.shares import split
from consumer.batch import ChunkBatch
from consumer.micro_batches import LossTokens, Row, empty_loss_arrays, loss_arrays, plain_rows
from consumer.siblings import IndexArray

Parts: TypeAlias = list[tuple[int, ...]]
_GRAIN = 1024
"""Costs are compared as whole numbers, in so many parts of a token's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch(LossTokens):
    """One forward and backward.

    Shapes: R rollouts of T tokens together. `logit_index` are columns of the row, each once: they can be asked for alone (`logits_to_keep`).
    """

    input_ids: IndexArray
    """[1, T]"""
    position_ids: IndexArray
    """[1, T], from 0 in each rollout"""
    cu_seqlens: NDArray[np.int32]
    """[R + 1] int32: rollout i is columns [cu_seqlens[i], cu_seqlens[i + 1])."""
    max_seqlen: int
    """Tokens of the longest"""

    @property
    def attention(self) -> NDArray[np.bool_]:
        """[1, 1, T, T], True where the query may see the key: for attention that takes no lengths."""
        owner = np.repeat(np.arange(len(self.cu_seqlens) - 1), np.diff(self.cu_seqlens))
        seen: NDArray[np.bool_] = (owner[:, None] == owner) & np.tri(len(owner), dtype=np.bool_)
        return seen[None, None]


def packed_batches(batch: ChunkBatch, *, max_tokens: int, quadratic: float = 0.0, at_least: int = 1) -> list[PackedBatch]:
    """The chunk in as few parts as `partition` finds, and at least so many, the costliest first: where all ranks ask for what the neediest of them needs, they
    run as many forwards, each next to ones of about its own size.

    `quadratic`: see `attention_cost`; 0 balances tokens alone.
    """
    rows = [row for group in batch.groups for row in plain_rows(group)]
    lengths = [len(row.tokens) for row in rows]
    costs = [length + quadratic * length * length for length in lengths]
    parts = partition(lengths, costs, max_tokens=max_tokens, at_least=at_least if rows else 0)
    parts.sort(key=lambda part: (-sum(costs[i] for i in part), part))
    return [_pack([rows[i] for i in part]) for part in parts] + [empty_packed_batch()] * (0 if rows else at_least)


def attention_cost(*, parameters: int, layers: int, width: int) -> float:
    """What a pair of tokens costs in causal attention, in units of what a token costs in the rest of the model: `layers * width / parameters`.

    A forward does 2 * parameters operations a token, those of the embedding left out, and 4 * width of each layer for each pair of a query and a key it may
    see, of which n tokens have about n^2 / 2. `width` is heads times their size.
    """
    return layers * width / parameters


def partition(lengths: Sequence[int], costs: Sequence[float], *, max_tokens: int, at_least: int = 1) -> Parts:
    """Positions in parts of at most `max_tokens` (or one longer alone), about equal in cost. Parts are empty only where there are fewer positions than parts.

    There are `at_least` parts or, if more, what a first fit by falling length needs or fewer: asked again for more than it gave, it gives exactly so many.
    Source: largest differencing (`buffer.shares.split`), which knows no bound; where its parts are over it, the next position goes to the cheapest part with
    room, and where that fails too, first fit stands.

    >>> partition([5, 4, 3, 3, 1], [5, 4, 3, 3, 1], max_tokens=8)
    [(0, 2), (1, 3, 4)]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens {max_tokens}: expected at least 1")
    weights = [round(cost * _GRAIN) for cost in costs]
    found = _few(lengths, weights, max_tokens)
    if len(found) >= at_least:
        return found
    finer = list(split(weights, at_least))
    return finer if _fits(finer, lengths, max_tokens) else _divided(found, weights, at_least)


def _few(lengths: Sequence[int], weights: Sequence[int], max_tokens: int) -> Parts:
    most = _first_fit(lengths, max_tokens)
    fewest = -(-sum(min(length, max_tokens) for length in lengths) // max_tokens)
    for count in sorted({fewest, (fewest + len(most)) // 2, len(most)} - {0}):
        parts = list(split(weights, count))
        if _fits(parts, lengths, max_tokens):
            return parts
    return _cheapest_with_room(lengths, weights, max_tokens, len(most)) or most


def _fits(parts: Parts, lengths: Sequence[int], max_tokens: int) -> bool:
    return all(len(part) <= 1 or sum(lengths[i] for i in part) <= max_tokens for part in parts)


def _first_fit(lengths: Sequence[int], max_tokens: int) -> Parts:
    """Parts that hold to the bound, at most 11/9 of the fewest possible and one more; not balanced."""
    parts: list[list[int]] = []
    room: list[int] = []
    for i in _falling(lengths):
        at = next((part for part, left in enumerate(room) if left >= lengths[i]), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[at].append(i)
        room[at] -= lengths[i]
    return [tuple(sorted(part)) for part in parts]


def _cheapest_with_room(lengths: Sequence[int], weights: Sequence[int], max_tokens: int, count: int) -> Parts | None:
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, cost = [0] * count, [0] * count
    for i in _falling(weights):
        free = [part for part in range(count) if not parts[part] or tokens[part] + lengths[i] <= max_tokens]
        if not free:
            return None
        at = min(free, key=lambda part: (cost[part], part))
        parts[at].append(i)
        tokens[at] += lengths[i]
        cost[at] += weights[i]
    return [tuple(sorted(part)) for part in parts]


def _divided(parts: Parts, weights: Sequence[int], count: int) -> Parts:
    """The costliest that can be divided is, until there are so many."""
    heap = [(-sum(weights[i] for i in part), part) for part in parts if len(part) > 1]
    done = [part for part in parts if len(part) <= 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(done) < count:
        _, part = heapq.heappop(heap)
        for half in split([weights[i] for i in part], 2):
            chosen = tuple(part[i] for i in half)
            if len(chosen) > 1:
                heapq.heappush(heap, (-sum(weights[i] for i in chosen), chosen))
            else:
                done.append(chosen)
    return [part for _, part in heap] + done + [()] * (count - len(heap) - len(done))


def _falling(values: Sequence[int]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _pack(rows: Sequence[Row]) -> PackedBatch:
    if not rows:
        return empty_packed_batch()
    lengths = [len(row.tokens) for row in rows]
    starts = list(itertools.accumulate(lengths, initial=0))
    return PackedBatch(
        input_ids=np.concatenate([row.tokens for row in rows]).astype(np.int64)[None],
        position_ids=np.concatenate([np.arange(length) for length in lengths])[None],
        cu_seqlens=np.array(starts, dtype=np.int32),
        max_seqlen=max(lengths),
        logit_index=np.concatenate([row.predictors + start for row, start in zip(rows, starts, strict=False)]),
        **loss_arrays(rows),
    )


def empty_packed_batch() -> PackedBatch:
    """One token, and none in the loss: for a rank that must run as many forwards as others."""
    nothing = np.zeros(0, dtype=np.int64)
    ids = np.zeros((1, 1), dtype=np.int64)
    return PackedBatch(input_ids=ids, position_ids=ids, cu_seqlens=np.array([0, 1], dtype=np.int32), max_seqlen=1, logit_index=nothing, **empty_loss_arrays())
