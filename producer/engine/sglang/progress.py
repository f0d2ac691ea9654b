"""Whether an engine still writes: pure. An engine that hangs answers whatever its scheduler is not needed for, so only new tokens count.

    FRESH ── nothing new for quiet_s ──► DOUBTED (a token is asked for) ── it comes, or anything else is new ──► FRESH
                                                                        ── neither ──► the engine hangs

>>> progress = Progress(quiet_s=60.0, now=0.0)
>>> progress.seen((1.0,), now=1.0), progress.doubted(now=60.0), progress.doubted(now=61.0)
(True, False, True)
>>> progress.seen((1.0,), now=62.0), progress.doubted(now=62.0)
(False, True)
>>> progress.excuse(now=63.0); progress.doubted(now=63.0)
False
"""

from __future__ import annotations


class Progress:
    """An idle engine is doubted as any other: one that hung while it had nothing to do never says that it has something now."""

    def __init__(self, *, quiet_s: float, now: float) -> None:
        self._quiet_s = quiet_s
        self._since = now
        self._sign: tuple[float, ...] = ()

    def seen(self, sign: tuple[float, ...], *, now: float) -> bool:
        """Counters as they are now; whether anything is new."""
        fresh = sign != self._sign
        if fresh:
            self._sign, self._since = sign, now
        return fresh

    def excuse(self, *, now: float) -> None:
        """It wrote a token for us, or cannot write: we paused it, or it takes weights."""
        self._since = now

    def doubted(self, *, now: float) -> bool:
        return now - self._since >= self._quiet_s
