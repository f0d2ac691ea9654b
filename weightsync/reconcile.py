"""When an engine takes which version: the pure core of the reconciler. Events in, commands out; no clock, no socket.

    Wait ──seen──► Prepare(v) ──prepared──► Pause(v) ──granted──► Apply(v) ──applied──► Wait
                       │ failed                 │ refused              ├─ lapsed: look, and ask again
                       └────────► Wait ◄────────┴──────────────────────┘ failed: unfit (backoff)

Invariants: the target is always the newest version seen; an engine never goes back within an incarnation (rule V3); nothing is applied that was not prepared;
what the engine holds is unknown at take-over and after a failure, so the next update is made in full whatever the registry says (rule W1);
an ack that the registry forgot is made again (rule R1).

>>> core = Core()
>>> core.seen(Sight(newest=Version(1, 3), state=EngineState.STARTING))
>>> core.next(now=0.0)
Prepare(version=Version(incarnation=1, n=3))
>>> core.prepared(Version(1, 3)); core.next(now=0.1)
Pause(version=Version(incarnation=1, n=3))
>>> core.granted(); core.next(now=0.1)
Apply(version=Version(incarnation=1, n=3))
>>> core.applied(Version(1, 3), now=0.2); core.next(now=0.2)
Wait(until=None, for_pause=False)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from protocol.messages import EngineState
from protocol.versions import Version

BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What Redis says now."""

    newest: Version | None
    state: EngineState | None
    """None: this boot is not registered, so it could not ack."""
    acked: Version | None = None
    """What this boot acked, as the registry remembers it; None: not told. Redis may have lost the newest ack (rule R1)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the news that reconcilers get, or until then."""

    until: float | None
    for_pause: bool = False
    """Others hold the pause: until any engine's news."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check every byte of it while the engine serves."""

    version: Version


@dataclass(frozen=True, slots=True)
class Pause:
    """Ask for the right to pause the engine."""

    version: Version


@dataclass(frozen=True, slots=True)
class Apply:
    """Pause, load, continue, verify, ack."""

    version: Version


Command: TypeAlias = Wait | Prepare | Pause | Apply


class Core:
    """One engine's update state."""

    def __init__(self, *, min_interval_s: float = 0.0) -> None:
        self._min_interval_s = min_interval_s
        self._sight = Sight(newest=None, state=None)
        self._prepared: Version | None = None
        self._granted = False
        self._refused = False
        self._failures = 0
        self._not_before = 0.0
        self.serving: Version | None = None
        """What the engine is known to serve; None: unknown, so everything is due."""
        self._floor: Version | None = None

    # events ---------------------------------------------------------------------------------------------------------------------------------

    def seen(self, sight: Sight) -> None:
        """A fresh look at Redis; it also ends a refusal."""
        self._sight, self._refused = sight, False
        if self._floor is None:  # an ack of this boot that another core made
            self._floor = sight.acked

    def prepared(self, version: Version) -> None:
        self._prepared = version

    def prepare_failed(self, now: float) -> None:
        """The engine still serves what it served: it stays as it is, and the newest version is looked for again."""
        self._prepared, self._granted = None, False
        self._fail(now)

    def granted(self) -> None:
        self._granted = True

    def refused(self) -> None:
        self._refused = True

    def lapsed(self) -> None:
        """The right to pause was granted and ran out before it was used: whose the engine is now, a look tells."""
        self._granted, self._refused = False, True

    def applied(self, version: Version, now: float) -> None:
        """Verified and acked."""
        self.serving = self._floor = version
        self._sight = Sight(newest=self._sight.newest, state=EngineState.ROUTABLE, acked=version)
        self._prepared, self._granted, self._failures = None, False, 0
        self._not_before = now + self._min_interval_s

    def apply_failed(self, now: float) -> None:
        """Nobody knows what the engine holds."""
        self.serving, self._prepared, self._granted = None, None, False
        self._sight = Sight(newest=self._sight.newest, state=EngineState.UNFIT)
        self._fail(now)

    def lost(self) -> None:
        """Another reconciler had the engine in between."""
        self.serving, self._prepared, self._granted = None, None, False

    def _fail(self, now: float) -> None:
        self._not_before = now + min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(self._failures, 16))
        self._failures += 1

    # commands -------------------------------------------------------------------------------------------------------------------------------

    @property
    def up_to_date(self) -> bool:
        """The engine serves the newest version, and the registry knows it."""
        return self._sight.newest is not None and self.serving == self._sight.newest and self.due is None

    @property
    def due(self) -> Version | None:
        """The version to go for; None when there is nothing to do."""
        newest, state = self._sight.newest, self._sight.state
        if newest is None or state is None or state is EngineState.LEAVING or self._is_back(newest):
            return None
        known = self.serving is not None and state is EngineState.ROUTABLE and self._sight.acked in (None, self.serving)
        return None if known and newest == self.serving else newest

    def _is_back(self, newest: Version) -> bool:
        """A lower incarnation is no way back: Redis lost the attachment of the higher one, and what it published with it (rule R1)."""
        return self._floor is not None and newest.incarnation == self._floor.incarnation and newest.n < self._floor.n

    def next(self, now: float) -> Command:
        """What to do now. Ask again after each event."""
        version = self.due
        if version is None or self._refused:
            return Wait(None, for_pause=version is not None)
        if now < self._not_before:
            return Wait(self._not_before)
        if self._prepared != version:
            return Prepare(version)
        return Apply(version) if self._granted else Pause(version)
