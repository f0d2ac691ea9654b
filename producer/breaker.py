"""Whether an engine that failed may be asked again: a pure core, no clock.

    CLOSED ──`IN_A_ROW` failures, or half of the last `WINDOW`, or one that is certain──► OPEN ──rest over──► HALF OPEN ──the probe is answered──► CLOSED
                                                                                            ▲                     └──the probe fails──┐
                                                                                            └────────── twice the rest ───────────────┘

One request in twenty that fails opens nothing; an engine that is dead gets one request a rest, which is the probe: any request, that of a real sample. What was
under way when it opened says nothing of now: neither its success nor its failure counts.

>>> breaker = Breaker()
>>> [breaker.failed(now=0.0, reason="broke the connection") for _ in range(IN_A_ROW)], breaker.admits(0.1)
([False, False, True], False)
>>> breaker.admits(FIRST_REST_S), breaker.started(), breaker.admits(FIRST_REST_S)
(True, True, False)
>>> breaker.succeeded(probe=True), breaker.reason
(True, '')
"""

from __future__ import annotations

from dataclasses import dataclass

IN_A_ROW = 3
WINDOW = 20
FIRST_REST_S, LONGEST_REST_S = 0.5, 15.0
FIRST_EXILE_S, LONGEST_EXILE_S = 8.0, 120.0
"""Rests of an engine whose answers are of no use: a person, or new weights, must mend it, and each probe costs a sample an attempt."""
_MASK = (1 << WINDOW) - 1


@dataclass(slots=True)
class Breaker:
    """Of one boot of one engine. Invariant: while it is open, at most one probe is under way."""

    reason: str = ""
    """Why it is open; empty: it is closed."""
    until: float = 0.0
    """When its rest ends."""
    probing: bool = False
    _in_a_row: int = 0
    _recent: int = 0
    """Outcomes, newest in the lowest bit; 1: failed."""
    _openings: int = 0
    """In a row."""

    def admits(self, now: float) -> bool:
        """A request may go there."""
        return not self.reason or (not self.probing and self.until <= now)

    def started(self) -> bool:
        """A request that was admitted went there; True: it is the probe."""
        self.probing = bool(self.reason)
        return self.probing

    def succeeded(self, *, probe: bool) -> bool:
        """A request was answered; True: that closed it."""
        if not self.reason:
            self._in_a_row = 0
            self._recent = self._recent << 1 & _MASK
        elif probe and self.probing:
            self.reason, self.probing, self._in_a_row, self._recent, self._openings = "", False, 0, 0, 0
            return True
        return False

    def failed(self, *, now: float, reason: str, probe: bool = False, certain: bool = False, exile: bool = False) -> bool:
        """A request failed by the engine's fault; True: that opened it, again or for the first time.

        `certain`: one such failure is enough. `exile`: its answers are of no use.
        """
        if self.reason and not (probe and self.probing):
            return False
        self._in_a_row += 1
        self._recent = (self._recent << 1 | 1) & _MASK
        if not (self.reason or certain or self._in_a_row >= IN_A_ROW or 2 * self._recent.bit_count() >= WINDOW):
            return False
        first_s, longest_s = (FIRST_EXILE_S, LONGEST_EXILE_S) if exile else (FIRST_REST_S, LONGEST_REST_S)
        self.reason, self.probing = reason or "failed", False
        self.until = now + min(first_s * 2.0**self._openings, longest_s)
        self._openings = min(self._openings + 1, 30)
        return True

    def dropped(self, *, probe: bool) -> None:
        """A request ended without telling anything of the engine: another may be the probe."""
        if probe:
            self.probing = False
