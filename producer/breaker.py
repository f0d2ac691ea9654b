"""Whether an engine that failed may be asked again: a pure core, no clock.

    CLOSED ──`IN_A_ROW` failures, or half of `WINDOW`, or one that is certain──► OPEN ──rest over──► HALF OPEN ──the probe is answered──► CLOSED
                                                                                            ▲                     └──the probe fails──┐
                                                                                            └────────── twice the rest ───────────────┘

One request in twenty that fails opens nothing; an engine that is dead gets one request a rest, which is the probe: any request, that of a real sample.
Failures are counted among requests that *started* one after the other: of many that start at once those that fail are over first, and by their ends there would
be a row of them. What was under way when it opened says nothing of now: neither its success nor its failure counts. That holds for a probe too: its first token
closes the breaker, and by its last one there may be another opening with a probe of its own. So probes have numbers.

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
"""Requests in the order of their starts: one that failed, and those right before it."""
_KNOWN = 4096
"""Starts that are remembered; of one before them nothing is made any more."""
FIRST_REST_S, LONGEST_REST_S = 0.5, 15.0
FIRST_EXILE_S, LONGEST_EXILE_S = 8.0, 120.0
"""Rests of an engine whose answers are of no use: a person, or new weights, must mend it, and each probe costs a sample an attempt."""
_ROW, _LAST = (1 << IN_A_ROW) - 1, (1 << WINDOW) - 1


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
    number: int = 0
    """Of the request that started last."""
    _failures: int = 0
    """By start, the last one in the lowest bit; 1: it has failed."""
    _openings: int = 0
    """In a row."""
    _since: int = 0
    """What started up to this number was under way at an opening that is over."""

    @property
    def probing(self) -> bool:
        return bool(self._probe)

    def admits(self, now: float) -> bool:
        """A request may go there."""
        return not self.reason or (not self.probing and self.until <= now)

    def started(self) -> int:
        """A request that was admitted went there, as `number`: the number of the probe that it is; 0: it is none."""
        self._start()
        if not self.reason:
            return 0
        self._probes += 1
        self._probe = self._probes
        return self._probe

    def succeeded(self, *, probe: int, number: int = 0) -> bool:
        """A request was answered; True: that closed it. `number`: as it started; 0: just now."""
        if not number:
            self._start()
        if not self.reason or not self._is(probe):
            return False
        self.reason, self._probe, self._failures, self._openings, self._since = "", 0, 0, 0, self.number
        return True

    def failed(self, *, now: float, reason: str, probe: int = 0, number: int = 0, certain: bool = False, exile: bool = False) -> bool:
        """A request failed by the engine's fault; True: that opened it, again or for the first time.

        `number`: as it started; 0: just now. `certain`: one such failure is enough. `exile`: its answers are of no use.
        """
        if self.reason and not self._is(probe):
            return False
        if number > self.number or 0 < number <= self._since:  # it began before that, or under a breaker before this one
            return False
        if not number:
            number = self._start()
        if not (self._too_many(self.number - number) or self.reason or certain):
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

    def _start(self) -> int:
        self.number += 1
        self._failures = self._failures << 1 & (1 << _KNOWN) - 1
        return self.number

    def _too_many(self, age: int) -> bool:
        """With the failure of the request that started `age` others ago."""
        self._failures |= (1 << age) & (1 << _KNOWN) - 1
        rows = (self._failures >> first & _ROW for first in range(max(0, age - IN_A_ROW + 1), age + 1))
        return any(row == _ROW for row in rows) or 2 * (self._failures >> age & _LAST).bit_count() >= WINDOW

    def _is(self, probe: int) -> bool:
        """`probe` is the number of the one under way."""
        return probe > 0 and probe == self._probe
