"""Random exploration of the pure ledger inside a small world: two producers, two engines, a trainer and its zombies, crashes anywhere.

Every call of `World.event` is one atomic thing that a server or a process does. After a stretch of chaos the world is fair, and must make progress.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from buffer.contract import Blocked, CheckpointRef, ChunkRecord, Granted, History, PastStep, Slot
from buffer.ledger import PureLedger
from buffer.ledger_state import Rules, State, payload_name
from protocol.errors import DecodeError, Fenced, LedgerRegressed, RollstreamError, SlotLost, StepOrder
from protocol.messages import GroupHeader, Reason
from protocol.versions import Fork, Lineage, Version

from .conftest import IDENTITY, header_for, settings

T = TypeVar("T")
CHAOS, FAIR = 500, 2500
GROUPS, CHUNK = 4, 2
ALL = frozenset(
    {
        "partial_grant",
        "named_heartbeat",
        "request_id",
        "persist_in_put",
        "fencing",
        "floor",
        "min_version",
        "slot_token",
        "checkpoint_commit",
        "incarnation_order",
        "lineage_compare",
        "regress",
        "reassert",
        "rewound",
    }
)


class Broken(Exception):
    """An invariant does not hold."""


@dataclass
class Put:
    """A group on its way: generated, its payload set or not yet."""

    header: GroupHeader
    payload: bytes
    payload_set: bool = False
    in_ledger: bool = False


@dataclass
class Producer:
    name: str
    requests: int = 0
    slots: list[Slot] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)

    def held(self) -> list[tuple[int, str]]:
        waiting = [(put.header.seq, put.header.token) for put in self.puts if not put.in_ledger]
        return [(slot.seq, slot.token) for slot in self.slots] + waiting


@dataclass
class Trainer:
    incarnation: int
    step: int
    weights: list[str]
    """Digest after each step of its line, from 0."""
    done: list[int]
    """Groups its weights have learnt from, in order."""
    leased: list[int] = field(default_factory=list)
    chunk: int = 0
    stepped: bool = False
    saving: tuple[int, list[int], list[str]] | None = None
    saved: bool = False
    # what it presents, and what it tells a ledger that forgot it
    incarnation_id: str = ""
    seen: int = 0
    lineage: Lineage = field(default_factory=lambda: Lineage({0: Fork(0, 0)}, 0))
    chunks: list[ChunkRecord] = field(default_factory=list)
    steps: dict[int, PastStep] = field(default_factory=dict)
    kept: tuple[CheckpointRef, ...] = ()

    def history(self) -> History:
        covered = self.kept[0].step if len(self.kept) > 1 else 0
        steps = tuple(dataclasses.replace(past, chunks=()) if step <= covered else past for step, past in sorted(self.steps.items()))
        return History(incarnations={one: (*fork, "") for one, fork in self.lineage.forks.items()}, checkpoints=self.kept, steps=steps)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's files."""

    done: list[int]
    weights: list[str]
    history: History


@dataclass(frozen=True)
class Engine:
    version: Version
    weights: str


