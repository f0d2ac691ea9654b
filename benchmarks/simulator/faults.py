"""What goes wrong, and when: decided by the seed alone, each fault by itself, so that any of them can be left out and the rest happens as before.

Timed faults are listed before the run. Faults of messages, and of single deeds of a process, are drawn as the run goes, from the stream of the process they
happen to; those that did happen are noted. Given `only`, everything else is left out, which is how a failing run is cut down.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulator.kernel import Process
from benchmarks.simulator.scenario import Scenario

CHAOS_S = 25.0
"""Faults begin after the first seconds and end here."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    at: float
    kind: str
    target: str
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:7.2f}  {self.kind} {self.target}" + (f" {self.amount:.2f}" if self.amount else "")


POINTS = ("granted", "set", "put", "status read", "attached", "leased", "stepped", "witnessed", "trained", "saved", "registered", "paused", "loaded")
"""Where a process may be killed, or may hang, exactly: the next one that passes."""
_MESSAGES = (("request lost", 0.35), ("reply lost", 0.70), ("twice", 0.85), ("late", 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """What a search for one kind of harm looks at more than others; all else stays with the seed."""

    kinds: tuple[str, ...] = ()
    """Of timed faults; empty: any."""
    points: tuple[str, ...] = ()
    count: int = 0
    message_rate: float | None = None
    scenario: Mapping[str, object] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)


NO_BIAS = Bias()


class Faults:
    """Of one run. `seen` has every fault that happened, in order."""

    def __init__(self, seed: int, scenario: Scenario, only: frozenset[str] | None = None, bias: Bias = NO_BIAS) -> None:
        self.only = only
        self.seen: list[str] = []
        pick = random.Random(f"{seed}/faults")
        self.message_rate = pick.choice([0.0, 0.01, 0.04])
        if bias.message_rate is not None:
            self.message_rate = bias.message_rate
        self.chance_rate = pick.choice([0.0, 1.0])
        self.over = False
        self.timed = sorted(self._plan(pick, scenario, bias))

    def _plan(self, pick: random.Random, scenario: Scenario, bias: Bias) -> list[Fault]:
        producers = [f"p{i}" for i in range(scenario.producers)]
        engines = [f"e{i}" for i in range(scenario.engines)]
        kinds = ["kill", "kill", "kill trainer", "kill trainer", "freeze", "freeze trainer", "cut", "engine restarts", "redis pauses", "payload gone"]
        kinds += ["payload damaged", "clock jumps", "reconciler stalls", "resume older", "letters again", *["kill at"] * 5, *["freeze at"] * 2]
        if scenario.regresses:
            kinds += ["redis falls back"] * 3 + ["trainers fall with redis"] * 2
        plan: list[Fault] = []
        for _ in range(bias.count or pick.choice([2, 4, 8, 12])):
            kind, at = pick.choice(bias.kinds or kinds), pick.uniform(0.5, CHAOS_S - 3.0)
            target, amount = "", 0.0
            if kind in ("kill", "freeze", "cut"):
                target, amount = pick.choice([*producers, *engines, *producers, "trainer"]), pick.uniform(0.5, 10.0)
            elif kind == "freeze trainer":
                target, amount = "trainer", pick.uniform(1.0, 12.0)
            elif kind in ("kill at", "freeze at"):
                target, amount = pick.choice(bias.points or POINTS), 0.0 if kind == "kill at" else pick.uniform(1.0, 10.0)
            elif kind in ("kill trainer", "resume older", "letters again"):
                target = "trainer"
            elif kind == "engine restarts":
                target = pick.choice(engines)
            elif kind == "reconciler stalls":
                target, amount = pick.choice(engines), pick.uniform(0.5, 10.0)
            elif kind == "redis pauses":
                target, amount = "redis", pick.choice([0.5, 3.0, 12.0])
            elif kind == "clock jumps":
                target, amount = "redis", pick.choice([-2.0, 5.0, 60.0])
            elif kind in ("redis falls back", "trainers fall with redis"):
                target, amount = "redis", pick.choice([0.2, 1.0, 3.0])
            else:
                target = pick.choice(["ready", "leased"])
            plan.append(Fault(round(at, 3), kind.removesuffix(" trainer"), target, round(amount, 2)))
        return plan

    def due(self, fault: Fault) -> bool:
        """Whether it happens."""
        return self._happens(str(fault))

    def message(self, client: Process) -> tuple[str, float]:
        """Fate and delay of the next request of `client`; "" is an ordinary one."""
        client.calls += 1
        if client.cut_until > client.kernel.now:
            return "request lost", 0.0
        if self.over or not self.message_rate or client.net.random() >= self.message_rate:
            return "", 0.0
        dice, delay_s = client.net.random(), client.net.uniform(0.01, 5.0)
        kind = next(kind for kind, below in _MESSAGES if dice < below)
        if not self._happens(f"message {client.calls} of {client.name}.{client.life}: {kind}"):
            return "", 0.0
        client.trouble_until = client.kernel.now + 2.0
        return kind, delay_s

    def chance(self, process: Process, what: str, rate: float) -> bool:
        """Whether something goes wrong inside a process, now."""
        if self.over or process.random.random() >= rate * self.chance_rate:
            return False
        return self._happens(f"{what} at {process.name}.{process.life} {process.kernel.now:.3f}")

    def _happens(self, name: str) -> bool:
        if self.only is not None and name not in self.only:
            return False
        self.seen.append(name)
        return True
