"""Policy versions and lineage: what a version is, and how old a token is for a step.

A version is `(incarnation, n)`: an incarnation is one attachment of a trainer, n counts optimizer steps and goes on over a
resume. Each incarnation but the first forks from its parent after `fork_step`:

    incarnation 1:  1:0  1:1 ... 1:7  1:8  1:9
                                  └── incarnation 2:  2:8  2:9  2:10        (fork_step 7; 2:7 is 1:7 again)

A token written by 1:9 and used in step 11 of incarnation 2 shares history up to n' = 7, so its staleness is (11 - 1) - 7 = 3:

>>> lineage = Lineage({1: Fork(0, 0), 2: Fork(1, 7)}, head=2)
>>> lineage.shared(Version(1, 9)), lineage.staleness(Version(1, 9), step=11)
(7, 3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from protocol.errors import DecodeError

MAX_NUMBER = 2**31 - 1
"""Incarnations and steps are int32 on the wire."""
_VERSION = re.compile(r"(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,9})")


class Version(NamedTuple):
    """A policy version, ordered by `(incarnation, n)`, written `"2:7"`."""

    incarnation: int
    n: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.n}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `"2:7"`. Raises `DecodeError` on anything else, such as an engine's own `"default"` or `"boot:…"`."""
        match = _VERSION.fullmatch(text)
        version = cls(int(match[1]), int(match[2])) if match else None
        if version is None or max(version) > MAX_NUMBER:
            raise DecodeError("version", f'got {text[:40]!r}, expected "incarnation:n" such as "2:7"')
        return version


class Fork(NamedTuple):
    """Where an incarnation left its parent: the parent shares versions up to and including `step`. Parent 0: none."""

    parent: int
    step: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """The fork table seen from one incarnation. Pure; frozen into the journal when a step opens."""

    forks: Mapping[int, Fork]
    head: int

    def limits(self) -> dict[int, int | None]:
        """For each incarnation on the head's line, the newest n that the head shares; None for the head itself. Empty before the first attach.

        Raises: `DecodeError` for a fork table that is no tree.
        """
        if not self.head:
            return {}
        limits: dict[int, int | None] = {self.head: None}
        at, limit = self.head, None
        while (fork := self._fork(at)).parent:
            at, limit = fork.parent, fork.step if limit is None else min(fork.step, limit)
            limits[at] = limit
        return limits

    def shared(self, version: Version) -> int:
        """Newest n of the head's line that the writer of `version` shares.

        Raises: `DecodeError` for an incarnation that is not in the fork table, or shares nothing with the head.
        """
        limits = self.limits()
        incarnation, n = version
        while incarnation not in limits:
            fork = self._fork(incarnation)
            if not fork.parent:
                raise DecodeError("version", f"{version} shares no version with incarnation {self.head}")
            incarnation, n = fork.parent, min(n, fork.step)
        limit = limits[incarnation]
        return n if limit is None else min(n, limit)

    def _fork(self, incarnation: int) -> Fork:
        """An entry of the table; a parent is always older than its child, so every walk to the root ends."""
        fork = self.forks.get(incarnation)
        if fork is None:
            raise DecodeError("version", f"incarnation {incarnation} is not one of this run's")
        if not 0 <= fork.parent < incarnation or fork.step < 0:
            raise DecodeError(
                "forks", f"incarnation {incarnation} forks from {fork.parent} after step {fork.step}, expected an older parent and a step of 0 or more"
            )
        return fork

    def contains(self, version: Version) -> bool:
        """Whether `version` lies on the head's own line, that is, whether an engine serving it may be used now."""
        return version.incarnation in self.limits() and self.shared(version) == version.n

    def staleness(self, version: Version, step: int) -> int:
        """Staleness in steps of a token written by `version` and used in `step` of the head.

        Raises: `ValueError` when negative: a token from the future is a bug, never clipped.
        """
        staleness = (step - 1) - self.shared(version)
        if staleness < 0:
            raise ValueError(f"token of version {version} used in step {step} of incarnation {self.head} has staleness {staleness}")
        return staleness
