"""When to start, restart, stop and give up on the processes of a run. Pure: events in, commands out, an explicit clock, no process and no socket.

    WAITING(at) ──start──► RUNNING ──exit──► WAITING(at)            restarted, with backoff and jitter
                              │     └──exit──► DONE                 its turn to end has come, or the run gave up on it
                              └──ending, or fewer are wanted──► STOPPING(at) ──exit──► DONE

The end goes by role, in `STOP_ORDER`: the trainer drains while producers and engines still serve it, Redis leaves last, after `Settle`.

Exit codes of a child: 0 from the trainer begins the end; 2 is never restarted and ends the run with that child's message; 3, another process has its place,
is never restarted either: a trainer's ends what runs here, with exit code 1 and without a summary, as the run goes on elsewhere, and an engine's changes
nothing else; 75 is restarted for ever; anything else is a failure, and more than `Policy.max_failures` of them in a row, none of which lived
`Policy.healthy_s`, end the run. A relay or a weight server that fails so is restarted for ever, and after its first life also where it leaves with 2, as its
folder or its GPU may be gone for a while: engines take versions from the store meanwhile. A child that had to be killed makes the run's own exit code 1.
One that was added while the run went on (`scale`) and cannot live is given up alone: the run did without it before.

>>> core = Supervisor([Child(Role.TRAINER), Child(Role.ENGINE)], Policy(), Random(0))
>>> [str(command) for command in core.begin(0.0)]
['start trainer-0', 'start engine-0']
>>> core.exited(Child(Role.ENGINE), -9, 1.0), [str(command) for command in core.tick(9.0)]
([], ['start engine-0'])
>>> [str(command) for command in core.exited(Child(Role.TRAINER), 0, 60.0)], core.deadline()
([], 80.0)
>>> [str(command) for command in core.exited(Child(Role.ENGINE), 0, 62.0)], [str(command) for command in core.settled(63.0)]
(['settle'], ['finish 0'])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from random import Random
from types import MappingProxyType
from typing import TypeAlias

from protocol.errors import EXIT_CONFIG, EXIT_DRAINED, EXIT_FAULT, EXIT_REPLACED, EXIT_TRY_AGAIN


class Role(StrEnum):
    REDIS = "redis"
    ENGINE = "engine"
    PRODUCER = "producer"
    TRAINER = "trainer"
    RELAY = "relay"
    WEIGHT_SERVER = "weight-server"


STOP_ORDER = (Role.TRAINER, Role.PRODUCER, Role.ENGINE, Role.RELAY, Role.WEIGHT_SERVER, Role.REDIS)
_SPARED = frozenset({Role.RELAY, Role.WEIGHT_SERVER})
"""A run goes on without them."""


_STOP_S = MappingProxyType({
    Role.TRAINER: 90.0, Role.PRODUCER: 20.0, Role.ENGINE: 20.0, Role.RELAY: 10.0, Role.WEIGHT_SERVER: 10.0, Role.REDIS: 20.0,
})  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Child:
    """One process of the run, whichever operating system process plays it now."""

    role: Role
    index: int = 0

    def __str__(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Start:
    child: Child

    def __str__(self) -> str:
        return f"start {self.child}"


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask it to leave (SIGTERM)."""

    child: Child

    def __str__(self) -> str:
        return f"terminate {self.child}"


@dataclass(frozen=True, slots=True)
class Kill:
    """It did not leave in time (SIGKILL)."""

    child: Child

    def __str__(self) -> str:
        return f"kill {self.child}"


