"""Processes, server, disk and faults of one seed, put together; and the supervisor that starts again what has ended.

A run is chaos until `CHAOS_S`, then fair: it must then train some steps within a bounded time (I4), end in good order, and account for every group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from benchmarks.simulator.disk import Disk, Saved
from benchmarks.simulator.engines import EngineHost
from benchmarks.simulator.faults import CHAOS_S, NO_BIAS, Bias, Faults
from benchmarks.simulator.judge import Judge
from benchmarks.simulator.kernel import Broken, GaveUp, Kernel, Process
from benchmarks.simulator.mischief import Mischief
from benchmarks.simulator.producers import Producer
from benchmarks.simulator.scenario import ALL_RULES, Scenario
from benchmarks.simulator.server import Server
from benchmarks.simulator.trainers import Trainer
from benchmarks.simulator.watch import Watch
from benchmarks.simulator.weights import Weights
from buffer.contract import CheckpointRef
from buffer.ledger import PureLedger
from buffer.ledger_state import Rules
from producer.routing import EngineKey
from protocol.errors import ConfigError, Fenced, LedgerRegressed, RollstreamError
from protocol.identity import RunIdentity
from protocol.versions import Fork, Version

FAIR_STEPS = 3
FAIR_S = 90.0
"""Virtual seconds in which a fair world must train `FAIR_STEPS` steps: several times what expiries, restarts and the slowest samples can take together."""
END_S = 90.0
IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=1, dataset="rows", tokenizer="words")


class GivenUp(Exception):
    """Only a person could go on from here, and it is documented so."""


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    problem: str | None
    """None: every invariant held."""
    faults: tuple[str, ...]
    """Those that happened, in order."""
    events: int
    steps: int
    trace: list[tuple[float, str, str]] | None = field(default=None, compare=False)


def simulate(seed: int, *, without: frozenset[str] = frozenset(), only: frozenset[str] | None = None, bias: Bias = NO_BIAS, tracing: bool = False) -> Outcome:
    """Run one seed. `without`: rules that are left out. `only`: the faults that may happen."""
    world = World(seed, without=without, only=only, bias=bias, tracing=tracing)
    problem = None
    try:
        world.run()
    except Broken as broken:
        problem = str(broken)
    except GivenUp:
        world.kernel.log("world", "given up: no checkpoint that is registered is there")
    kernel = world.kernel
    return Outcome(seed, problem, tuple(world.faults.seen), kernel.events, world.judge.steps, kernel.trace)


class World:
    def __init__(self, seed: int, *, without: frozenset[str], only: frozenset[str] | None, bias: Bias, tracing: bool) -> None:
        if unknown := without - ALL_RULES:
            raise ValueError(f"no such rules: {', '.join(sorted(unknown))}")
        self.keeps = ALL_RULES - without
        self.scenario = Scenario.of(seed, bias.scenario, bias.settings)
        self.kernel = kernel = Kernel(seed, tracing=tracing)
        self.faults = kernel.faults = Faults(seed, self.scenario, only, bias)
        tokens = itertools.count()
        pure = PureLedger(IDENTITY, self.scenario.settings, rules=Rules.without(*without), new_token=lambda: f"t{next(tokens)}")
        self.server = kernel.server = Server(kernel, pure, self.keeps, waits=self.scenario.waits)
        self.judge, self.disk = Judge(kernel, self.scenario), Disk()
        self.incarnations: dict[int, tuple[int, int]] = {}
        """Parent and fork step of each, as it attached."""
        self.places: dict[str, Process] = {}
        """Name → its newest life."""
        self.zombies: list[Process] = []
        """Lives that hung, and were replaced."""
        self.ending = False
        self.drained_by: Trainer | None = None
        self._lives: dict[str, itertools.count[int]] = {}
        self.mischief, self.watch = Mischief(self), Watch(self)
        self.server.after_call, self.server.expired = self.watch.after_call, self.watch.expired
        self.server.drop_news = lambda process: self.faults.chance(process, "a wake-up is lost", 0.03)
        for name in ("trainer", *(f"e{i}" for i in range(self.scenario.engines)), *(f"p{i}" for i in range(self.scenario.producers))):
            self.start(name)
        self.mischief.plan()

    # a whole life -----------------------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises: `Broken`."""
        kernel = self.kernel
        kernel.run_until(CHAOS_S, lambda: False)
        self.faults.over = True
        for process in [*self.places.values(), *self.zombies]:
            process.cut_until = process.frozen_until = 0.0
        kernel.log("world", "faults end")
        before = self.judge.steps
        if not kernel.run_until(CHAOS_S + FAIR_S, lambda: self.judge.steps >= before + FAIR_STEPS):
            raise Broken(f"I4: {self.judge.steps - before} steps in {FAIR_S:.0f} fair seconds; {self.watch.blocked()}")
        self.ending = True
        if not kernel.run_until(kernel.now + END_S, self._all_gone):
            raise Broken(f"I4: the run does not end; {self.watch.blocked()}")
        assert self.drained_by is not None
        self.watch.account(self.drained_by)

    def _all_gone(self) -> bool:
        return self.drained_by is not None and not any(process.alive for process in self.places.values() if isinstance(process, Producer))

    # what processes ask and tell --------------------------------------------------------------------------------------------------------------

    def host(self, key: EngineKey) -> EngineHost | None:
        """The living host of an engine, for a request to its address."""
        host = self.places.get(key[0])
        return host if isinstance(host, EngineHost) and host.alive else None

    def choose_checkpoint(self, registered: tuple[CheckpointRef, ...]) -> CheckpointRef | None:
        """The newest, unless a person asked for the oldest."""
        if "resume_registered" not in self.keeps and self.disk.checkpoints:
            return self.disk.checkpoints[max(self.disk.checkpoints)].reference
        there = [one for one in registered if not self._lost_with_server(one)]
        if registered and not there:
            raise GivenUp
        if self.mischief.go_back and there:
            self.mischief.go_back = False
            return there[0]
        return max(there, key=lambda one: one.step, default=None)

    def _lost_with_server(self, reference: CheckpointRef) -> bool:
        """Deleted by a trainer whose attachment the server then lost, and brought back by the one it had replaced: where nobody waits until an attachment is
        durable, a person must choose another checkpoint.
        """
        name = (reference.step, reference.incarnation)
        forgotten = self.disk.swept.get(name, "") not in ("", *self.server.pure.state.attached)
        return not self.scenario.waits and name not in self.disk.checkpoints and forgotten

    def saved(self, reference: CheckpointRef) -> Saved:
        """A registered checkpoint. Raises: `Broken` if its files are not there."""
        saved = self.disk.checkpoints.get((reference.step, reference.incarnation))
        if saved is not None and saved.weights.digest == reference.digest:
            return saved
        if reference in self.server.pure.state.checkpoints:
            raise Broken(f"T5: checkpoint {reference.step} of incarnation {reference.incarnation} is registered and not on the disk")
        raise ConfigError(f"checkpoint {reference.step} of incarnation {reference.incarnation} is gone")  # another trainer went on meanwhile

    def has_taken_over(self, trainer: Trainer, incarnation: int, fork: Fork, weights: Weights) -> None:
        """It is the one that counts from now on."""
        self.incarnations[incarnation] = (fork.parent, fork.step)
        self.judge.attached = trainer
        self.judge.named(Version(incarnation, fork.step), weights)

    def written(self, version: Version, weights: Weights) -> None:
        """Files of a version; written once."""
        known = self.disk.published.setdefault(version, weights)
        if known.digest != weights.digest:
            raise Broken(f"V1: version {version} is on the disk with other weights")

    # ends and starts --------------------------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """A new life, unless the one there is fine."""
        process = self.places.get(name)
        if process is not None and process.alive and process.frozen_until <= self.kernel.now:
            return
        if process is not None and process.alive:
            self.zombies.append(process)
        life = next(self._lives.setdefault(name, itertools.count()))
        kind = {"t": Trainer, "e": EngineHost, "p": Producer}[name[0]]
        self.places[name] = kind(self, name, life)
        if life:
            self.kernel.log("world", "%s starts again as life %d", name, life)

    def died(self, process: Process) -> None:
        """It ended by itself or was killed; somebody starts it again."""
        process.alive = False
        if isinstance(process, Trainer):
            self.watch.trainer_died()
        if isinstance(process, EngineHost):
            process.engine.abort()
            self.watch.resumed(process)
        if self.places.get(process.name) is process and not (self.ending and isinstance(process, Producer)):
            self.kernel.at(0.3 + 2.0 * process.random.random(), self.start, process.name)

    def left(self, process: Process) -> None:
        """It ended in good order."""
        process.alive = False
        if isinstance(process, Trainer) and process.drained:
            self.drained_by = process

    def trainer_failed(self, trainer: Trainer, title: str, problem: RollstreamError) -> None:
        """Raises: `Broken` if the trainer that counts is refused what it may do."""
        # A ledger that lost writes says so; only the channel, which does not count calls, has no better word than that a step is not trained.
        harmless = isinstance(problem, GaveUp) or (self.server.regressed and (title == "publish" or isinstance(problem, LedgerRegressed)))
        if self.judge.attached is trainer and (not harmless or isinstance(problem, Fenced)):
            raise Broken(f"T1: the attached trainer is refused: {type(problem).__name__}: {problem}")
        self.died(trainer)
