"""Leased groups, each as the loss sees it, with what is to be counted of them; no rollout becomes an object on the way.

payloads    tokens, mask, logprobs of a group's rollouts, end to end; spans (rollout, version, start, end)
spans       of the whole chunk at once: their staleness, and whether the guard lets them into the loss
Siblings    the payloads' own tokens and logprobs, and which of them enter the loss: nothing is copied before there are micro-batches
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from buffer.contract import StepRecord
from buffer.staleness import judge
from consumer.advantages import Advantages
from protocol.arrays import FloatArray, IntArray
from protocol.groups import Columns
from protocol.versions import Version

IndexArray = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)
_START, _NO_RUNS = np.zeros(1, dtype=np.int64), np.zeros((2, 0), dtype=np.int64)
_NO_SPANS = np.zeros((0, 5), dtype=np.int32)
_FEW_RUNS = 16
"""So many are copied one by one; where there are more, token by token is cheaper."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Siblings:
    """A group as the loss sees it, its rollouts end to end.

    Shapes: S tokens of G rollouts together, N of them in the loss, in K runs.
    Invariant: tokens and logprobs are only read; they may lie in a payload, at any address.
    """

    tokens: IntArray
    """[S] int32"""
    logprobs: FloatArray
    """[S] float32, nats: the behaviour's"""
    starts: IndexArray
    """[G + 1] int64: rollout i is tokens [starts[i], starts[i + 1])."""
    runs: IndexArray
    """[2, K] int64: tokens [runs[0, k], runs[1, k]) enter the loss. Runs ascend; none is empty, none has the first token of a rollout."""
    advantages: FloatArray
    """[G] float32, of each rollout"""
    prefix: int
    """Leading tokens that all siblings share, before any trainable one; 0: not known to share any."""
    judged: FloatArray | None = None
    """[N] float32, the advantage of each token where a critic judged it"""
    weight: FloatArray | None = None
    """[G] float32, what the loss of a token of each rollout is multiplied by; None: 1."""
    stretches: IndexArray | None = None
    """[2, K]: so many tokens of the loss, one after the other, have this staleness; None: all 0."""
    teacher: FloatArray | None = None
    """[N] float32, nats: what a teacher says of these tokens; None: nobody asked one."""

    @property
    def targets(self) -> IndexArray:
        """[N] int64: the tokens that enter the loss, ascending."""
        return positions(self.runs)

    @property
    def behaviour(self) -> FloatArray:
        """[N] float32, nats"""
        return taken(self.logprobs, self.runs)

    @property
    def kept(self) -> IndexArray:
        """[G] int64: tokens of each rollout that enter the loss."""
        return np.diff(self.cuts)

    @property
    def cuts(self) -> IndexArray:
        """[G + 1]: the tokens of rollout i that enter the loss are targets [cuts[i], cuts[i + 1])."""
        ends: IndexArray = np.concatenate((_START, np.cumsum(self.runs[1] - self.runs[0])))
        cuts: IndexArray = ends[self.runs[0].searchsorted(self.starts)]
        return cuts

    @property
    def advantage(self) -> FloatArray:
        """[N] float32, that of the token's rollout, or its own"""
        return np.repeat(self.advantages, self.kept) if self.judged is None else self.judged

    @property
    def age(self) -> IndexArray:
        """[N] int64, in steps."""
        return np.zeros(int(self.kept.sum()), dtype=np.int64) if self.stretches is None else np.repeat(self.stretches[1], self.stretches[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """The spans of all groups of a chunk, one after the other, as the record of its step judges them.

    Shapes: N groups of up to G rollouts, S spans. A group of fewer is filled up with absent ones, which have no token.
    """

    sizes: IndexArray
    """[N] rollouts of each group"""
    starts: IndexArray
    """[N, G + 1]: where rollouts begin, in the tokens of their group"""
    cuts: Sequence[int]
    """[N + 1]: group i has spans [cuts[i], cuts[i + 1])."""
    rollouts: IndexArray
    """[S], counted over all groups"""
    edges: IndexArray
    """[2, S]: first token, and the one after the last, in the tokens of the group"""
    ages: IndexArray
    """[S]: staleness"""
    enter: NDArray[np.bool_]
    """[S]: the guard lets them into the loss."""

    @property
    def groups(self) -> IndexArray:
        """[S]"""
        size = self.starts.shape[1] - 1
        groups: IndexArray = self.rollouts // size
        return groups

    @property
    def present(self) -> NDArray[np.bool_]:
        """[N, G]: False for rollouts that are absent."""
        found: NDArray[np.bool_] = np.arange(self.starts.shape[1] - 1) < self.sizes[:, None]
        return found

    def of(self, group: int) -> slice:
        return slice(self.cuts[group], self.cuts[group + 1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """Tokens of a chunk.

    Shapes: N groups of up to G rollouts, S spans.
    """

    sampled: IndexArray
    """[N, G] trainable tokens of each rollout"""
    kept: IndexArray
    """[N, G] of these, what enters the loss"""
    spans: IndexArray
    """[S] trainable tokens of each span, whether it enters or not"""
    context: IndexArray
    """[N, G] tokens of each rollout before its first trainable one; more than any rollout has where it is absent"""


def judge_spans(laid: Sequence[Columns], record: StepRecord) -> Spans:
    """Raises: `ValueError` for a token from the future of the step: a bug, never clipped."""
    sizes = [len(one.lengths) for one in laid]
    size = max([1, *sizes])
    starts = np.zeros((len(laid), size + 1), dtype=np.int64)
    lengths = [[*one.lengths, *[0] * (size - len(one.lengths))] for one in laid]
    np.cumsum(np.array(lengths, dtype=np.int64).reshape(len(laid), size), axis=1, out=starts[:, 1:])
    counts = [len(one.spans) for one in laid]
    table = np.concatenate([_NO_SPANS, *(one.spans for one in laid)], dtype=np.int64)
    group, rollout = np.repeat(np.arange(len(laid)), counts), table[:, 0]
    written, which = np.unique(table[:, 1] << 32 | table[:, 2], return_inverse=True)
    judged = judge([Version(version >> 32, version & 0xFFFFFFFF) for version in written.tolist()], record)
    return Spans(
        sizes=np.array(sizes, dtype=np.int64),
        starts=starts,
        cuts=list(itertools.accumulate(counts, initial=0)),
        rollouts=group * size + rollout,
        edges=starts[group, rollout] + table[:, 3:].T,
        ages=np.array([age for age, _ in judged], dtype=np.int64)[which],
        enter=np.array([enters for _, enters in judged], dtype=np.bool_)[which],
    )


def lay(laid: Sequence[Columns], spans: Spans, advantages: Advantages) -> tuple[tuple[Siblings, ...], Counts]:
    """The groups, and their counts. Their weights are not there yet.

    Shapes: advantages [R], of all rollouts that are not absent.
    """
    chunk, (lengths,) = _Chunk(spans), np.diff(spans.edges, axis=0)
    total = np.append(0, np.cumsum(lengths))[list(spans.cuts)]
    for i, (one, runs, covered) in enumerate(zip(laid, _runs(spans), np.diff(total).tolist(), strict=True)):
        if runs is not None and np.count_nonzero(one.mask) == covered:
            chunk.runs.append(runs)
        else:
            chunk.pick(i, one)
    return chunk.siblings(laid, advantages)


class _Chunk:
    """A chunk that is being laid, group by group. Counts begin as if every token in a span were trainable."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._in_span = spans.edges[1] - spans.edges[0]
        self._first = spans.starts[:, 1:].copy()
        np.minimum.at(self._first.reshape(-1), spans.rollouts, spans.edges[0])
        self._sampled = sums(spans.rollouts, self._in_span, self._first.size).reshape(self._first.shape)
        self.runs: list[IndexArray] = []
        """Of each group so far the tokens that enter the loss"""

    def pick(self, i: int, one: Columns) -> None:
        """The next group, whatever its mask."""
        mask, mine, starts = one.mask.view(np.bool_), self._spans.of(i), self._spans.starts[i]
        (found,) = mask.nonzero()
        edges = self._spans.edges[:, mine]
        cuts = found.searchsorted(np.concatenate((starts, *edges)))
        at_start, (low, high) = cuts[: len(starts)], cuts[len(starts) :].reshape(2, -1)
        self._sampled[i] = np.diff(at_start)
        if len(found):
            self._first[i] = np.where(self._sampled[i] > 0, found.take(at_start[:-1], mode="clip"), starts[1:])
        else:
            self._first[i] = starts[1:]
        self._in_span[mine] = high - low
        out = edges[:, ~self._spans.enter[mine]]
        if out.size:
            mask = mask.copy()
            for first, last in out.T.tolist():
                mask[first:last] = False
            (found,) = mask.nonzero()
        self.runs.append(_joined(found))

    def siblings(self, laid: Sequence[Columns], advantages: Advantages) -> tuple[tuple[Siblings, ...], Counts]:
        """All of it, once every group is laid."""
        spans, out = self._spans, ~self._spans.enter
        kept = self._sampled - sums(spans.rollouts[out], self._in_span[out], self._sampled.size).reshape(self._sampled.shape)
        context = np.where(spans.present, self._first - spans.starts[:, :-1], np.iinfo(np.int64).max)
        counts = Counts(sampled=self._sampled, kept=kept, spans=self._in_span, context=context)
        ends = spans.sizes.cumsum()
        parts = zip(laid, spans.starts, self.runs, (ends - spans.sizes).tolist(), ends.tolist(), context.min(axis=1).tolist(), self._stretches(), strict=True)
        return tuple(
            Siblings(
                tokens=one.tokens,
                logprobs=one.logprobs,
                starts=starts[: end - start + 1],
                runs=runs,
                advantages=advantages[start:end],
                prefix=prefix if _agree(one.tokens, starts[: end - start].tolist(), prefix) else 0,
                stretches=stretches,
            )
            for one, starts, runs, start, end, prefix, stretches in parts
        ), counts

    def _stretches(self) -> Iterator[IndexArray]:
        """Of each group [2, K]: the tokens of its spans that enter the loss, and their staleness, in the order of the tokens."""
        spans = self._spans
        entering = np.flatnonzero(spans.enter & (self._in_span > 0))
        group, low = spans.groups[entering], spans.edges[0, entering]
        if ((group[1:] == group[:-1]) & (low[1:] < low[:-1])).any():  # the spans of rollouts may be mixed
            entering = entering[np.lexsort((low, group))]
        both = np.stack((self._in_span[entering], spans.ages[entering]))
        cuts = group.searchsorted(np.arange(len(spans.sizes) + 1)).tolist()
        return (both[:, start:end] for start, end in itertools.pairwise(cuts))


def _agree(tokens: IntArray, starts: Sequence[int], size: int) -> bool:
    return len({tokens[start : start + size].tobytes() for start in starts}) == 1


def taken(values: NDArray[Number], runs: IndexArray) -> NDArray[Number]:
    """[N]: what stands at `positions(runs)`, wherever `values` lie in memory. It may be a view of them."""
    if runs.shape[1] == 1:
        return values[slice(*runs[:, 0].tolist())]
    if 0 < runs.shape[1] <= _FEW_RUNS:
        return np.concatenate([values[start:end] for start, end in runs.T.tolist()])
    return values.copy()[positions(runs)]


def positions(runs: IndexArray) -> IndexArray:
    """[2, K] runs to [N]: every place in them, run by run.

    >>> positions(np.array([[2, 7], [5, 8]])).tolist()
    [2, 3, 4, 7]
    """
    sizes = runs[1] - runs[0]
    if len(sizes) == 1:
        return np.arange(*runs[:, 0].tolist())
    found: IndexArray = np.arange(sizes.sum()) + np.repeat(runs[0] - sizes.cumsum() + sizes, sizes)
    return found


def _joined(places: IndexArray) -> IndexArray:
    """The reverse of `positions`: ascending places to as few runs as there can be."""
    apart = np.flatnonzero(np.diff(places) > 1) + 1
    return np.stack((places[np.concatenate((_START, apart))], places[np.concatenate((apart - 1, [-1]))] + 1)) if len(places) else _NO_RUNS


def _runs(spans: Spans) -> list[IndexArray | None]:
    """Of each group the tokens [start, end) of spans that enter the loss, [2, K], those that touch joined; None where they do not ascend."""
    count = len(spans.starts)
    group, (low, high) = spans.groups[spans.enter], spans.edges[:, spans.enter]
    same = group[1:] == group[:-1]
    apart = ~same | (low[1:] != high[:-1])
    begins, ends = np.append(True, apart)[: len(low)], np.append(apart, True)[: len(low)]
    cuts = group[begins].searchsorted(np.arange(count + 1)).tolist()
    joined = np.stack((low[begins], high[ends]))
    odd = set(group[1:][same & (low[1:] < high[:-1])].tolist())
    return [None if i in odd else joined[:, start:end] for i, (start, end) in enumerate(itertools.pairwise(cuts))]


def sums(places: IndexArray, counts: IndexArray, size: int) -> IndexArray:
    """[size]: the sum of the counts at each place."""
    found = np.zeros(size, dtype=np.int64)
    np.add.at(found, places, counts)
    return found