@dataclass(frozen=True, slots=True)
class Settle:
    """Everyone but Redis has left, and the run is not another's now: write down what must be read from Redis, then say `settled`."""

    def __str__(self) -> str:
        return "settle"


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do: exit with `code`."""

    code: int
    message: str = ""

    def __str__(self) -> str:
        return f"finish {self.code}"


Command: TypeAlias = Start | Terminate | Kill | Settle | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Units: seconds."""

    backoff_s: float = 0.5
    """Before the first restart; doubled for each failure in a row, then spread by 0.5 to 1.5."""
    backoff_cap_s: float = 30.0
    healthy_s: float = 30.0
    """A child that lived this long starts its count of failures anew."""
    max_failures: int = 8
    idle_s: float = 1.0
    """Before a child is started again that left in good order while the trainer still runs: it may know of the run's end before we do."""
    alone_s: Mapping[Role, float] = field(default_factory=lambda: MappingProxyType({Role.PRODUCER: 180.0, Role.ENGINE: 20.0}))
    """After a drained run these leave by themselves; we wait so long before we ask."""
    stop_s: Mapping[Role, float] = field(default_factory=lambda: _STOP_S)
    """From SIGTERM to SIGKILL."""
    reap_s: float = 20.0
    """From SIGKILL to the end; what the kernel holds longer is left behind."""


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class _Why(Enum):
    TRAINED = auto()
    ASKED = auto()
    FAULT = auto()


@dataclass(slots=True)
class Life:
    """What the supervisor knows of one child."""

    phase: Phase = Phase.WAITING
    since: float = 0.0
    at: float | None = None
    """When the next thing is due: the restart, the question to leave, or the kill."""
    failures: int = 0
    """In a row."""
    restarts: int = 0
    code: int | None = None
    """Of its last exit."""
    killed: bool = False
    wanted: bool = True
    """False: it leaves, or has left, as fewer are wanted."""
    added: bool = False
    """The run began without it, or did without it for a while."""
    why: str = ""
    """Why it is not started again although it is wanted."""

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.STOPPING)