class World:
    def __init__(self, seed: int, *, depth: float, broken: frozenset[str] = frozenset(), exact: bool = True, loses: bool = False) -> None:
        self.random = random.Random(seed)
        self.loses = loses
        self.copy: State | None = None
        self.lost = False
        """The server went back, and the trainer has not told it yet."""
        self.holes = False
        self.keeps = ALL - broken
        tokens = (f"t{n}" for n in itertools.count())
        config = settings(
            groups_per_step=GROUPS, chunk_groups=CHUNK, pipeline_depth=depth, max_staleness=3, slot_seconds=4.0, max_attempts=1000, byte_budget=2000
        )
        self.ledger = PureLedger(IDENTITY, config, rules=Rules.without(*broken), new_token=lambda: next(tokens))
        self.depth, self.exact = depth, exact
        self.now_ms = 0
        self.chaos = True
        self.names = itertools.count()
        self.producers = [self._producer(), self._producer()]
        self.disk: dict[tuple[int, int], Saved] = {(0, 0): Saved([], ["w0"], History(incarnations={}, checkpoints=(), steps=()))}
        self.written_by: dict[str, str] = {}
        self.pointer: Engine | None = None
        self.engines: list[Engine | None] = [None, None]
        self.zombies: list[Trainer] = []
        self.everybody: list[Trainer] = []
        self.trainer = self._boot()

    @property
    def state(self) -> State:
        return self.ledger.state

    def _producer(self) -> Producer:
        return Producer(f"p{next(self.names)}")

    def _boot(self) -> Trainer:
        beyond = [one for one in self.disk if (one[1], one[0]) > (self.state.incarnation, self.state.trained)] if self.lost else []
        if beyond:  # rule R1: the checkpoint is the truth
            newest_on_disk = max(beyond, key=lambda one: (one[1], one[0]))
            history = self.disk[newest_on_disk].history
            self.ledger.reassert(newest_on_disk[1], "", dataclasses.replace(history, checkpoints=(*history.checkpoints[-1:], _reference(newest_on_disk))))
        registered = {(one.step, one.incarnation): one for one in self.state.checkpoints}
        at = max(registered, default=(0, 0)) if "checkpoint_commit" in self.keeps else max(self.disk)
        saved = self.disk[at]
        name, above = f"i{next(self.names)}", max((one.incarnation for one in self.everybody), default=0) if self.loses else 0
        attachment = self.ledger.attach(_reference(at) if at[0] else None, incarnation_id=name, above=above)
        self._publish(Engine(Version(attachment.incarnation, at[0]), saved.weights[-1]))
        trainer = Trainer(attachment.incarnation, at[0] + 1, list(saved.weights), list(saved.done), incarnation_id=name, seen=self.state.sequence)
        trainer.lineage, trainer.kept = attachment.lineage, tuple(self.state.checkpoints)
        trainer.steps = {past.step: past for past in saved.history.steps}
        self.everybody.append(trainer)
        self.lost = False
        return trainer

    def _ask(self, trainer: Trainer, call: Callable[..., T], *args: object, **options: object) -> T:
        answer = call(*args, incarnation_id=trainer.incarnation_id, seen=trainer.seen, **options)
        trainer.seen = self.state.sequence
        return answer

    def _publish(self, new: Engine) -> None:
        """The pointer moves forward only, by incarnation first."""
        if self._newer(new, self.pointer):
            self.pointer = new

    def _newer(self, new: Engine, old: Engine | None) -> bool:
        if old is None:
            return True
        return new.version > old.version if "incarnation_order" in self.keeps else new.version.n > old.version.n

    # events -----------------------------------------------------------------------------------------------------------------

    def event(self) -> None:
        dice = self.random.random()
        producer = self.random.choice(self.producers)
        if dice < 0.36:
            self._produce(producer)
        elif dice < 0.66:
            everyone = [self.trainer, *self.zombies]
            self._train(self.random.choice(everyone) if self.random.random() < 0.2 else self.trainer)
        elif dice < 0.78:
            which = self.random.randrange(2)
            assert self.pointer is not None
            if self._newer(self.pointer, self.engines[which]):
                self.engines[which] = self.pointer
            self.state.routable = {f"e{i}": engine.version for i, engine in enumerate(self.engines) if engine is not None}
        elif dice < 0.86:
            self.now_ms += 1000
            for one in self.producers:
                self.ledger.renew(self.now_ms, one.name, one.held())  # type: ignore[arg-type]
        elif self.chaos:
            self._fault(dice, producer)

    def _fault(self, dice: float, producer: Producer) -> None:
        if dice < 0.89:
            self.producers[self.producers.index(producer)] = self._producer()
        elif dice < 0.90 and len(self.zombies) < 2:
            self.zombies.append(self.trainer)
            self.trainer = self._boot()
        elif dice < 0.91:
            self.trainer = self._boot()
        elif dice < 0.94:
            coming = {payload_name(put.header.seq, put.header.attempt, put.header.token) for one in self.producers for put in one.puts}
            for name in self.state.unpersisted - coming:
                self.state.payloads.pop(name, None)
            self.state.unpersisted &= coming
        elif dice < 0.97 and self.loses:
            if self.copy is not None and dice < 0.95:
                self.ledger.state, self.lost = copy.deepcopy(self.copy), True
            else:
                self.copy = copy.deepcopy(self.state)

    def _produce(self, producer: Producer) -> None:
        if not producer.slots and not producer.puts:
            answer = self.ledger.reserve(self.now_ms, producer.name, f"r{producer.requests}", 3, max_bytes=100)
            if isinstance(answer, Blocked):
                return
            if self.chaos and self.random.random() < 0.1:  # the reply is lost
                producer.requests += "request_id" not in self.keeps
                return
            assert isinstance(answer, Granted)
            producer.requests += 1
            producer.slots = list(answer.slots)
        elif producer.slots and self.chaos and self.random.random() < 0.03:
            slot = producer.slots.pop()
            try:
                self.ledger.release(slot.seq, slot.token, self.random.choice([Reason.FAILED, Reason.GIVEN_BACK, Reason.FILTERED]))
            except SlotLost:
                return
        elif producer.slots:
            self._generate(producer)
        elif producer.puts:
            self._put(producer)

    def _generate(self, producer: Producer) -> None:
        slot, engine = self.random.choice(producer.slots), self.random.choice(self.engines)
        if engine is None:
            return
        if "min_version" in self.keeps:
            lineage = self.state.lineage
            if "lineage_compare" in self.keeps:
                if not (lineage.contains(engine.version) and engine.version.n >= slot.min_version.n):
                    return
            elif engine.version.n < slot.min_version.n:
                return
        self._check_writer(slot, engine)
        producer.slots.remove(slot)
        payload = f"{slot.seq}:{slot.attempt}:{engine.weights}".encode()
        header = header_for(slot, {engine.version: 10}, payload)
        self.written_by[payload_name(slot.seq, slot.attempt, slot.token)] = engine.weights
        producer.puts.append(Put(header, payload))

    def _check_writer(self, slot: Slot, engine: Engine) -> None:
        """Nothing is generated that the guard would reject, and nothing by weights that the line does not have."""
        group = self.state.groups.get(slot.seq)
        if self.lost or group is None or group.token != slot.token:
            return  # its slot is lost, and it does not know yet
        version = engine.version
        if version.n > self.state.trained or self.trainer.weights[version.n] != engine.weights:
            raise Broken(f"group {slot.seq} is generated by {version}, which is not on the line")
        if self.depth == 0 and version.n != self.state.trained and not self.holes:  # a hole admits one group a step too early, which the guard then refuses
            raise Broken(f"group {slot.seq} at D = 0 is generated by {version} after step {self.state.trained}")

    def _put(self, producer: Producer) -> None:
        put = producer.puts[0]
        if not put.payload_set:
            self.ledger.set_payload(put.header, put.payload)
            put.payload_set = True
            return
        if not put.in_ledger:
            try:
                stored = self.ledger.put(put.header)
            except (SlotLost, DecodeError) as problem:
                if isinstance(problem, DecodeError) and not self.loses:
                    raise
                producer.puts.pop(0)
                return
            if stored is None:  # it expired between the two
                put.payload_set = False
                return
            put.in_ledger = True
            if "persist_in_put" in self.keeps:
                producer.puts.pop(0)
        else:  # without the rule, the client makes the payload stay, if it lives to do so
            self.state.unpersisted.discard(payload_name(put.header.seq, put.header.attempt, put.header.token))
            producer.puts.pop(0)

    def _train(self, trainer: Trainer) -> None:
        try:
            if trainer.saving is not None and self.random.random() < 0.3:
                self._save(trainer)
            elif trainer.chunk < GROUPS // CHUNK:
                self._lease(trainer)
            elif not trainer.stepped:
                self._step(trainer)
            else:
                self._trained(trainer)
        except LedgerRegressed:
            if trainer is self.trainer:
                self._mend(trainer)
            else:
                self.zombies.remove(trainer)
        except (Fenced, StepOrder):
            if trainer is self.trainer:
                raise
            self.zombies.remove(trainer)

    def _mend(self, trainer: Trainer) -> None:
        """Re-assert, and go on with the same step: what was leased for it and not stepped is given up, a step that was stepped is in the history."""
        if not self.loses:
            raise Broken("a loss was seen where there was none")
        self.ledger.reassert(trainer.incarnation, trainer.incarnation_id, trainer.history())
        trainer.seen, self.lost, self.copy = self.state.sequence, False, None
        if not trainer.stepped:
            trainer.chunk, trainer.leased, trainer.chunks = 0, [], []

    def _save(self, trainer: Trainer) -> None:
        assert trainer.saving is not None
        step, done, weights = trainer.saving
        if not trainer.saved:
            self.disk[step, trainer.incarnation] = Saved(done, weights, trainer.history())
            trainer.saved = True
            return
        trainer.kept = self._ask(trainer, self.ledger.checkpoint, trainer.incarnation, _reference((step, trainer.incarnation)), keep=2)
        trainer.saving, trainer.saved = None, False

    def _lease(self, trainer: Trainer) -> None:
        record = self._ask(trainer, self.ledger.open_step, trainer.incarnation, trainer.step) if trainer is self.trainer else None
        chunk = self._ask(trainer, self.ledger.lease, self.now_ms, trainer.incarnation, trainer.step, trainer.chunk)
        for header in chunk.headers if self.loses and isinstance(chunk, ChunkRecord) else ():
            if payload_name(header.seq, header.attempt, header.token) not in self.state.payloads:  # it went with a loss
                self.holes = True
                chunk = self._ask(trainer, self.ledger.payload_lost, trainer.incarnation, trainer.step, trainer.chunk, header.seq)
        if isinstance(chunk, Blocked):
            return
        for header in chunk.headers:
            name = payload_name(header.seq, header.attempt, header.token)
            if name not in self.state.payloads:
                if trainer is not self.trainer:
                    self.zombies.remove(trainer)
                    return
                raise Broken(f"payload of leased group {header.seq} is gone")
            if trainer is self.trainer:
                assert record is not None
                self._check_age(trainer, chunk, header, self.written_by[name])
        trainer.leased += [int(header.seq) for header in chunk.headers]
        trainer.chunks.append(chunk)
        trainer.chunk += 1

    def _check_age(self, trainer: Trainer, chunk: ChunkRecord, header: GroupHeader, written_by: str) -> None:
        age = chunk.record.lineage.staleness(header.oldest, trainer.step)
        if age > self.state.policy.bound:
            raise Broken(f"step {trainer.step} takes a group of staleness {age}")
        on_line = chunk.record.incarnation == trainer.incarnation and chunk.record.lineage.contains(header.oldest)
        if on_line and trainer.weights[header.oldest.n] != written_by:
            raise Broken(f"version {header.oldest} is on the line, but its weights are not")
        if self.depth == 0 and written_by != trainer.weights[-1]:
            raise Broken(f"step {trainer.step} at D = 0 takes a group that other weights wrote")

    def _step(self, trainer: Trainer) -> None:
        trainer.done += trainer.leased
        trainer.stepped = True
        seed = "" if self.exact else str(trainer.incarnation)
        trainer.weights.append(hashlib.sha256(f"{trainer.weights[-1]}{trainer.leased}{seed}".encode()).hexdigest()[:12])
        if trainer is self.trainer and len(set(trainer.done)) < len(trainer.done):
            raise Broken("a group is trained twice in one line")
        seqs = tuple(header.seq for chunk in trainer.chunks for header in chunk.headers)
        trainer.steps[trainer.step] = PastStep(
            step=trainer.step, incarnation=trainer.incarnation, digest=trainer.weights[-1], seqs=seqs, chunks=tuple(trainer.chunks)
        )

    def _trained(self, trainer: Trainer) -> None:
        trainer.lineage = self._ask(trainer, self.ledger.trained, trainer.incarnation, trainer.step, trainer.weights[-1]).lineage
        if trainer is self.trainer and not self.lost and len(trainer.done) != self.state.trained_groups:
            raise Broken(f"the weights learnt from {len(trainer.done)} groups, the ledger says {self.state.trained_groups}")
        self._publish(Engine(Version(trainer.incarnation, trainer.step), trainer.weights[-1]))
        if trainer.step % 2 == 0:
            trainer.saving, trainer.saved = (trainer.step, list(trainer.done), list(trainer.weights)), False
        trainer.step, trainer.chunk, trainer.leased, trainer.chunks, trainer.stepped = trainer.step + 1, 0, [], [], False

    # a whole life -----------------------------------------------------------------------------------------------------------

    def run(self) -> str | None:
        """What broke, or None."""
        try:
            for _ in self._watched(CHAOS):
                self.event()
            self.chaos = False
            before = self.trainer.step
            for _ in self._watched(FAIR):
                self.event()
                if self.trainer.step >= before + 3:
                    return None
        except (Broken, RollstreamError, AssertionError, ValueError, KeyError, IndexError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return f"no progress: step {self.trainer.step}, {self.state.outstanding} of {self.state.settings.admission_limit} outstanding"

    def _watched(self, events: int) -> Iterator[int]:
        for n in range(events):
            yield n
            if n % 25 == 0 and (wrong := self.ledger.violations()):
                raise Broken(wrong[0])


def _reference(at: tuple[int, int]) -> CheckpointRef:
    return CheckpointRef(step=at[0], incarnation=at[1], digest="", path="")


def lives(seeds: int, *, depth: float, broken: frozenset[str] = frozenset(), exact: bool = True, loses: bool = False) -> list[str]:
    """What broke in each life that broke."""
    ends = (World(seed, depth=depth, broken=broken, exact=exact, loses=loses).run() for seed in range(seeds))
    return [end for end in ends if end is not None]


@pytest.mark.parametrize("depth", [0.0, 1.0, 1.5])
def test_nothing_breaks_with_all_rules(depth: float) -> None:
    assert lives(100, depth=depth) == []


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_nothing_breaks_when_a_resumed_trainer_computes_other_weights(depth: float) -> None:
    assert lives(100, depth=depth, exact=False) == []


@pytest.mark.parametrize(("depth", "exact"), [(0.0, True), (1.0, True), (1.0, False)])
def test_nothing_breaks_when_the_server_loses_what_it_acknowledged(depth: float, exact: bool) -> None:
    assert lives(100, depth=depth, exact=exact, loses=True) == []


@pytest.mark.parametrize(
    ("broken", "depth", "exact", "loses"),
    [
        ("partial_grant", 0.0, True, False),
        ("named_heartbeat request_id", 0.0, True, False),
        ("persist_in_put", 1.0, True, False),
        ("min_version", 0.0, True, False),
        ("lineage_compare", 1.0, True, False),
        ("incarnation_order", 0.0, True, False),
        ("fencing", 1.0, True, False),
        ("checkpoint_commit", 1.0, True, False),
        ("rewound", 0.0, False, False),
        ("regress", 1.0, True, True),
        ("reassert", 1.0, True, True),
    ],
)
def test_the_model_notices_a_missing_rule(broken: str, depth: float, exact: bool, loses: bool) -> None:
    missing = frozenset(broken.split())
    assert any(World(seed, depth=depth, broken=missing, exact=exact, loses=loses).run() for seed in range(200))


# -- rules whose breach takes more than a life of chance -----------------------------------------------------------------------------------------


def _run_to(ledger: PureLedger, step: int, *, checkpoints: bool = False) -> None:
    """Train to `step` under incarnation 1, on version 0, which K allows."""
    if not ledger.state.incarnation:
        ledger.attach(None, incarnation_id="first")
        ledger.state.routable = {"e": Version(1, 0)}
    for s in range(ledger.state.trained + 1, step + 1):
        while ledger.status(0).ready < GROUPS:
            answer = ledger.reserve(0, "p", f"r{ledger.state.next_seq}-{s}-{len(ledger.state.requests)}", GROUPS, max_bytes=10)
            assert isinstance(answer, Granted)
            for slot in answer.slots:
                header = header_for(slot, {Version(1, 0): 1}, b"payload")
                ledger.set_payload(header, b"payload")
                ledger.put(header)
        ledger.open_step(1, s)
        for chunk in range(GROUPS // CHUNK):
            assert isinstance(ledger.lease(0, 1, s, chunk), ChunkRecord)
        ledger.trained(1, s, f"w{s}")
        if checkpoints:
            ledger.checkpoint(1, CheckpointRef(step=s, incarnation=1, digest=f"w{s}", path=""), keep=2)


def _payloads_after_falling_back(rules: Rules) -> bool:
    """The newest checkpoint turns out damaged, and the one before it is resumed: are the payloads of its next step there?"""
    ledger = PureLedger(IDENTITY, settings(), rules=rules)
    _run_to(ledger, 4, checkpoints=True)
    ledger.attach(CheckpointRef(step=3, incarnation=1, digest="w3", path=""), incarnation_id="second")
    try:
        ledger.open_step(2, 4)
        chunk = ledger.lease(0, 2, 4, 0)
        assert isinstance(chunk, ChunkRecord)
        return all(ledger.payload(header) for header in chunk.headers)
    except (RollstreamError, AssertionError):
        return False


def test_without_the_floor_of_the_oldest_checkpoint_falling_back_finds_no_payloads() -> None:
    assert _payloads_after_falling_back(Rules())
    assert not _payloads_after_falling_back(Rules.without("floor"))


@pytest.mark.parametrize("rules", [Rules(), Rules.without("slot_token")])
def test_without_the_slot_token_a_slot_of_a_lost_tail_is_put_by_the_wrong_owner(rules: Rules) -> None:
    """Redis forgets a reserve it answered; the same `seq` and attempt go to another producer; the first one puts."""
    ledger = PureLedger(IDENTITY, settings(), rules=rules)
    ledger.attach(None, incarnation_id="first")
    ledger.state.routable = {"e": Version(1, 0)}
    before = copy.deepcopy(ledger.state)
    first = ledger.reserve(0, "p1", "r1", 1, max_bytes=10)
    ledger.state = before
    second = ledger.reserve(0, "p2", "r1", 1, max_bytes=10)
    assert isinstance(first, Granted)
    assert isinstance(second, Granted)
    assert (first.slots[0].seq, first.slots[0].attempt) == (second.slots[0].seq, second.slots[0].attempt)
    stolen = header_for(first.slots[0], {Version(1, 0): 1}, b"payload")
    ledger.set_payload(stolen, b"payload")
    if rules.slot_token:
        with pytest.raises(SlotLost):
            ledger.put(stolen)
    else:
        ledger.put(stolen)
        assert ledger.state.ready == [second.slots[0].seq]
