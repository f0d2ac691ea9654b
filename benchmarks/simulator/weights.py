"""Weights as the simulator has them: a digest that is a function of the parent and of what was learnt, and the line that led there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class Weights:
    """After `step`. Equal digests are equal weights, with an equal past."""

    step: int
    line: tuple[str, ...]
    """Digest after every step of the line, from 0."""
    learnt: frozenset[int]
    """Groups that have had an effect."""

    @property
    def digest(self) -> str:
        return self.line[-1]

    def after(self, groups: Sequence[tuple[int, str]], salt: str) -> Weights:
        """One optimizer step over groups (seq, digest of payload). `salt`: what a machine that does not compute exactly adds."""
        digest = xxhash.xxh3_64_hexdigest(f"{self.digest}|{groups}|{salt}".encode())[:10]
        return Weights(self.step + 1, (*self.line, digest), self.learnt.union(seq for seq, _ in groups))

    def shared(self, other: Weights) -> int:
        """The newest step up to which both have the same weights; -1: none."""
        for step in range(min(len(self.line), len(other.line)) - 1, -1, -1):
            if self.line[step] == other.line[step]:
                return step
        return -1


START = Weights(0, ("start",), frozenset())
