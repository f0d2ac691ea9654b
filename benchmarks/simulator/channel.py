"""The weight channel and the engine registry as the scripts of `weightsync/lua` have them, one method a script, over plain dictionaries.

The scripts have no pure core of their own, so this is a model of them: what it may get wrong is what those scripts do, not what the reconcilers, producers and
trainers around it do with the answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.errors import Fenced, LedgerRegressed, ManifestError, StepOrder, Superseded, WeightError
from protocol.messages import EngineState
from protocol.versions import Version

TTL_MS = 10_000
LOCK_MS = 5_000
CLAIM_MS = 3_000
PIN_MS = 60_000


@dataclass(slots=True)
class Facts:
    boot: str
    state: EngineState = EngineState.STARTING
    version: Version | None = None
    target: Version | None = None
    expires: int = 0
    superseded: tuple[str, ...] = ()


@dataclass(slots=True)
class Look:
    """What `look.lua` answers."""

    state: EngineState | None = None
    newest: Version | None = None
    acked: Version | None = None
    locked_ms: int = 0


@dataclass(slots=True)
class Channel:
    """Times are of the server's clock, in milliseconds. `keeps`: the rules that hold."""

    keeps: frozenset[str]
    facts: dict[str, Facts] = field(default_factory=dict)
    locks: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """Engine → boot, reconciler, until when."""
    held: dict[str, int] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)
    pins: dict[str, tuple[Version, int]] = field(default_factory=dict)
    newest: Version | None = None
    digests: dict[Version, str] = field(default_factory=dict)
    dying: set[Version] = field(default_factory=set)

    # registry -------------------------------------------------------------------------------------------------------------------------------

    def beat(self, now: int, engine: str, boot: str) -> bool:
        facts = self.facts.get(engine)
        fresh = facts is None or facts.boot != boot
        if fresh:
            past: tuple[str, ...] = ()
            if facts is not None:
                if boot in facts.superseded and "boot_nonce" in self.keeps:
                    raise Superseded(f"engine {engine}: boot {boot} was superseded")
                past = (*facts.superseded, facts.boot)[-16:]
            facts = self.facts[engine] = Facts(boot, superseded=past)
            for table in (self.pins, self.held, self.claims):
                for name in [name for name in table if name.partition("/")[0] == engine]:
                    del table[name]
        assert facts is not None
        facts.expires = now + TTL_MS
        if facts.version is not None:
            self.pins[f"{engine}/serving"] = (facts.version, now + PIN_MS)
        if facts.target is not None:
            self.pins[f"{engine}/target"] = (facts.target, now + PIN_MS)
        return fresh

    def ack(self, now: int, engine: str, boot: str, reconciler: str, version: Version) -> bool:
        facts = self.facts.get(engine)
        if facts is None:
            return False
        if facts.boot != boot and "boot_nonce" in self.keeps:
            raise Superseded(f"engine {engine}: ack of boot {boot}, registered is {facts.boot}")
        lock = self.locks.get(engine)
        if "reconciler_lock" in self.keeps and (lock is None or lock[:2] != (boot, reconciler)):
            raise Superseded(f"engine {engine}: ack by a reconciler that lost its lock")
        back = facts.version is not None and version.incarnation == facts.version.incarnation and version < facts.version
        if back and "acks_forward" in self.keeps:
            raise WeightError(f"engine {engine}: ack of {version} after {facts.version}")
        self.held.pop(engine, None)
        self.claims.pop(engine, None)
        facts.version, facts.target = version, None
        if facts.state is not EngineState.LEAVING:
            facts.state = EngineState.ROUTABLE
        self.pins[f"{engine}/serving"] = (version, now + PIN_MS)
        self.pins.pop(f"{engine}/target", None)
        self.pins.pop(f"{engine}/applying/{version}", None)
        return True

    def mark_unfit(self, engine: str, boot: str) -> bool:
        facts = self.facts.get(engine)
        if facts is None or facts.boot != boot or facts.state is EngineState.LEAVING:
            return False
        changed = facts.state is not EngineState.UNFIT
        facts.state = EngineState.UNFIT
        return changed

    def routable(self, now: int) -> dict[str, tuple[str, Version]]:
        """Engine → boot and version. Whoever is overdue is struck."""
        for engine in [engine for engine, facts in self.facts.items() if facts.expires <= now]:
            del self.facts[engine]
        return {
            engine: (facts.boot, facts.version) for engine, facts in self.facts.items() if facts.state is EngineState.ROUTABLE and facts.version is not None
        }

    def is_routable(self, now: int, engine: str, boot: str) -> bool:
        facts = self.facts.get(engine)
        return facts is not None and facts.boot == boot and facts.state is EngineState.ROUTABLE and facts.expires > now

    def routes(self, now: int) -> dict[str, Version]:
        """As reserve reads them."""
        return {
            engine: facts.version
            for engine, facts in self.facts.items()
            if facts.state is EngineState.ROUTABLE and facts.version is not None and facts.expires > now
        }

    # reconcilers ----------------------------------------------------------------------------------------------------------------------------

    def look(self, now: int, engine: str, boot: str, owner: str) -> Look:
        facts, lock = self.facts.get(engine), self.locks.get(engine)
        if facts is not None and boot in facts.superseded and "boot_nonce" in self.keeps:
            raise Superseded(f"engine {engine}: boot {boot} was superseded")
        if "reconciler_lock" in self.keeps and lock is not None and lock[0] == boot and lock[1] != owner and lock[2] > now:
            return Look(locked_ms=lock[2] - now)
        self.locks[engine] = (boot, owner, now + LOCK_MS)
        if facts is None or facts.boot != boot:
            return Look()
        newest = self.newest
        if newest is not None and facts.state is not EngineState.LEAVING and (facts.version != newest or facts.state is not EngineState.ROUTABLE):
            self.pins[f"{engine}/target"] = (newest, now + PIN_MS)
            facts.target = newest
        return Look(state=facts.state, newest=newest, acked=facts.version)

    def pause(self, now: int, engine: str, boot: str, owner: str, version: Version, *, most: int, valid_ms: int, idle: bool) -> bool:
        lock = self.locks.get(engine)
        if "reconciler_lock" in self.keeps and (lock is None or lock[:2] != (boot, owner)):
            raise Superseded(f"engine {engine}: its reconciler lost its lock")
        facts = self.facts.get(engine)
        if facts is None or facts.expires <= now or version not in self.digests:
            return False
        if not idle or (facts.state is EngineState.ROUTABLE and "idle_off_routes" in self.keeps):
            holds, ahead = 0, 0
            for table in (self.held, self.claims):
                for other, until in list(table.items()):
                    if other == engine:
                        continue
                    theirs = self.facts.get(other)
                    if theirs is None or theirs.expires <= now or until <= now:
                        del table[other]
                    elif table is self.held:
                        holds += 1
                    elif self._age(theirs) < self._age(facts) or (self._age(theirs) == self._age(facts) and other < engine):
                        ahead += 1
            if holds + ahead >= most and "pause_limit" in self.keeps:
                self.claims[engine] = now + CLAIM_MS
                return False
            self.held[engine] = now + valid_ms
            facts.expires = max(facts.expires, now + CLAIM_MS)
        self.claims.pop(engine, None)
        if "pins_what_it_applies" in self.keeps:
            self.pins[f"{engine}/applying/{version}"] = (version, now + max(valid_ms, PIN_MS))
        self.locks[engine] = (boot, owner, now + valid_ms)
        return True

    def renew(self, now: int, engine: str, boot: str, owner: str) -> bool:
        """False: another has the lock."""
        lock = self.locks.get(engine)
        if lock is None or lock[:2] != (boot, owner):
            return False
        self.locks[engine] = (boot, owner, now + LOCK_MS)
        return True

    @staticmethod
    def _age(facts: Facts) -> tuple[int, int]:
        return facts.version or (-1, -1)

    def resumed(self, engine: str, boot: str, owner: str) -> None:
        lock = self.locks.get(engine)
        if lock is not None and lock[:2] == (boot, owner):
            self.held.pop(engine, None)

    # publishing -----------------------------------------------------------------------------------------------------------------------------

    def publish(self, attached: int, trained: int, version: Version, digest: str) -> None:
        if version.incarnation > attached and "publish_fencing" in self.keeps:
            raise LedgerRegressed(f"publish of {version}: incarnation {attached} is attached")
        if version.incarnation != attached and "publish_fencing" in self.keeps:
            raise Fenced(f"publish of {version}: incarnation {attached} is attached")
        if version.n > trained and "pointer_after_trained" in self.keeps:
            raise StepOrder(f"publish of {version}: {trained} steps are trained")
        if self.newest == version:
            if self.digests.get(version) != digest:
                raise ManifestError(f"publish of {version}: it is there with other weights")
            return
        if self.newest is not None:
            older = version < self.newest if "incarnation_order" in self.keeps else version.n <= self.newest.n
            if older:
                raise WeightError(f"publish of {version}: the newest is {self.newest}")
        self.newest = version
        self.digests[version] = digest

    def collect(self, now: int, keep: int, deleted: tuple[Version, ...]) -> tuple[Version, ...]:
        self.dying.difference_update(deleted)
        self.pins = {holder: pin for holder, pin in self.pins.items() if pin[1] > now}
        pinned = {version for version, _ in self.pins.values()} if "pins" in self.keeps else set()
        for version in sorted(self.digests, reverse=True)[keep:]:
            if version not in pinned:
                del self.digests[version]
                self.dying.add(version)
        return tuple(sorted(self.dying))
