"""Which engine gets the next request: a pure core, events in, choices out; no clock, no socket.

seen(engines, lineage) → choose(min_version, …, now) → started(key, …) → [answered(key)] → finished(key) | refused(key, now)

An engine qualifies for a slot if the version it serves lies on the current line, at or above the slot's minimum. Among those that do, the one with the fewest
tokens of ours outstanding wins; ties go round. A request costs the tokens it may still sample, and a part of those of its prompt, which are computed together.
Requests with the same prefix go where it was computed before, as long as that engine keeps keys and values and is not much more loaded than the least loaded
one. What fails often rests (`producer.breaker`). Engines of the evaluation's own take nothing else, and evaluations prefer them.

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

from producer.breaker import Breaker
from protocol.errors import DecodeError
from protocol.versions import Lineage, Version

EngineKey: TypeAlias = tuple[str, str]
"""Engine id and boot nonce: an engine that was restarted is another engine."""
ROLLOUT, EVAL = "rollout", "eval"
_PROMPT_SHARE = 0.25
"""Of a prompt's tokens count as so many sampled ones: they need as much memory and far less time."""
_AHEAD_SHARE, _AHEAD_REQUESTS = 0.25, 4
"""An engine that has the prefix may be ahead of the least loaded one by this share of its load and so many requests like the one to place. A prompt computed
once more costs little, a batch that is much longer than the others makes stragglers."""
_REMEMBERED = 256
"""So many engines that rest are remembered although the registry does not have them now."""
_PREFIXES = 4096
"""So many prefixes are remembered, those used last."""


def cost_of(prompt_tokens: int, new_tokens: int) -> float:
    """What a request is to its engine, in sampled tokens, at most."""
    return _PROMPT_SHARE * prompt_tokens + new_tokens


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
    fleet: str = ROLLOUT
    """Whose requests it takes: rollout or eval."""
    adapters: str = ""
    """Its versions are adapters, whose names begin so."""
    mixed: bool = False
    """It stands for several that serve different versions now: no two of its requests may share keys and values."""

    @property
    def id(self) -> str:
        return self.key[0]


@dataclass(slots=True)
class _Load:
    outstanding: int = 0
    cost: float = 0.0
    """Of what is outstanding."""
    assigned: int = 0
    """Requests given to it so far: what ties are broken by."""
    breaker: Breaker = field(default_factory=Breaker)


