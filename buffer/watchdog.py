"""Which edge of a run is blocked, since when, and what holds it up (invariant I4). Pure: what was seen goes in, sentences come out.

                 ┌──── no slot, no budget, no trainer ────┐
                 ▼                                        │
    engines    trainer ──────── no group ───────────► producers ── no engine ──► engines
       │         ▲  ▲                                     │
       │         │  └──────── no version, no run ─────────┘
       └─ no version (nothing newer is published)              └── no teacher ──► teacher
                                        trainer ── no ack, at the end of the run ──► engines

Who waits says for what, but the ledger checks in a fixed order: a run whose trainer died tells its producers `no slot`, since the slots ran out first. So the
arrows are followed to the one that waits for nobody: that is the edge reported, with everybody who waits because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.contract import LedgerStatus, RunState
from protocol.messages import Edge, EngineState, EngineStatus, ProducerStatus, Reason, TrainerStatus
from protocol.versions import Version

_ROUTER = "router"
"""What producers call all engines behind a router."""
_NAMED = 3
"""Members named in a sentence; the rest are a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look at everything that can hold a run up. Units: unix seconds."""

    at: float
    ledger: LedgerStatus | None
    """None: there is no run."""
    producers: Sequence[ProducerStatus] = ()
    trainers: Sequence[TrainerStatus] = ()
    engines: Sequence[EngineStatus] = ()
    newest: Version | None = None
    """Newest published version."""
    last_producer_at: float | None = None
    """When any producer was last heard of; None: none ever was."""
    last_trainer_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An edge that is blocked, at its root."""

    edge: Edge
    since: float
    """Unix seconds."""
    waiting: tuple[str, ...]
    """Who waits because of it, each with the edge it sees itself: "producer-0: no slot"."""
    why: str
    what_to_do: str
    at_work: bool = False
    """Somebody moves at the other end: it is only slower than who waits. Never a stall, however long it lasts."""

    def seconds(self, at: float) -> float:
        return max(0.0, at - self.since)

    def lasts(self, at: float, patience_s: float) -> bool:
        """Whether it is to be reported as a stall."""
        return not self.at_work and self.seconds(at) >= patience_s

    def sentence(self, at: float) -> str:
        """For people: edge, since when, why, who waits, what to do."""
        waiting = f" ({_some(self.waiting)})" if self.waiting else ""
        return f"{self.edge} for {self.seconds(at):.0f} s: {self.why}{waiting}; {self.what_to_do}"


def blocked(seen: Seen, *, patience_s: float) -> tuple[Stall, ...]:
    """Every edge that is blocked now, the longest first. A trainer that is here, waits for nobody and has done nothing for `patience_s` counts as stuck.

    Example: slots run out after the trainer died. The producers report `no slot`; the answer is `no trainer`, since the trainer was last heard of.
    """
    if seen.ledger is None:
        return _no_run(seen)
    if seen.ledger.state is RunState.DRAINING:
        return ()
    look = _Look(seen, seen.ledger, patience_s)
    looks = (look.trainer_gone(), look.producers_gone(), look.generation(), look.trainer_slow(), look.no_group(), look.no_ack())
    found = [stall for stall in looks if stall is not None]
    return tuple(sorted(found, key=lambda stall: stall.since))


def _no_run(seen: Seen) -> tuple[Stall, ...]:
    waiting = _waiting(seen, Edge.NO_RUN)
    if not waiting:
        return ()
    why = "no trainer has made the run in this Redis"
    return (Stall(edge=Edge.NO_RUN, since=_earliest(waiting), waiting=_told(waiting), why=why, what_to_do="start rl-trainer with --new, or correct run.name"),)


_Wait = tuple[str, Edge, float]


def _waiting(seen: Seen, *edges: Edge) -> list[_Wait]:
    """Members that wait for one of `edges`; for any without."""
    members = [(one.producer_id, one.waiting_for, one.waiting_since) for one in seen.producers]
    members += [(f"trainer {one.trainer_id}", one.waiting_for, one.waiting_since) for one in seen.trainers]
    return [(who, edge, since) for who, edge, since in members if edge is not None and (not edges or edge in edges)]


def _earliest(waiting: Sequence[_Wait]) -> float:
    return min(since for _, _, since in waiting)


def _told(waiting: Sequence[_Wait]) -> tuple[str, ...]:
    return tuple(f"{who}: {edge}" for who, edge, _ in waiting)


