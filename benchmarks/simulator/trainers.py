"""A trainer: attach, steps in chunks, witness, trained, publish in the background, checkpoint in the background.

    open_step ─► lease, read, train … ─► optimizer step ─► witness ─► trained ─► publish, checkpoint when due

What it knows after a kill is the disk: checkpoints by (step, incarnation), the witness file, published versions, the spill. Order and threads are those of
`consumer.loop`, `consumer.keeper`, `buffer.client.TrainerBuffer`, `buffer.spill` and `weightsync.publisher`. When the ledger says that it lost writes, the
trainer tells it what it knows, drops the step under way and goes on (rule R1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from benchmarks.simulator.disk import Saved, history_of
from benchmarks.simulator.kernel import GaveUp, News, Process, Steps, Thread
from benchmarks.simulator.scenario import KEEP
from benchmarks.simulator.weights import START, Weights
from buffer.contract import Attachment, Blocked, CheckpointRef, ChunkRecord, History, LedgerStatus, RunState, TrainedReply
from buffer.ledger import Known, PureLedger
from buffer.ledger_state import payload_name
from buffer.witness import WitnessLine
from consumer.mending import beyond
from protocol.errors import Fenced, LedgerRegressed, PayloadLost, RollstreamError, RunEnded, StepOrder, WeightError
from protocol.messages import Edge, EngineState, GroupHeader
from protocol.versions import Fork, Lineage, Version

if TYPE_CHECKING:
    from benchmarks.simulator.world import World

T = TypeVar("T")
_RECHECK_S = 1.0
_ACKS_S = 15.0
_POINTER_S = 2.0
_PUBLISH_S = 20.0


class Trainer(Process):
    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world.kernel, name, life)
        self.world = world
        self.weights = START
        self.incarnation = 0
        self.incarnation_id = f"{name}.{life}"
        self.lineage = Lineage({}, 0)
        self.resume_step = 0
        self.journal: dict[int, tuple[ChunkRecord, ...]] = {}
        self.checkpointed = 0
        self.drained = False
        self.waiting_for: Edge | None = None
        self._seen = 0
        self._tellings = 0
        """How often it has told the ledger what it knows."""
        self._busy = False
        self._regressed = False
        self._saving: Thread | None = None
        self._pending: Weights | None = None
        self._published: Weights | None = None
        self._publishing = False
        self._publisher_thread: Thread | None = None
        self.spawn("train", self._life())

    def failed(self, thread: Thread, problem: RollstreamError) -> None:
        self.kernel.log(self.name, "%s ends it: %s", thread.title, problem)
        self.world.trainer_failed(self, thread.title, problem)

    def ledger(self, name: str, call: Callable[[PureLedger, Known], T], *about: object) -> Steps[T]:
        """A call under this attachment: it says what it has seen, and learns from the answer (rule R1). One at a time, so that each says what the one before
        was answered.
        """
        pure = self.world.server.pure
        yield from self._take_turn()
        known: Known = {"incarnation_id": self.incarnation_id, "seen": self._seen if "seen" in self.world.keeps else 0}
        try:
            answer, sequence = yield from self.ask(name, lambda _: (call(pure, known), pure.state.sequence), *about)
        except RollstreamError:
            self._busy = False
            raise
        self._busy, self._seen = False, max(self._seen, sequence)
        return answer

    def _take_turn(self) -> Steps[None]:
        while self._busy:
            yield 0.005
        self._busy = True

    # a life ---------------------------------------------------------------------------------------------------------------------------------

    def _life(self) -> Steps[None]:
        world, server = self.world, self.world.server
        yield 0.05
        on_disk = [
            saved.reference for saved in world.disk.checkpoints.values()
        ]  # first: what another trainer saves after the look at the ledger proves nothing
        status = yield from self.ask("status", lambda _: server.pure.status(server.now_ms))
        if world.mischief.springs(self, "status read"):
            yield 0.001
        if status.state is RunState.DRAINING and world.ending:
            world.left(self)
            return
        registered = yield from self._registered(status, on_disk)
        reference = world.choose_checkpoint(registered)
        if reference is not None:
            saved = world.saved(reference)
            self.weights, self.journal, self.checkpointed = saved.weights, dict(saved.journal), reference.step
        attachment = yield from self._attach(reference)
        self.incarnation, self.lineage, self.resume_step = attachment.incarnation, attachment.lineage, attachment.resume_step
        if world.mischief.springs(self, "attached"):
            yield 0.001
        self._sweep(registered if reference is not None else ())
        manifests = yield from self.ask("versions", lambda _: set(server.channel.digests))
        newest = self.incarnation if "own_leftovers" in world.keeps else max(self.incarnation, world.disk.newest_incarnation())
        for orphan in [version for version in world.disk.published if version.incarnation <= newest and version not in manifests]:
            del world.disk.published[orphan]
        self._publisher_thread = self.spawn("publish", self._publisher())
        if world.scenario.settings.spill:
            self.spawn("spill", self._spiller())
        yield from self._publish_now()
        while not world.ending:
            try:
                if not (yield from self._step(self.weights.step + 1)):
                    break
            except LedgerRegressed:
                yield from self._tell()
        yield from self._end()

    def _registered(self, status: LedgerStatus, on_disk: Sequence[CheckpointRef]) -> Steps[tuple[CheckpointRef, ...]]:
        """What may be resumed from, once the ledger knows of every checkpoint that is on the disk."""
        world, server = self.world, self.world.server
        gone = [one for one in status.checkpoints if one not in on_disk]
        newer = beyond(status, on_disk, gone) if "resume_ahead" in world.keeps else None
        saved = world.disk.checkpoints.get((newer.step, newer.incarnation)) if newer is not None else None
        if saved is None:  # or another trainer has deleted it meanwhile
            return status.checkpoints
        # In a name of its own, newer than any it has seen: told in the name of the trainer that saved it, which may live, it would take that one's steps back.
        mine = max(world.disk.newest_incarnation(), status.incarnation) + 1
        lineage = Lineage({**saved.lineage.forks, mine: Fork(saved.incarnation, saved.weights.step)}, mine)
        told_as = f"{self.incarnation_id}.telling"
        history = history_of(saved.weights, saved.journal, lineage, told_as, world.disk)

        def reassert(_: object) -> None:
            server.pure.reassert(mine, told_as, history)
            world.has_taken_over(self, mine, lineage.forks[mine], saved.weights)

        try:
            yield from self.ask("reassert", reassert, saved.weights.step)
        except Fenced:  # somebody attached meanwhile
            return (yield from self.ask("status", lambda _: server.pure.status(server.now_ms))).checkpoints
        return (yield from self.ask("status", lambda _: server.pure.status(server.now_ms))).checkpoints

    def _attach(self, reference: CheckpointRef | None) -> Steps[Attachment]:
        world, server = self.world, self.world.server
        above, weights = world.disk.newest_incarnation() if "incarnation_above" in world.keeps else 0, self.weights

        def attach(_: object) -> tuple[Attachment, int]:
            before = server.pure.state.incarnation_id
            attachment = server.pure.attach(reference, incarnation_id=self.incarnation_id, above=above)
            if before != self.incarnation_id:
                fork = attachment.lineage.forks[attachment.incarnation]
                world.has_taken_over(self, attachment.incarnation, fork, weights)
                server.publish("run")
                server.publish("slot")
            server.durable()
            return attachment, server.pure.state.sequence

        attachment, self._seen = yield from self.ask("attach", attach, reference and f"{reference.step} of {reference.incarnation}")
        return attachment

    def _tell(self) -> Steps[None]:
        """The ledger forgot something: it is told, and the step under way is taken from the start."""
        world, server = self.world, self.world.server
        yield from self._take_turn()
        seen = self._seen if "seen" in world.keeps else 0
        history: History = history_of(self.weights, self.journal, self.lineage, self.incarnation_id, world.disk)

        def reassert(_: object) -> int:
            server.pure.reassert(self.incarnation, self.incarnation_id, history, seen=seen)
            for topic in ("run", "slot", "ready"):
                server.publish(topic)
            return server.pure.state.sequence

        try:
            sequence = yield from self.ask("reassert", reassert, self.weights.step)
        except RollstreamError:
            self._busy = False
            raise
        self._tellings, self._seen, self._regressed, self._busy = self._tellings + 1, sequence, False, False

    def _end(self) -> Steps[None]:
        """A step's edge: publish, checkpoint, wait for acks, drain."""
        server = self.world.server
        yield from self._publish_now()
        yield from self._settle()
        if self.checkpointed != self.weights.step:
            self._begin_checkpoint()
            yield from self._settle()
        version, end = Version(self.incarnation, self.weights.step), self.kernel.now + _ACKS_S
        while self.kernel.now < end:
            facts = yield from self.ask("engines", lambda _: list(server.channel.facts.values()))
            if all(one.version is not None and one.version >= version for one in facts if one.state is not EngineState.LEAVING):
                break
            yield 0.5

        def drain(pure: PureLedger, known: Known) -> None:
            pure.drain(self.incarnation, **known)
            for topic in ("run", "slot", "ready"):
                server.publish(topic)

        yield from self.ledger("drain", drain)
        self.drained = True
        self.world.left(self)

    # a step ---------------------------------------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> Steps[bool]:
        """False: the run ends with the weights as they are."""
        world, scenario, keeps = self.world, self.world.scenario, self.world.keeps
        yield from self.ledger("open_step", lambda pure, known: pure.open_step(self.incarnation, step, **known), step)
        chunks: list[ChunkRecord] = []
        read: list[tuple[int, str]] = []
        while not chunks or not chunks[-1].last:
            taken = yield from self._take(step, len(chunks))
            if taken is None:
                return False
            if world.mischief.springs(self, "leased"):
                yield 0.001
            chunks.append(taken[0])
            read += taken[1]
            yield scenario.train_s * (0.5 + self.random.random())
        self._learn(chunks, read)
        if world.mischief.springs(self, "stepped"):
            yield 0.001
        if "witness_first" in keeps:
            yield from self._witness(read)
        if "pointer_after_trained" not in keeps:
            self._submit()
            yield 0.08
        wanted = yield from self._trained(step)
        if world.mischief.springs(self, "trained"):
            yield 0.001
        if "witness_first" not in keeps:
            yield from self._witness(read)
        if step % scenario.publish_every == 0:
            self._submit()
        if wanted:
            yield from self._settle()
        free = self._saving is None or self._saving.done
        if free and step != self.checkpointed and (wanted or step - self.checkpointed >= scenario.checkpoint_every):
            self._begin_checkpoint()
        return True

    def _learn(self, chunks: list[ChunkRecord], read: list[tuple[int, str]]) -> None:
        """The optimizer step."""
        world, before = self.world, self.weights
        self.weights = before.after(read, "" if world.scenario.exact else str(self.incarnation))
        step = self.weights.step
        self.journal[step] = tuple(chunks)
        world.judge.stepped(self, self.incarnation, chunks, read, before)
        world.judge.named(Version(self.incarnation, step), self.weights)
        self.kernel.log(self.name, "steps to %d (%s) with %s", step, self.weights.digest, [seq for seq, _ in read])

    def _trained(self, step: int) -> Steps[bool]:
        """The optimizer step is in the weights: the ledger hears of it, by telling it everything if need be. Whether a checkpoint is wanted."""

        def trained(pure: PureLedger, known: Known) -> TrainedReply:
            reply = pure.trained(self.incarnation, step, self.weights.digest, **known)
            self.world.watch.trained(self)
            return reply

        try:
            reply = yield from self.ledger("trained", trained, step, self.weights.digest)
        except LedgerRegressed:
            yield from self._tell()
            return False
        return reply.checkpoint_wanted

    def _witness(self, read: list[tuple[int, str]]) -> Steps[None]:
        yield 0.002
        self.world.disk.witness.append(
            WitnessLine(
                incarnation=self.incarnation,
                parent=self.lineage.forks[self.incarnation].parent,
                fork_step=self.resume_step,
                step=self.weights.step,
                seqs=tuple(seq for seq, _ in read),
                tokens=1,
                masked=0,
                max_staleness=0,
                digest=self.weights.digest,
                at=self.kernel.now,
            )
        )
        if self.world.mischief.springs(self, "witnessed"):
            yield 0.001

    def _take(self, step: int, index: int) -> Steps[tuple[ChunkRecord, list[tuple[int, str]]] | None]:
        """The chunk as it is trained, and what was read of each group. None: the run ends first."""
        server, topics = self.world.server, ("ready", "run")
        chunk: ChunkRecord | None = None
        while True:
            while chunk is None:
                mark = server.mark(topics)
                try:
                    answer = yield from self.ledger("lease", lambda pure, known: pure.lease(server.now_ms, self.incarnation, step, index, **known), step, index)
                except RunEnded:
                    return None
                if isinstance(answer, Blocked):
                    if self.world.ending:
                        return None
                    self.waiting_for = answer.edge
                    yield News(topics, mark, _RECHECK_S)
                else:
                    self.waiting_for, chunk = None, answer
            headers = chunk.headers
            found = yield from self.ask("read", lambda _, headers=headers: [self._read(step, header) for header in headers], step, index)  # type: ignore[misc]
            lost = [header.seq for header, digest in zip(headers, found, strict=True) if digest is None]
            if not lost or "lost_is_reported" not in self.world.keeps:
                return chunk, [(int(header.seq), digest) for header, digest in zip(headers, found, strict=True) if digest is not None]
            for header in headers:
                if header.seq in lost:
                    self.world.watch.lost(self, header)
            for seq in lost:
                answer = yield from self.ledger(
                    "payload_lost",
                    lambda pure, known, seq=seq: pure.payload_lost(self.incarnation, step, index, seq, **known),  # type: ignore[misc]
                    step,
                    index,
                    seq,
                )
            if isinstance(answer, Blocked):
                yield from self.ledger("open_step", lambda pure, known: pure.open_step(self.incarnation, step, **known), step)
                chunk = None
            else:
                chunk = answer

    def _read(self, step: int, header: GroupHeader) -> str | None:
        """Digest of the payload in the server, else in the spill; None: it is nowhere, or damaged."""
        name = payload_name(header.seq, header.attempt, header.token)
        try:
            self.world.server.pure.payload(header)
        except PayloadLost:
            if "verify_payload" not in self.world.keeps and name in self.world.server.pure.state.payloads:
                return "damaged"
            return self.world.disk.spilled(step, name)
        return header.payload_digest

    # checkpoints ----------------------------------------------------------------------------------------------------------------------------

    def _begin_checkpoint(self) -> None:
        self.checkpointed = self.weights.step
        saved = Saved(self.weights, self.incarnation, self.incarnation_id, self.lineage, dict(self.journal))
        self._saving = self.spawn(f"checkpoint {saved.weights.step}", self._save(saved))

    def _settle(self) -> Steps[None]:
        while self._saving is not None and not self._saving.done:
            if self._regressed:
                yield from self._tell()
            yield 0.05

    def _save(self, saved: Saved) -> Steps[None]:
        world, server, step = self.world, self.world.server, saved.weights.step
        yield 0.05 + 0.3 * self.random.random()
        world.disk.checkpoints[step, self.incarnation] = saved
        world.mischief.springs(self, "saved")
        yield 0.02

        def register(pure: PureLedger, known: Known) -> tuple[CheckpointRef, ...]:
            kept = pure.checkpoint(self.incarnation, saved.reference, keep=KEEP, **known)
            server.durable()
            return kept

        while True:
            try:
                kept = yield from self.ledger("checkpoint", register, step)
                break
            except LedgerRegressed:
                self._regressed, tellings = True, self._tellings
                while self._tellings == tellings:
                    yield 0.05
        if world.mischief.springs(self, "registered"):
            yield 0.001
        floor = min(one.step for one in kept) if len(kept) >= KEEP else 0
        for old in [old for old in self.journal if old <= floor]:
            del self.journal[old]
        yield 0.01
        self._sweep(kept, below=(step, self.incarnation))

    def _sweep(self, kept: tuple[CheckpointRef, ...], below: tuple[int, int] | None = None) -> None:
        """Delete checkpoints that are not kept, but never a later incarnation's."""
        names = {(one.step, one.incarnation) for one in kept}
        for name in list(self.world.disk.checkpoints):
            if name not in names and name[1] <= self.incarnation and (below is None or name < below):
                del self.world.disk.checkpoints[name]
                self.world.disk.swept[name] = self.incarnation_id

    # spill ----------------------------------------------------------------------------------------------------------------------------------

    def _spiller(self) -> Steps[None]:
        """Steps that should leave the server, one after the other. A regress is the training thread's business."""
        pure = self.world.server.pure
        while True:
            yield 1.0
            for step in (yield from self.ask("spillable", lambda _: pure.spillable(8))):
                before, chunks = yield from self.ask("spilling", lambda _, step=step: (pure.trained_step(step), pure.chunks(step, step)), step)  # type: ignore[misc]
                if before is None or not chunks:
                    break
                headers = [header for chunk in chunks for header in chunk.headers]
                found = yield from self.ask("read", lambda _, step=step, headers=headers: [self._read(step, one) for one in headers], step)  # type: ignore[misc]
                after = yield from self.ask("trained_step", lambda _, step=step: pure.trained_step(step), step)  # type: ignore[misc]
                if after != before:
                    break
                names = [payload_name(header.seq, header.attempt, header.token) for header in headers]
                kept = {name: digest for name, digest in zip(names, found, strict=True) if digest is not None}
                self.world.disk.spill.setdefault(step, {})[before.incarnation] = kept
                try:
                    yield from self.ledger("spilled", lambda pure, known, step=step: pure.spilled(self.incarnation, step, **known), step)  # type: ignore[misc]
                except (LedgerRegressed, StepOrder):  # it fell back meanwhile, and may have been told already
                    break

    # publishing -----------------------------------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """At most one waits; the newest wins (rule W2)."""
        self._pending = self._published = self.weights
        if self._publisher_thread is not None:
            self._publisher_thread.wake()

    def _publish_now(self) -> Steps[None]:
        if self._published is not self.weights:
            self._submit()
        end = self.kernel.now + _PUBLISH_S
        while self._pending is not None or self._publishing:
            yield 0.03
            if self.kernel.now > end:
                raise GaveUp("a version was not published in time")

    def _publisher(self) -> Steps[None]:
        while True:
            if self._pending is None:
                assert self._publisher_thread is not None
                yield from self._publisher_thread.rest(_POINTER_S)
            if self._pending is not None:
                weights, self._pending, self._publishing = self._pending, None, True
                yield 0.01 + 0.05 * self.random.random()
                yield from self._publish(weights)
                self._publishing = False
            elif self._published is not None and "pointer_again" in self.world.keeps:
                yield from self._look_after(self._published)

    def _look_after(self, published: Weights) -> Steps[None]:
        """A pointer that fell back with the server is moved forward again."""
        server = self.world.server
        newest = yield from self.ask("newest", lambda _: server.channel.newest)
        if (newest is None or newest < Version(self.incarnation, published.step)) and self._pending is None:
            self._pending = published

    def _publish(self, weights: Weights) -> Steps[None]:
        world, server, version = self.world, self.world.server, Version(self.incarnation, weights.step)
        world.written(version, weights)

        def publish(_: object) -> None:
            state = server.pure.state
            server.channel.publish(state.incarnation, state.trained, version, weights.digest)
            server.publish("weights")

        try:
            yield from self.ask("publish", publish, str(version), weights.digest)
        except LedgerRegressed:
            yield 0.5
            self._pending = self._pending or weights
            return
        except WeightError as problem:
            if "incarnation_order" in world.keeps:
                raise
            self.kernel.log(self.name, "publish of %s: %s", version, problem)
        dying = yield from self._collect(())
        if dying:
            for one in dying:
                world.disk.published.pop(one, None)
            yield from self._collect(dying)

    def _collect(self, deleted: tuple[Version, ...]) -> Steps[tuple[Version, ...]]:
        server, keep = self.world.server, self.world.scenario.keep_versions
        return (yield from self.ask("collect", lambda _: server.channel.collect(server.now_ms, keep, deleted)))
