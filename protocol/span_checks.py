"""The spans and the mask of a group's payload: which token has a version, and that none may enter a loss without one (rule V2).

Two forms of one rule. `spans_hold` looks at many groups at once, each for a third of what it costs alone, and only says whether all is well; `check_spans`
looks at one group and says what is wrong.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.arrays import IntArray, MaskArray
from protocol.errors import DecodeError

_COLUMNS = 5
_NO_SPANS, _NO_TOKENS = np.zeros((0, _COLUMNS), dtype=np.int32), np.zeros(0, dtype=np.uint8)
_START = np.zeros(1, dtype=np.int64)


class Spanned(Protocol):
    """What is looked at of a group.

    Shapes: T tokens of G rollouts end to end, S spans.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """[G]"""

    @property
    def mask(self) -> MaskArray:
        """[T]"""

    @property
    def spans(self) -> IntArray:
        """[S, 5] rows of (rollout, incarnation, n, start, end)"""


def check_spans(group: Spanned) -> None:
    """Inside each rollout its spans are disjoint and ascending, and every token with mask 1 lies in one. One that may enter a loss must have a version, or no
    guard could judge it.

    Raises: `DecodeError` naming the span, the mask or the rollout.
    """
    lengths, table = group.lengths, group.spans
    if table.shape[1] != _COLUMNS:
        raise DecodeError("spans", f"shape {list(table.shape)}, expected [spans, {_COLUMNS}]")
    starts = list(itertools.accumulate(lengths, initial=0))
    floors, count = [0] * len(lengths), len(lengths)
    gaps: list[tuple[int, int]] = []
    for row, (rollout, incarnation, n, start, end) in enumerate(table.tolist()):
        if not 0 <= rollout < count or incarnation < 0 or n < 0:
            raise DecodeError(f"spans[{row}]", f"names rollout {rollout}, version {incarnation}:{n}")
        floor = floors[rollout]
        if not floor <= start < end <= lengths[rollout]:
            raise DecodeError(f"spans[{row}]", f"[{start}, {end}) is not inside [{floor}, {lengths[rollout]})")
        if start > floor:
            gaps.append((starts[rollout] + floor, starts[rollout] + start))
        floors[rollout] = end
    gaps += [(start + floor, start + length) for start, floor, length in zip(starts, floors, lengths, strict=False) if floor < length]
    _check_mask(group.mask, sorted(gaps), starts)


def _check_mask(mask: MaskArray, gaps: Sequence[tuple[int, int]], starts: Sequence[int]) -> None:
    """It holds 0 and 1, and only 0 in `gaps`: the tokens in no span, ascending."""
    if not len(mask):
        return
    cuts = [0, *(bound for gap in gaps for bound in gap)]
    if cuts[-1] == len(mask):
        cuts.pop()
    most: list[int] = np.maximum.reduceat(mask, cuts).tolist()  # between the cuts: around a gap, in it, and so on
    if max(most) > 1:
        raise DecodeError("mask", f"holds {max(most)}, expected 0 and 1")
    if any(most[1::2]):
        bare = np.concatenate([start + np.flatnonzero(mask[start:end]) for start, end in gaps])
        rollout = bisect_right(starts, bare[0]) - 1
        raise DecodeError(f"rollouts[{rollout}].spans", f"{len(bare)} tokens with mask 1 lie in no span, so nobody knows their version")


def spans_hold(groups: Sequence[Spanned]) -> bool:
    """Whether `check_spans` has nothing to say of any of these groups."""
    if not groups:
        return True
    if any(one.spans.shape[1] != _COLUMNS for one in groups):
        return False
    table = np.concatenate([_NO_SPANS, *[one.spans for one in groups]]).astype(np.int64)
    counts, sizes = [len(one.spans) for one in groups], [len(one.lengths) for one in groups]
    lengths = np.array([length for one in groups for length in one.lengths], dtype=np.int64)
    rollout, edges = table[:, 0], table[:, 3:]
    if (table < 0).any() or (rollout >= np.repeat(sizes, counts)).any():
        return False
    rollout = rollout + np.repeat(list(itertools.accumulate(sizes, initial=0))[:-1], counts)  # counted over all groups, as are tokens from here on
    if (edges[:, 1] > lengths[rollout]).any():
        return False
    edges = edges + (lengths.cumsum() - lengths)[rollout][:, None]
    if (rollout[1:] < rollout[:-1]).any():  # the spans of rollouts may be mixed
        edges = edges[rollout.argsort(kind="stable")]
    return _covered(np.concatenate([_NO_TOKENS, *[one.mask for one in groups]]), edges)


def _covered(mask: MaskArray, spans: NDArray[np.int64]) -> bool:
    """Whether the spans, [S, 2], ascend and none is empty, and the mask is 0 or 1 inside them and 0 elsewhere."""
    bounds = np.zeros(2 * len(spans) + 2, dtype=np.int64)
    bounds[1:-1], bounds[-1] = spans.reshape(-1), len(mask)
    gaps, sizes = bounds.reshape(-1, 2), bounds[1:] - bounds[:-1]
    if (sizes < 0).any() or not sizes[1::2].all():
        return False
    if not len(mask):
        return True
    cuts = np.concatenate((_START, gaps[sizes[::2] > 0].reshape(-1)))  # an empty gap is none: `reduceat` would look at the token there
    most = np.maximum.reduceat(mask, cuts[: cuts.searchsorted(len(mask))])  # around a gap, in it, and so on
    return bool(most.max() <= 1) and not most[1::2].any()
