"""How many groups a producer has under way, by what its engines can hold: a pure core, no clock.

    all is well, the limit is reached ──► a little more          a cache nearly full, a long queue ──► a fifth less, then wait for that to show

Additive increase, multiplicative decrease. Nothing is taken back: a decrease shows only when groups have ended, so another waits until no more than the limit
are under way. Engines that do not tell how full they are limit nothing: the limit is then what the configuration allows.

A full cache costs more than it seems: SGLang takes running requests back (retraction) and computes them again. A queue costs only time, so a short one is fine,
and so is a long one at a single look: groups begin together. With several producers each sees the load of all and gives way in the same proportion.

>>> pace = Pace(most=64)
>>> crowded, fine = [Load(kv_usage=0.97, running=64)], [Load(kv_usage=0.6, running=50)]
>>> pace.seen(crowded, inflight=64), pace.seen(crowded, inflight=60), pace.seen(crowded, inflight=51), pace.seen(fine, inflight=40)
(51, 51, 40, 42)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FULL = 0.9
"""Share of the KV cache in use, over all engines, from which on it counts as nearly full."""
DECREASE = 0.8
_QUEUED = 0.25
"""A queue of this share of what runs is long."""
_STEPS = 32
"""From nothing to all in so many increases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an engine says of itself."""

    kv_usage: float = 0.0
    """0 to 1; 0 also where it does not tell."""
    running: int = 0
    queued: int = 0


@dataclass(slots=True)
class Pace:
    """Invariant: 1 <= limit <= most."""

    most: int
    limit: int = 0
    _settling: bool = False
    """A decrease has not shown yet."""
    _queued: int = -1
    """At the look before, if the queue was long then; else -1."""

    def __post_init__(self) -> None:
        self.limit = self.most

    def seen(self, loads: Sequence[Load], *, inflight: int) -> int:
        """The limit, after a look at the engines while `inflight` groups of ours were under way."""
        telling = [load.kv_usage for load in loads if load.kv_usage > 0]
        kv_usage = sum(telling) / len(telling) if telling else 0.0
        queued, running = sum(load.queued for load in loads), sum(load.running for load in loads)
        is_long = queued > _QUEUED * running
        crowded = kv_usage >= FULL or (is_long and 0 <= self._queued <= queued)
        self._queued = queued if is_long else -1
        if self._settling and inflight <= self.limit:
            self._settling = False
        if self._settling:
            return self.limit
        if crowded and inflight:
            self.limit = max(1, int(DECREASE * min(self.limit, inflight)))
            self._settling = inflight > self.limit
        elif not crowded and not queued and inflight >= self.limit:
            self.limit = min(self.most, self.limit + max(1, self.most // _STEPS))
        return self.limit
