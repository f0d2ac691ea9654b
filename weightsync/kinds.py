"""Which versions are published whole and which as what changed: a pure decision.

Whole is the first version that this publisher makes of an incarnation, every `every`-th, one whose parents are not all in the store any more, and one with
other tensors than the version before. Where a delta was not worth it and the store wrote a whole version instead, the next ones are whole too without trying,
twice as many with every further such version.

>>> kinds = Kinds(every=3)
>>> def publish(n):
...     parent = kinds.parent(Version(1, n), kinds.chain, ("w",))
...     kinds.published(Version(1, n), "delta" if parent else "full", ("w",), tried=parent is not None)
...     return str(parent)
>>> [publish(n) for n in range(5)]
['None', '1:0', '1:1', 'None', '1:3']
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from protocol.versions import Version
from weightsync.snapshot import TensorBytes

Layout: TypeAlias = "tuple[object, ...]"
"""Equal for versions with equal names, types and shapes."""


class Kinds:
    """`parent` before a version is written, `published` once its pointer has moved. `every`: 0 or 1: all whole; n: every n-th."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._layout: Layout = ()
        self._skip, self._next_skip = 0, 1
        self.chain: tuple[Version, ...] = ()
        """The newest version and what it is made from, the whole one first; empty: nothing is published yet."""

    def parent(self, version: Version, there: Collection[Version], layout: Layout) -> Version | None:
        """What a delta of `version` applies to; None: it is to be whole. `there`: the versions in the store."""
        chain = self.chain
        if not chain or self._skip or len(chain) >= self._every or layout != self._layout:
            return None
        fits = chain[-1].incarnation == version.incarnation and chain[-1] < version
        return chain[-1] if fits and set(chain) <= set(there) else None

    def published(self, version: Version, kind: str, layout: Layout, *, tried: bool) -> None:
        """`kind`: what was written in the end; `tried`: a delta was asked for."""
        self.chain = (*self.chain, version) if kind == "delta" else (version,)
        self._layout = layout
        if kind == "delta":
            self._skip, self._next_skip = 0, 1
        elif tried:
            self._skip, self._next_skip = self._next_skip, min(2 * self._next_skip, self._every)
        else:
            self._skip = max(0, self._skip - 1)


def layout_of(tensors: Mapping[str, TensorBytes]) -> Layout:
    return tuple((name, tensors[name].dtype, tensors[name].shape) for name in sorted(tensors))
