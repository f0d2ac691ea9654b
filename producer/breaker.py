"""Whether an engine that failed may be asked again: a pure core, no clock.

    CLOSED ──`IN_A_ROW` failures, or half of the last `WINDOW`, or one that is certain──► OPEN ──rest over──► HALF OPEN ──the probe is answered──► CLOSED
                                                                                            ▲                     └──the probe fails──┐
                                                                                            └────────── twice the rest ───────────────┘

One request in twenty that fails opens nothing; an engine that is dead gets one request a rest, which is the probe: any request, that of a real sample. What was
under way when it opened says nothing of now: neither its success nor its failure counts. That holds for a probe too: its first token closes the breaker, and by
its last one there may be another opening with a probe of its own. So probes have numbers.

>>> breaker = Breaker()
>>> [breaker.failed(now=0.0, reason="broke the connection") for _ in range(IN_A_ROW)], breaker.admits(0.1)
([False, False, True], False)
>>> breaker.admits(FIRST_REST_S), breaker.started(), breaker.admits(FIRST_REST_S)
(True, 1, False)
>>> breaker.succeeded(probe=1), breaker.reason
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
    _probe: int = 0
    """Number of the probe under way; 0: none is."""
    _probes: int = 0
    """So many have been sent."""
    _in_a_row: int = 0
    _recent: int = 0
    """Outcomes, newest in the lowest bit; 1: failed."""
    _openings: int = 0
    """In a row."""

    @property
    def probing(self) -> bool:
        return bool(self._probe)

    def admits(self, now: float) -> bool:
        """A request may go there."""
        return not self.reason or (not self.probing and self.until <= now)

    def started(self) -> int:
        """A request that was admitted went there: the number of the probe that it is; 0: it is none."""
        if not self.reason:
            return 0
        self._probes += 1
        self._probe = self._probes
        return self._probe

    def succeeded(self, *, probe: int) -> bool:
        """A request was answered; True: that closed it."""
        if not self.reason:
            self._in_a_row = 0
            self._recent = self._recent << 1 & _MASK
        elif self._is(probe):
            self.reason, self._probe, self._in_a_row, self._recent, self._openings = "", 0, 0, 0, 0
            return True
        return False

    def failed(self, *, now: float, reason: str, probe: int = 0, certain: bool = False, exile: bool = False) -> bool:
        """A request failed by the engine's fault; True: that opened it, again or for the first time.

        `certain`: one such failure is enough. `exile`: its answers are of no use.
        """
        if self.reason and not self._is(probe):
            return False
        self._in_a_row += 1
        self._recent = (self._recent << 1 | 1) & _MASK
        if not (self.reason or certain or self._in_a_row >= IN_A_ROW or 2 * self._recent.bit_count() >= WINDOW):
            return False
        first_s, longest_s = (FIRST_EXILE_S, LONGEST_EXILE_S) if exile else (FIRST_REST_S, LONGEST_REST_S)
        self.reason, self._probe = reason or "failed", 0
        self.until = now + min(first_s * 2.0**self._openings, longest_s)
        self._openings = min(self._openings + 1, 30)
        return True

    def dropped(self, *, probe: int) -> bool:
        """A request ended without telling anything of the engine. True: it was the probe, and another may be it now."""
        if not self._is(probe):
            return False
        self._probe = 0
        return True

    def _is(self, probe: int) -> bool:
        """`probe` is the number of the one under way."""
        return probe > 0 and probe == self._probe