def _some(names: Sequence[str]) -> str:
    left = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {left} more" if left > 0 else "")


def _takes(engine: EngineStatus) -> str:
    """What it is about to serve, or why it is not."""
    if engine.trouble:
        return f" and cannot take a newer one ({engine.trouble})"
    return f", takes {engine.target}" if engine.target else ""


def _serves(engine: EngineStatus, version: Version) -> bool:
    return engine.state is EngineState.ROUTABLE and engine.version is not None and engine.version >= version


class _Look:
    """The questions that `blocked` asks of one look; None: that is not what holds the run up."""

    def __init__(self, seen: Seen, ledger: LedgerStatus, patience_s: float) -> None:
        self._seen = seen
        self._ledger = ledger
        self._patience_s = patience_s
        attached = [one for one in seen.trainers if one.incarnation == ledger.incarnation]
        self._trainer = attached[0] if attached else None
        self._hungry = self._trainer is not None and self._trainer.waiting_for is Edge.NO_GROUP
        self._recorded = ledger.dead.get(Reason.RECORDED, 0) > 0
        """Groups go into a recording: nobody trains, and nobody needs to."""

    def trainer_gone(self) -> Stall | None:
        if self._trainer is not None or self._recorded:
            return None
        seen, ledger = self._seen, self._ledger
        waiting = _waiting(seen, Edge.NO_TRAINER, Edge.NO_SLOT, Edge.NO_BUDGET, Edge.NO_VERSION)
        if ledger.incarnation == 0:
            since, why = (_earliest(waiting) if waiting else seen.at), "no trainer has attached to the run yet"
        elif seen.last_trainer_at is None:
            since, why = (_earliest(waiting) if waiting else seen.at), f"incarnation {ledger.incarnation} is attached, and no trainer is here"
        else:
            since, why = seen.last_trainer_at, f"the trainer of incarnation {ledger.incarnation} is gone, after step {ledger.trained}"
        return Stall(edge=Edge.NO_TRAINER, since=since, waiting=_told(waiting), why=why, what_to_do="start rl-trainer with --resume, and look at its log")

    def producers_gone(self) -> Stall | None:
        seen = self._seen
        if seen.producers or (seen.last_producer_at is None and not self._hungry):
            return None
        waiting = _waiting(seen, Edge.NO_GROUP)
        since = seen.last_producer_at
        if since is None:
            since, why = _earliest(waiting), "no producer has joined the run"
        else:
            held = f"; {self._ledger.generating} slots of theirs expire by themselves" if self._ledger.generating else ""
            why = f"the last producer is gone{held}"
        return Stall(edge=Edge.NO_GROUP, since=since, waiting=_told(waiting), why=why, what_to_do="start rl-producer, and look at the logs of those that ended")

    def generation(self) -> Stall | None:
        """What keeps live producers from generating, other than the trainer."""
        if not self._seen.producers:
            return None
        routable = [one for one in self._seen.engines if one.state is EngineState.ROUTABLE]
        no_engine = _waiting(self._seen, Edge.NO_ENGINE)
        if not routable and (no_engine or self._hungry):
            return self._no_engine(no_engine)
        if self._trainer is None and not self._recorded:
            return None  # nobody publishes, nobody frees bytes: `trainer_gone` says it
        if no_version := no_engine + _waiting(self._seen, Edge.NO_VERSION):
            resting = self._resting(routable)
            return self._all_rest(no_engine, resting) if resting else self._no_version(no_version, routable)
        rest = {Edge.NO_BUDGET: self._no_budget, Edge.NO_TEACHER: self._no_teacher, Edge.FIRST_EVALUATION: self._first_evaluation}
        return next((told(waiting) for edge, told in rest.items() if (waiting := _waiting(self._seen, edge))), None)

    def _first_evaluation(self, waiting: Sequence[_Wait]) -> Stall:
        return Stall(
            edge=Edge.FIRST_EVALUATION,
            since=_earliest(waiting),
            waiting=self._and_trainer(waiting),
            why="the first evaluation is not recorded yet, and nothing is generated for training before it",
            what_to_do="look at the logs of the producers; fewer eval.samples make it shorter",
        )

    def _no_teacher(self, waiting: Sequence[_Wait]) -> Stall:
        found = {
            name: why for one in self._seen.producers if one.waiting_for is Edge.NO_TEACHER for name, why in one.resting.items() if name.startswith("teacher")
        }
        rests = f": {_some([f'{name} ({why})' for name, why in sorted(found.items())])}" if found else ""
        return Stall(
            edge=Edge.NO_TEACHER,
            since=_earliest(waiting),
            waiting=self._and_trainer(waiting),
            why=f"finished groups wait for the teacher's logprobs, and none of its servers gives them{rests}",
            what_to_do="start the servers of teacher.urls, and look at their logs; groups go on by themselves",
        )

    def _no_engine(self, waiting: Sequence[_Wait]) -> Stall:
        engines = self._seen.engines
        states = [f"{one.engine_id} is {one.state}" + (f" ({why})" if (why := one.reason or one.trouble) else "") for one in engines]
        since = _earliest(waiting) if waiting else _earliest(_waiting(self._seen, Edge.NO_GROUP))
        return Stall(
            edge=Edge.NO_ENGINE,
            since=since,
            waiting=self._and_trainer(waiting),
            why=f"no engine may be asked: {_some(states)}" if states else "no engine is registered",
            what_to_do="look at the logs of the engines" if states else "start `rollstream engine`",
        )

    def _resting(self, routable: Sequence[EngineStatus]) -> dict[str, str]:
        """Why engines that may be asked are left alone by those who wait for one; empty, where one of these may ask one."""
        found: dict[str, str] = {}
        for one in self._seen.producers:
            if one.waiting_for is Edge.NO_ENGINE:
                if not ({engine.engine_id for engine in routable} <= one.resting.keys() or _ROUTER in one.resting):
                    return {}
                found |= one.resting
        return found

    def _all_rest(self, waiting: Sequence[_Wait], resting: Mapping[str, str]) -> Stall:
        return Stall(
            edge=Edge.NO_ENGINE,
            since=_earliest(waiting),
            waiting=self._and_trainer(waiting),
            why=f"every engine that may be asked rests, as requests failed there: {_some([f'{engine} ({why})' for engine, why in sorted(resting.items())])}",
            what_to_do="look at the logs of the engines and of the producers",
        )

    def _no_version(self, waiting: Sequence[_Wait], routable: Sequence[EngineStatus]) -> Stall:
        ledger, newest = self._ledger, self._seen.newest
        serve = _some([f"{one.engine_id} serves {one.version}{_takes(one)}" for one in routable])
        if newest is None or newest.incarnation not in ledger.lineage.forks:
            why, what_to_do = f"incarnation {ledger.incarnation} has published nothing yet; {serve}", "look at the log of the trainer"
        elif (lag := ledger.trained - ledger.lineage.shared(newest)) > 0:
            why = f"the newest published version is {newest}, {lag} steps behind the newest trained; {serve}"
            what_to_do = "look at the log of the trainer, and lower weights.publish_every if it is over 1"
        else:
            why, what_to_do = f"{newest} is published, and no engine that may be asked is new enough; {serve}", "look at the logs of the engines"
        return Stall(edge=Edge.NO_VERSION, since=_earliest(waiting), waiting=self._and_trainer(waiting), why=why, what_to_do=what_to_do)

    def _no_budget(self, waiting: Sequence[_Wait]) -> Stall:
        ledger, trainer = self._ledger, self._trainer
        newest = max((one.step for one in ledger.checkpoints), default=0)
        why = (
            f"{ledger.bytes_used} of {ledger.byte_budget} bytes are in use; {ledger.trained_groups} trained groups stay until checkpoints cover them "
            f"(trained {ledger.trained}, newest checkpoint {newest})"
        )
        what_to_do = "raise buffer.byte_budget for the next run, or lower checkpoint.every_steps and restart the trainer"
        if trainer is not None and trainer.spill_problem:
            why, what_to_do = f"{why}; {ledger.to_spill} steps wait for the spill, which fails: {trainer.spill_problem}", "make buffer.spill writable"
        elif self._stuck():
            why, what_to_do = f"{why}; {self._stands()}", self._stands_do()
        return Stall(edge=Edge.NO_BUDGET, since=_earliest(waiting), waiting=self._and_trainer(waiting), why=why, what_to_do=what_to_do)

    def trainer_slow(self) -> Stall | None:
        """Slots come free as the trainer takes groups: it is at work, or it is stuck."""
        trainer = self._trainer
        if trainer is None or trainer.waiting_for is not None:
            return None
        waiting = _waiting(self._seen, Edge.NO_SLOT)
        if self._stuck():
            return Stall(edge=Edge.NO_SLOT, since=trainer.moved_at, waiting=_told(waiting), why=self._stands(), what_to_do=self._stands_do())
        if not waiting:
            return None
        ledger = self._ledger
        why = f"all {ledger.admission_limit} slots are in use, and the trainer is at work on step {trainer.step}"
        what_to_do = "nothing is wrong: the trainer is slower than the producers"
        return Stall(edge=Edge.NO_SLOT, since=_earliest(waiting), waiting=_told(waiting), why=why, what_to_do=what_to_do, at_work=True)

    def _stuck(self) -> bool:
        trainer = self._trainer
        return trainer is not None and trainer.waiting_for is None and trainer.moved_at > 0 and self._seen.at - trainer.moved_at >= self._patience_s

    def _stands(self) -> str:
        trainer = self._trainer
        assert trainer is not None
        return f"trainer {trainer.trainer_id} (pid {trainer.pid} on {trainer.host}) is here, waits for nobody, and has not moved in step {trainer.step}"

    @staticmethod
    def _stands_do() -> str:
        return "look at its log and what its process does; if a step really takes so long, raise run.stall_seconds"

    def no_group(self) -> Stall | None:
        """The trainer waits although producers generate: nothing else is in the way."""
        trainer, ledger = self._trainer, self._ledger
        if trainer is None or not self._hungry or not self._seen.producers or self.generation() is not None:
            return None
        failed = sum(one.groups_failed for one in self._seen.producers)
        trouble = f"; {failed} groups failed" if failed else ""
        trouble += f", {ledger.letters} dead letters" if ledger.letters else ""
        running, queued = sum(one.running for one in self._seen.engines), sum(one.queued for one in self._seen.engines)
        why = (
            f"{ledger.generating} groups are being generated and {ledger.ready} are ready, too few for the next chunk of step {trainer.step}; "
            f"the engines decode {running} requests, {queued} wait{trouble}"
        )
        what_to_do = "look at the logs of the producers" + (" and `rollstream letters list`" if ledger.letters else "") + ", or add engines"
        waiting = _waiting(self._seen, Edge.NO_GROUP, Edge.NO_SLOT)
        return Stall(edge=Edge.NO_GROUP, since=trainer.waiting_since, waiting=_told(waiting), why=why, what_to_do=what_to_do)

    def no_ack(self) -> Stall | None:
        """The run is trained to its end, and waits for engines that do not serve its last version yet; with it, whoever waits for a slot."""
        trainer = self._trainer
        if trainer is None or trainer.waiting_for is not Edge.NO_ACK:
            return None
        last = Version(self._ledger.incarnation, self._ledger.trained)
        late = [one for one in self._seen.engines if one.fleet == "rollout" and not _serves(one, last)]
        states = [f"{one.engine_id} is {one.state}{_takes(one)}" + (f" ({one.reason})" if one.reason else "") for one in late]
        return Stall(
            edge=Edge.NO_ACK,
            since=trainer.waiting_since,
            waiting=_told(_waiting(self._seen, Edge.NO_ACK, Edge.NO_SLOT)),
            why=f"step {last.n} was the last, and the run ends once its engines serve {last}: {_some(states) or 'one of them is gone'}",
            what_to_do="it ends without them at their deadline (weights.apply_deadline_s of each); look at their logs",
        )

    def _and_trainer(self, waiting: Sequence[_Wait]) -> tuple[str, ...]:
        """With the trainer, if it waits for the groups that are not made."""
        return _told([*waiting, *_waiting(self._seen, Edge.NO_GROUP)])


class EdgeLog:
    """What a process logs of its own waits: once when an edge has blocked it for `patience_s`, once when that is over.

    not waiting ──edge, for patience_s──► told ──no edge──► not waiting (told once)      An edge that changes meanwhile is the same wait.
    """

    def __init__(self, log: logging.Logger, what: str, patience_s: float) -> None:
        self._log = log
        self._what = what
        self._patience_s = patience_s
        self._told: tuple[Edge, float] | None = None

    def see(self, edge: Edge | None, since: float, at: float) -> None:
        """Call it now and then, such as at every heartbeat. `since` and `at` are by the same clock, in seconds."""
        if edge is None:
            if self._told is not None:
                first, began = self._told
                self._told = None
                self._log.warning("%s goes on, after %.0f s (%s)", self._what, at - began, first)
        elif self._told is None and at - since >= self._patience_s:
            self._told = (edge, since)
            self._log.warning("%s is blocked for %.0f s: %s; `rollstream status` says what holds it up", self._what, at - since, edge)