@dataclass(slots=True)
class Routing:
    """Invariant: `outstanding` of every engine is the number of `started` less `finished` and `refused`, and its cost is theirs."""

    lineage: Lineage | None = None
    trained: int = 0
    """Newest step trained on the line: no version of its head is newer."""
    _engines: dict[EngineKey, Engine] = field(default_factory=dict)
    _place: dict[EngineKey, int] = field(default_factory=dict)
    """n of each engine that is on the current line."""
    _loads: dict[EngineKey, _Load] = field(default_factory=dict)
    _homes: dict[str, dict[EngineKey, Version]] = field(default_factory=dict)
    """Engines that computed a prefix, and the version they had acked then, which is what their cache knows it by."""

    def seen(self, engines: Iterable[Engine], lineage: Lineage) -> None:
        """What the registry says now, on the line that the ledger has."""
        self.lineage = lineage
        self._engines = {engine.key: engine for engine in engines}
        self._place = {key: engine.version.n for key, engine in self._engines.items() if _on_line(lineage, engine.version)}
        gone = [key for key, load in self._loads.items() if key not in self._engines and not load.outstanding]
        kept = [key for key in gone if self._loads[key].breaker.reason][-_REMEMBERED:]  # it may be back soon, and the same as it was
        for key in set(gone) - set(kept):
            del self._loads[key]
        for key in self._engines:
            self._loads.setdefault(key, _Load(assigned=min((load.assigned for load in self._loads.values()), default=0)))

    def knows(self, version: Version) -> bool:
        """Whether this run has, or once had, `version`, as far as we have read; if not, it is time to read the ledger again."""
        if self.lineage is None or version.incarnation not in self.lineage.forks:
            return False
        return version.incarnation != self.lineage.head or version.n <= self.trained

    def choose(
        self,
        min_version: Version | None,
        *,
        avoid: Collection[EngineKey],
        now: float,
        exact: Version | None = None,
        fleet: str = ROLLOUT,
        prefix: str = "",
        cost: float = 1.0,
    ) -> Engine | None:
        """The engine for a request, or None: wait for a change. Those in `avoid` are taken only if no other qualifies.

        `min_version` None: any on the line. `exact`: only what serves this very version, on the line or not. `prefix` names what the prompt begins with.
        """
        able = [key for key in self._qualified(min_version, exact) if self._takes(key, fleet) and self._loads[key].breaker.admits(now)]
        if fleet == EVAL:
            able = [key for key in able if self._engines[key].fleet == EVAL] or able
        if avoid:
            able = [key for key in able if key not in avoid] or able
        if not able:
            return None
        least = min(able, key=self._burden)
        home = min(self._at_home(prefix, able), key=self._burden, default=least)
        bound = self._loads[least].cost * (1 + _AHEAD_SHARE) + _AHEAD_REQUESTS * cost
        return self._engines[home if self._loads[home].cost <= bound else least]

    def _qualified(self, min_version: Version | None, exact: Version | None) -> Iterable[EngineKey]:
        if exact is not None:
            return (key for key, engine in self._engines.items() if engine.version == exact)
        floor = 0 if min_version is None else self._shared(min_version)
        return () if floor is None else (key for key, n in self._place.items() if n >= floor)

    def _takes(self, key: EngineKey, fleet: str) -> bool:
        return fleet == EVAL or self._engines[key].fleet != EVAL

    def _at_home(self, prefix: str, able: list[EngineKey]) -> list[EngineKey]:
        homes = self._homes.get(prefix)
        return [key for key in able if homes.get(key) == self._engines[key].version] if homes else []

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

    def _burden(self, key: EngineKey) -> tuple[float, int]:
        load = self._loads[key]
        return load.cost, load.assigned

    def rest_ends(self, now: float) -> float | None:
        """When the next engine has rested enough to be tried again; None: none rests."""
        breakers = [load.breaker for key, load in self._loads.items() if key in self._engines]
        return min((breaker.until for breaker in breakers if breaker.reason and breaker.until > now), default=None)

    def started(self, key: EngineKey, *, cost: float = 1.0, prefix: str = "") -> int:
        """A request went to the engine that was chosen: the number of the probe that it is, as the engine has rested; 0: it is none."""
        load = self._loads[key]
        load.outstanding += 1
        load.cost += cost
        load.assigned += 1
        if prefix and (engine := self._engines[key]).prefix_cache:
            homes = self._homes.pop(prefix, {})
            self._homes[prefix] = homes | {key: engine.version}
            if len(self._homes) > _PREFIXES:
                del self._homes[next(iter(self._homes))]
        return load.breaker.started()

    def number(self, key: EngineKey) -> int:
        """Of the request that went there last."""
        return self._loads[key].breaker.number

    def answered(self, key: EngineKey, *, probe: int) -> bool:
        """A request that goes on got something of use. True: the engine is well again."""
        return (load := self._loads.get(key)) is not None and load.breaker.succeeded(probe=probe, number=load.breaker.number)

    def finished(self, key: EngineKey, *, answered: bool = False, cost: float = 1.0, probe: int = 0, number: int = 0) -> bool:
        """The request is over; `answered`: the engine is alive. True: the engine may be asked again, as it might not before."""
        breaker = self._over(key, cost)
        return breaker.succeeded(probe=probe, number=number) if answered else breaker.dropped(probe=probe)

    def refused(
        self,
        key: EngineKey,
        *,
        now: float,
        cost: float = 1.0,
        probe: int = 0,
        number: int = 0,
        reason: str = "",
        certain: bool = False,
        exile: bool = False,
    ) -> bool:
        """The request, which started as `number`, is over by a fault of the engine. True: it rests now. Requests that fail while it rests already do not make
        the rest longer.
        """
        return self._over(key, cost).failed(now=now, reason=reason, probe=probe, number=number, certain=certain, exile=exile)

    def blamed(self, key: EngineKey, *, now: float, reason: str, number: int = 0) -> bool:
        """A request that is over was of its making after all. True: it rests now."""
        return (load := self._loads.get(key)) is not None and load.breaker.failed(now=now, reason=reason, number=number, exile=True)

    def _over(self, key: EngineKey, cost: float) -> Breaker:
        load = self._loads[key]
        load.outstanding -= 1
        load.cost = load.cost - cost if load.outstanding else 0.0
        return load.breaker

    def unfit(self, key: EngineKey) -> bool:
        """Its answers contradict the registry: not chosen until the registry says so again. False: it was not to be chosen before."""
        self._place.pop(key, None)
        return self._engines.pop(key, None) is not None

    @property
    def resting(self) -> dict[EngineKey, str]:
        """Engines that rest, and why."""
        return {key: load.breaker.reason for key, load in self._loads.items() if key in self._engines and load.breaker.reason}


def _on_line(lineage: Lineage, version: Version) -> bool:
    try:
        return lineage.contains(version)
    except DecodeError:  # a lineage older than the engine's news
        return False
