"""Which rank of a data-parallel trainer takes which groups of a chunk: a pure function of the chunk's headers, so that ranks agree without talking.

    chunk 0 1 2 3 4 5 6 7  ──► rank 0: 0 3 6     as equal in tokens as largest differencing makes them, every group once,
                               rank 1: 1 2 4 5 7  each rank's groups in the chunk's order

A chunk whose payload was lost has a new revision and other headers; `buffer.client.TrainerBuffer.fetch_share` has the ranks agree on the revision first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from buffer.config import BufferConfig
from protocol.errors import ConfigError
from protocol.messages import GroupHeader


@dataclass(frozen=True, slots=True)
class Share:
    """One rank of several. Raises: `ValueError` for a rank that is not one of them."""

    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}: expected 0 to {self.ranks - 1}")

    def of(self, headers: Sequence[GroupHeader]) -> tuple[GroupHeader, ...]:
        """This rank's groups, in the chunk's order."""
        if self.ranks == 1:
            return tuple(headers)
        return tuple(headers[at] for at in split([sum(header.lengths) for header in headers], self.ranks)[self.rank])


def enough_for(settings: BufferConfig, ranks: int) -> BufferConfig:
    """`settings` of a run to be made, whose chunks have a group for each of `ranks` where nobody said how large chunks are."""
    if settings.chunk_groups or settings.chunk >= ranks:
        return settings
    return settings.model_copy(update={"chunk_groups": min(ranks, settings.groups_per_step)})


def check_enough(settings: BufferConfig, ranks: int, *, made: bool) -> None:
    """Whether each of `ranks` gets a group of a chunk; those of one replica of the model count as one. `made`: the run is there, and its settings stay.

    Raises: `ConfigError`.
    """
    if settings.chunk >= ranks:
        return
    if made:
        todo = f"the run was made so: start at most {settings.chunk}, or make another run with buffer.chunk_groups = {ranks} or more"
    elif settings.groups_per_step < ranks:
        todo = f"set buffer.groups_per_step to {ranks} or more, or start at most {settings.groups_per_step}"
    else:
        todo = f"set buffer.chunk_groups = {ranks} or more, or leave it out"
    raise ConfigError(f"buffer.chunk_groups {settings.chunk} for {ranks} data-parallel ranks of the trainer: {ranks - settings.chunk} would stay idle; {todo}")


def split(weights: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Positions by rank, balanced by weight. With at least as many positions as ranks, no rank is left without any.

    Source: the largest differencing method for k sets (Karmarkar and Karp 1982). Ties go by position, so the result is the same everywhere.

    >>> split([8, 7, 6, 5, 4], 2)
    ((0, 2), (1, 3, 4))
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: expected at least 1")
    # An entry: (minus spread, tie, sets), sets by falling weight, each (weight, positions). The tie keeps heapq from comparing sets.
    heap: list[tuple[int, int, list[tuple[int, tuple[int, ...]]]]] = []
    for position, weight in enumerate(weights):
        # A group costs at least something: with empty ones alone a rank could otherwise go without.
        sets = [(max(1, weight), (position,)), *(((0, ()),) * (ranks - 1))]
        heap.append((-sets[0][0], position, sets))
    heapq.heapify(heap)
    tie = len(weights)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda entry: (-entry[0], entry[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
        tie += 1
    chosen = [sorted(positions) for _, positions in heap[0][2]] if heap else []
    chosen += [[] for _ in range(ranks - len(chosen))]
    if len(weights) >= ranks:
        _feed_the_empty(chosen)
    return tuple(tuple(positions) for positions in sorted(chosen, key=lambda positions: (not positions, positions)))


def _feed_the_empty(chosen: list[list[int]]) -> None:
    """Differencing by weight may leave a set without a position where one weighs more than all others together."""
    for empty in (positions for positions in chosen if not positions):
        fullest = max(chosen, key=lambda positions: (len(positions), positions))
        empty.append(fullest.pop())
