"""Which engine gets the next request: a pure core, events in, choices out; no clock, no socket.

seen(engines, lineage) → choose(min_version, avoid, now) → started(key) → finished(key) | refused(key, now)

An engine qualifies for a slot if the version it serves lies on the current line, at or above the slot's minimum. Among those that do, the one with the fewest
requests of ours outstanding wins; ties go round. An engine that does not answer is left alone for a while, twice as long every time it happens again.

>>> from protocol.versions import Fork, Lineage, Version
>>> routing = Routing()
>>> routing.seen([Engine(key=("a", "boot:1"), url="http://a", version=Version(1, 4))], Lineage({1: Fork(0, 0)}, head=1))
>>> routing.choose(Version(1, 4), avoid=set(), now=0.0).url
'http://a'
>>> routing.choose(Version(1, 5), avoid=set(), now=0.0) is None
True
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from protocol.errors import DecodeError
from protocol.versions import Lineage, Version

EngineKey: TypeAlias = tuple[str, str]
"""Engine id and boot nonce: an engine that was restarted is another engine."""
FIRST_REST_S = 0.5
LONGEST_REST_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A routable engine as the registry has it."""

    key: EngineKey
    url: str
    version: Version
    span_lag: int = 0
    """Tokens after an update that its spans give to the new version although the old one sampled them."""
    prefix_cache: bool = False
    """Its requests may use keys and values of earlier ones."""

    @property
    def id(self) -> str:
        return self.key[0]


@dataclass(slots=True)
class _Load:
    outstanding: int = 0
    assigned: int = 0
    """Requests given to it so far: what ties are broken by."""
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0


@dataclass(slots=True)
class Routing:
    """Invariant: `outstanding` of every engine is the number of `started` less `finished` and `refused`."""

    lineage: Lineage | None = None
    trained: int = 0
    """Newest step trained on the line: no version of its head is newer."""
    _engines: dict[EngineKey, Engine] = field(default_factory=dict)
    _place: dict[EngineKey, int] = field(default_factory=dict)
    """n of each engine that is on the current line."""
    _loads: dict[EngineKey, _Load] = field(default_factory=dict)

    def seen(self, engines: Iterable[Engine], lineage: Lineage) -> None:
        """What the registry says now, on the line that the ledger has."""
        self.lineage = lineage
        self._engines = {engine.key: engine for engine in engines}
        self._place = {key: engine.version.n for key, engine in self._engines.items() if _on_line(lineage, engine.version)}
        self._loads = {key: load for key, load in self._loads.items() if key in self._engines or load.outstanding}
        for key in self._engines:
            self._loads.setdefault(key, _Load(assigned=min((load.assigned for load in self._loads.values()), default=0)))

    def knows(self, version: Version) -> bool:
        """Whether this run has, or once had, `version`, as far as we have read; if not, it is time to read the ledger again."""
        if self.lineage is None or version.incarnation not in self.lineage.forks:
            return False
        return version.incarnation != self.lineage.head or version.n <= self.trained

    def choose(self, min_version: Version | None, *, avoid: Collection[EngineKey], now: float) -> Engine | None:
        """The engine for a request, or None: wait for a change. Those in `avoid` are taken only if no other qualifies. `min_version` None: any."""
        floor = 0 if min_version is None else self._shared(min_version)
        if floor is None:
            return None
        able = [key for key, n in self._place.items() if n >= floor and self._loads[key].rests_until <= now]
        if not able:
            return None
        fresh = [key for key in able if key not in avoid] if avoid else able
        return self._engines[min(fresh or able, key=self._burden)]

    def _shared(self, version: Version) -> int | None:
        """N on the current line; None where the lineage we have says nothing of it."""
        if self.lineage is None:
            return None
        if version.incarnation == self.lineage.head:
            return version.n
        try:
            return self.lineage.shared(version)
        except DecodeError:
            return None

    def _burden(self, key: EngineKey) -> tuple[int, int]:
        load = self._loads[key]
        return load.outstanding, load.assigned

    def rest_ends(self, now: float) -> float | None:
        """When the next engine has rested enough to be tried again; None: none rests."""
        return min((load.rests_until for key, load in self._loads.items() if key in self._place and load.rests_until > now), default=None)

    def started(self, key: EngineKey) -> None:
        load = self._loads[key]
        load.outstanding += 1
        load.assigned += 1

    def finished(self, key: EngineKey, *, answered: bool = False) -> None:
        """The request is over; `answered`: the engine is alive."""
        load = self._loads[key]
        load.outstanding -= 1
        if answered:
            load.failures = 0

    def refused(self, key: EngineKey, *, now: float) -> None:
        """The request is over because the engine did not answer. Requests that fail while it rests already do not make the rest longer."""
        load = self._loads[key]
        load.outstanding -= 1
        if load.rests_until <= now:
            load.rests_until = now + min(FIRST_REST_S * 2**load.failures, LONGEST_REST_S)
            load.failures += 1

    def unfit(self, key: EngineKey) -> None:
        """Its answers contradict the registry: not chosen until the registry says so again."""
        self._engines.pop(key, None)
        self._place.pop(key, None)


def _on_line(lineage: Lineage, version: Version) -> bool:
    try:
        return lineage.contains(version)
    except DecodeError:  # a lineage older than the engine's news
        return False
