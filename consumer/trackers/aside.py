"""A tracker in a thread of its own: whatever it does, training goes on.

log ─► queue of 1000 lines ─► thread: made at the first line ─► tracker.log │ fails or falls behind: said once, then nothing more is given to it
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

_LOG = logging.getLogger(__name__)
_LINES = 1000
CLOSE_S = 20.0
"""A tracker may take so long for its last lines."""


class Tracker(Protocol):
    """All calls come from one thread; any exception ends it."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """May come again for a step, and for earlier ones: a resumed run repeats the steps after its checkpoint."""

    def close(self) -> None:
        """Everything is written on return."""


class Aside:
    """Invariant: no call raises, and none waits for the tracker but `close`, at most `CLOSE_S`."""

    def __init__(self, name: str, make: Callable[[int], Tracker], *, close_s: float = CLOSE_S) -> None:
        """`make` gets the first step, in the thread."""
        self._name, self._make, self._close_s = name, make, close_s
        self._lines: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_LINES)
        self._failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker:{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._failed.is_set():
            return
        try:
            self._lines.put_nowait((step, values))
        except queue.Full:
            self._fail(f"is {_LINES} steps behind")

    def close(self) -> None:
        if not self._failed.is_set():
            try:
                self._lines.put(None, timeout=self._close_s)
            except queue.Full:
                self._fail(f"is {_LINES} steps behind")
        self._thread.join(0.0 if self._failed.is_set() else self._close_s)
        if self._thread.is_alive() and not self._failed.is_set():
            self._fail(f"did not end within {self._close_s:g} s")

    def _run(self) -> None:
        tracker: Tracker | None = None
        try:
            while (line := self._lines.get()) is not None and not self._failed.is_set():
                step, values = line
                tracker = tracker or self._make(step)
                tracker.log(step, values)
            if tracker is not None:
                tracker.close()
        except Exception as problem:  # noqa: BLE001 - whatever somebody else's package raises
            self._fail(f"failed: {type(problem).__name__}: {problem}")

    def _fail(self, how: str) -> None:
        if not self._failed.is_set():
            self._failed.set()
            _LOG.warning("tracker %s %s; training goes on without it, metrics.jsonl has every step", self._name, how)