class Supervisor:
    """See the module. `begin` once; then each event, and `tick` when `deadline()` is reached; carry out what they return, in order.

    Invariant: `Finish` comes once, last, and when no child is alive.
    """

    def __init__(self, children: Iterable[Child], policy: Policy, random: Random) -> None:
        self._policy = policy
        self._random = random
        self._lives = {child: Life() for child in children}
        self._why: _Why | None = None
        self._stage = 0
        self._asked = False
        self._cut_short = False
        self._code = EXIT_DRAINED
        self._message = ""
        self._settling: bool | None = None
        """None: not yet; True: under way; False: done or not wanted any more."""
        self._finished = False

    @property
    def lives(self) -> Mapping[Child, Life]:
        return self._lives

    @property
    def ending(self) -> bool:
        return self._why is not None

    @property
    def cut_short(self) -> bool:
        """The operator asked for the end before the run had come to its own."""
        return self._cut_short

    def begin(self, now: float, *, running: Iterable[Child] = ()) -> list[Command]:
        """Start every child but those that already run."""
        there = set(running)
        commands: list[Command] = []
        for child, life in self._lives.items():
            life.phase, life.since = Phase.RUNNING, now
            if child not in there:
                commands.append(Start(child))
        return commands

    def exited(self, child: Child, code: int, now: float, *, message: str = "") -> list[Command]:
        """`child` left with `code` (negative: the signal that ended it); `message` is what it said last."""
        life = self._lives[child]
        if life.phase is Phase.DONE:
            return []  # it was left behind
        lived = now - life.since
        stopping = life.phase is Phase.STOPPING
        life.code, life.at, life.killed = code, None, False
        if self._why is not None and (stopping or not self._restarts_while_ending(child.role)):
            life.phase = Phase.DONE
            return self._advance(now)
        if life.wanted:
            return self._means(child, code, now, lived=lived, message=message)
        life.phase = Phase.DONE
        return []

    def _means(self, child: Child, code: int, now: float, *, lived: float, message: str) -> list[Command]:
        """What the end of a child that is still wanted means."""
        life = self._lives[child]
        if child.role is Role.TRAINER and code == EXIT_DRAINED:
            life.phase = Phase.DONE
            return self._end(_Why.TRAINED, EXIT_DRAINED, "", now)
        if code == EXIT_CONFIG and child.role is not Role.REDIS and not (child.role in _SPARED and life.restarts):
            return self._give_up(life, EXIT_CONFIG, f"{child} cannot run like this (exit 2):\n{message}".rstrip(), now)
        if code == EXIT_REPLACED and child.role is not Role.REDIS:
            life.phase, life.why = Phase.DONE, f"{child} was replaced: another process has its place"
            return self._end(_Why.FAULT, EXIT_FAULT, f"{child} was replaced:\n{message}".rstrip(), now) if child.role is Role.TRAINER else []
        life.failures = 0 if lived >= self._policy.healthy_s or code == EXIT_DRAINED else life.failures
        if code not in (EXIT_DRAINED, EXIT_TRY_AGAIN):
            life.failures += 1
        if life.failures > self._policy.max_failures and child.role not in _SPARED:
            return self._give_up(life, EXIT_FAULT, f"{child} failed {life.failures} times in a row, last with exit {code}:\n{message}".rstrip(), now)
        life.phase, life.since = Phase.WAITING, now
        life.at = now + (self._policy.idle_s if code == EXIT_DRAINED else self._backoff(life.failures))
        return []

    def scale(self, added: Iterable[Child], gone: Iterable[Child], now: float) -> list[Command]:
        """Have those too, and do without these, which leave in good order. Nothing happens once the run ends."""
        if self._why is not None:
            return []
        commands: list[Command] = []
        for child in added:
            before = self._lives.get(child)
            if before is not None and before.alive:  # it is leaving, and comes back once it has left
                before.wanted = before.added = True
                continue
            self._lives[child] = Life(phase=Phase.RUNNING, since=now, added=True)
            commands.append(Start(child))
        for child in gone:
            life = self._lives[child]
            life.wanted = False
            if life.phase is Phase.RUNNING:
                commands.append(self._terminate(child, life, now))
            elif life.phase is Phase.WAITING:
                life.phase, life.at = Phase.DONE, None
        return commands

    def hold(self, child: Child, now: float) -> list[Command]:
        """`child` was to be started, but has nothing to do while the run drains: ask again later, unless its role's turn to leave has come meanwhile."""
        life = self._lives[child]
        life.restarts -= life.code is not None
        if self._why is not None and not self._restarts_while_ending(child.role):
            life.phase, life.at = Phase.DONE, None
            return self._advance(now)
        life.phase, life.since, life.at = Phase.WAITING, now, now + self._policy.idle_s
        return []

    def stop(self, now: float) -> list[Command]:
        """The operator asks for the end, or for a drained run's end not to wait any longer; asked again: end everything at once."""
        if self._why is None:
            self._asked = self._cut_short = True
            return self._end(_Why.ASKED, EXIT_DRAINED, "", now)
        if not self._asked:
            self._asked = True
            self._why = _Why.ASKED if self._why is _Why.TRAINED else self._why
            return [] if self._settling else self._enter(now)
        self._worse(EXIT_FAULT, "ended by force")
        self._stage, self._settling = len(STOP_ORDER), False
        self._call_off()
        return [*(self._kill(child, life, now) for child, life in self._lives.items() if life.alive), *self._advance(now)]

    def settled(self, now: float, *, failure: str = "") -> list[Command]:
        """What `Settle` asked for is done, or has failed, which makes the exit code 1."""
        if not self._settling:
            return []
        self._settling = False
        if failure:
            self._worse(EXIT_FAULT, failure)
        return self._enter(now)

    def tick(self, now: float) -> list[Command]:
        """Whatever is due by `now`."""
        commands: list[Command] = []
        left_behind = False
        for child, life in self._lives.items():
            if life.at is None or life.at > now:
                continue
            life.at = None
            if life.phase is Phase.WAITING:
                life.phase, life.since = Phase.RUNNING, now
                life.restarts += life.code is not None
                commands.append(Start(child))
            elif life.phase is Phase.RUNNING:
                commands.append(self._terminate(child, life, now))
            elif life.phase is Phase.STOPPING and not life.killed:
                self._worse(EXIT_FAULT, f"{child} did not stop within {self._policy.stop_s[child.role]:.0f} s and was killed")
                commands.append(self._kill(child, life, now))
            elif life.phase is Phase.STOPPING:
                life.phase, life.why = Phase.DONE, f"{child} was killed and has not ended within {self._policy.reap_s:.0f} s: the kernel holds it"
                self._worse(EXIT_FAULT, life.why)
                left_behind = True
        return commands + (self._advance(now) if left_behind and self._why is not None else [])

    def deadline(self) -> float | None:
        """When `tick` is due next."""
        return min((life.at for life in self._lives.values() if life.at is not None), default=None)

    def _restarts_while_ending(self, role: Role) -> bool:
        """A role whose turn has not come goes on serving those before it: Redis always, engines when the producers finish by themselves."""
        later = STOP_ORDER.index(role) > self._stage or (role is Role.REDIS and self._settling is True)
        return later and (role is Role.REDIS or self._why is _Why.TRAINED)

    def _backoff(self, failures: int) -> float:
        policy = self._policy
        base = min(policy.backoff_cap_s, policy.backoff_s * 2.0 ** max(0, failures - 1))
        return base * self._random.uniform(0.5, 1.5)

    def _end(self, why: _Why, code: int, message: str, now: float) -> list[Command]:
        self._worse(code, message)
        if self._why is not None:
            return self._advance(now)
        self._why = why
        self._call_off()
        return self._enter(now)

    def _give_up(self, life: Life, code: int, message: str, now: float) -> list[Command]:
        """It cannot live: nor can the run, unless it began without it."""
        life.phase, life.why = Phase.DONE, message
        return [] if life.added else self._end(_Why.FAULT, code, message, now)

    def _call_off(self) -> None:
        """Restarts that will not happen any more."""
        for child, life in self._lives.items():
            if life.phase is Phase.WAITING and (self._stage >= len(STOP_ORDER) or not self._restarts_while_ending(child.role)):
                life.phase, life.at = Phase.DONE, None

    def _worse(self, code: int, message: str) -> None:
        """The first message stays: the rest follow from it."""
        self._code = max(self._code, code)
        self._message = self._message or message

    def _enter(self, now: float) -> list[Command]:
        """Begin the present stage."""
        commands: list[Command] = []
        if self._stage < len(STOP_ORDER):
            role = STOP_ORDER[self._stage]
            if role is Role.REDIS and self._settling is None and not self._replaced():
                self._settling = True
                return [Settle()]
            for child, life in self._of(role):
                if life.phase is Phase.WAITING:
                    life.phase, life.at = Phase.DONE, None
                elif life.phase is Phase.RUNNING:
                    if self._why is _Why.TRAINED and role in self._policy.alone_s:
                        life.at = now + self._policy.alone_s[role]
                    else:
                        commands.append(self._terminate(child, life, now))
        return commands + self._advance(now)

    def _advance(self, now: float) -> list[Command]:
        """Go to the next stage once nobody of this one is alive."""
        if self._finished or self._settling:
            return []
        if self._stage < len(STOP_ORDER):
            if any(life.alive for _, life in self._of(STOP_ORDER[self._stage])):
                return []
            self._stage += 1
            return self._enter(now)
        if any(life.alive for life in self._lives.values()):
            return []
        self._finished = True
        undrained = [str(child) for child, life in self._of(Role.TRAINER) if life.code != EXIT_DRAINED]
        if undrained and self._code == EXIT_DRAINED:
            self._worse(EXIT_FAULT, f"{undrained[0]} did not drain: `--resume` goes on from its last checkpoint")
        return [Finish(self._code, self._message)]

    def _replaced(self) -> bool:
        """The run goes on elsewhere: its record is not ours to close."""
        return any(life.code == EXIT_REPLACED for _, life in self._of(Role.TRAINER))

    def _of(self, role: Role) -> list[tuple[Child, Life]]:
        return [(child, life) for child, life in self._lives.items() if child.role is role]

    def _terminate(self, child: Child, life: Life, now: float) -> Command:
        life.phase, life.at = Phase.STOPPING, now + self._policy.stop_s[child.role]
        return Terminate(child)

    def _kill(self, child: Child, life: Life, now: float) -> Command:
        life.phase, life.at, life.killed = Phase.STOPPING, now + self._policy.reap_s, True
        return Kill(child)
