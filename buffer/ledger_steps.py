"""The trainer's half of the pure ledger: attach, open_step, lease, payload_lost, trained, checkpoint, drain (rules V1, P2, T1-T5, T8)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from buffer.contract import Attachment, Blocked, CheckpointRef, ChunkRecord, RunState, StepRecord, TrainedReply
from buffer.ledger_state import Chunk, Group, State, chunks_in
from protocol.errors import Fenced, RunEnded, StepOrder
from protocol.messages import Edge, GroupState, Reason, Seq
from protocol.versions import Fork, Version

MIN_KEEP = 2


def attach(state: State, checkpoint: CheckpointRef | None, incarnation_id: str, *, abandon: Sequence[Seq] | None, above: int) -> Attachment:
    state.sequence += 1
    if not (state.incarnation and state.incarnation_id == incarnation_id):
        if incarnation_id in state.attached and state.rules.attach_once:
            raise Fenced(f"incarnation {state.incarnation} is attached: this trainer has been replaced, and its attach came too late")
        _check_known(state, checkpoint, abandon)
        _rewind(state, checkpoint, incarnation_id, abandon, above)
    state.trainer_sequence = state.sequence
    return Attachment(incarnation=state.incarnation, incarnation_id=incarnation_id, resume_step=state.trained, lineage=state.lineage)


def _check_known(state: State, checkpoint: CheckpointRef | None, abandon: Sequence[Seq] | None) -> None:
    """Raises: `StepOrder` unless `checkpoint` is registered, or all that followed it is given up."""
    if checkpoint is None:
        known = state.floor == 0 or bool(abandon)
    else:
        registered = any((one.step, one.incarnation) == (checkpoint.step, checkpoint.incarnation) for one in state.checkpoints)
        on_record = checkpoint.incarnation in state.forks and checkpoint.step <= state.trained
        known = registered or (abandon is not None and on_record and (bool(abandon) or checkpoint.step >= state.dropped))
    if not known and state.rules.checkpoint_commit:
        raise StepOrder(f"attach to {checkpoint or 'the starting weights'}: not a registered checkpoint; registered are {state.checkpoints}")


def _rewind(state: State, checkpoint: CheckpointRef | None, incarnation_id: str, abandon: Sequence[Seq] | None, above: int) -> None:
    step = checkpoint.step if checkpoint is not None else 0
    parent = state.incarnation
    if checkpoint is not None and parent:
        lineage = state.lineage
        if not lineage.contains(Version(checkpoint.incarnation, checkpoint.step)):
            parent = checkpoint.incarnation
    if abandon is None:
        for trained in range(step + 1, state.trained + 1):
            for chunk in state.chunks_of(trained):
                for seq in chunk.seqs:
                    state.untrain(seq)
    else:
        _abandon(state, step, abandon)
    state.incarnation = max(state.incarnation, above) + 1
    state.incarnation_id = incarnation_id
    state.attached.add(incarnation_id)
    state.forks[state.incarnation] = Fork(parent, step)
    state.trained, state.trained_by, state.run = step, 0, RunState.OPEN
    state.checkpoints = [one for one in state.checkpoints if one.step <= step]
    if abandon is not None and checkpoint is not None and checkpoint.step not in (one.step for one in state.checkpoints):
        state.checkpoints.append(checkpoint)


def _abandon(state: State, step: int, freed: Sequence[Seq]) -> None:
    """Rule T5, further back: everything after `step` is given up. `freed` are groups of its steps that have left the journal."""
    for later in sorted(one for one in state.current if one > step):
        state.drop_step(later)
    for seq in freed:
        group = state.groups.get(seq)
        freed_here = group.freed if group is not None else 0 <= seq < state.low_seq and seq not in state.letters
        if freed_here and step < state.dropped:
            state.groups[seq] = Group(state=GroupState.RELEASED, attempt=0, reason=Reason.REWOUND)
            bisect.insort(state.retry, seq)
            state.releases[Reason.REWOUND] += 1
            state.trained_groups -= 1
    state.drop_slots()
    if state.policy.on_policy:
        state.drop_ready()
    state.floor, state.dropped = min(state.floor, step), min(state.dropped, step)


def open_step(state: State, incarnation: int, step: int) -> StepRecord:
    if step != state.trained + 1:
        raise StepOrder(f"open_step({step}): step {state.trained} is the newest trained, so {state.trained + 1} is next")
    record = state.record(step)
    if record is not None:
        # Another trainer opened it. A step that is whole is replayed by its record; the rest of a torn one is judged anew.
        chunks = state.chunks_of(step)
        if state.current[step] == incarnation or (len(chunks) == chunks_in(record) and all(chunk.whole for chunk in chunks)):
            return record
        if not chunks:
            del state.records[step, state.current[step]]
    settings = state.settings
    record = StepRecord(
        step=step,
        incarnation=incarnation,
        groups=settings.groups_per_step,
        chunk=settings.chunk,
        guard=state.policy.guard.value,
        cutoff=state.policy.cutoff(step),
        lineage=state.lineage,
    )
    state.current[step], state.records[step, incarnation] = incarnation, record
    return record


def lease(state: State, now_ms: int, incarnation: int, step: int, index: int) -> ChunkRecord | Blocked:
    record = state.record(step)
    if step != state.trained + 1 or record is None:
        raise StepOrder(f"lease({step}, {index}): open step {state.trained + 1} first; it is the next")
    if not 0 <= index < chunks_in(record):
        raise StepOrder(f"lease({step}, {index}): a step has chunks 0 to {chunks_in(record) - 1}")
    chunk = state.chunks.get((step, index))
    if chunk is None:
        if state.run is not RunState.OPEN:
            raise RunEnded("the run is draining: nothing new is handed out")
        if index and (step, index - 1) not in state.chunks:
            raise StepOrder(f"lease({step}, {index}): chunk {index - 1} comes first")
        _opened_by(record, incarnation, state, index)
        chunk = Chunk(size=min(record.chunk, record.groups - record.chunk * index), judged_by=record.incarnation, leased_by=incarnation)
    state.tick(now_ms)
    state.sweep()
    if not chunk.whole:
        if chunk.judged_by != record.incarnation or record.incarnation != incarnation:
            # It lost a payload under another trainer: whoever goes on judges it whole.
            _opened_by(record, incarnation, state, index)
        rejudged = chunk.judged_by != record.incarnation
        if not state.fill(chunk, record):
            return Blocked(edge=Edge.NO_GROUP)
        if rejudged:
            chunk.judged_by, chunk.revision = record.incarnation, chunk.revision + 1
        state.chunks[step, index] = chunk
    chunk.leased_by = incarnation
    return state.chunk_record(step, index)


def _opened_by(record: StepRecord, incarnation: int, state: State, index: int) -> None:
    if record.incarnation != incarnation and state.rules.fencing:
        raise StepOrder(f"lease({record.step}, {index}): open_step({record.step}) comes first")


def payload_lost(state: State, incarnation: int, step: int, index: int, seq: Seq) -> ChunkRecord | Blocked:
    chunk, record = state.chunks.get((step, index)), state.record(step)
    if step != state.trained + 1 or chunk is None or record is None:
        raise StepOrder(f"payload_lost({step}, {index}): not a leased chunk of step {state.trained + 1}")
    if seq in chunk.seqs:
        if step in state.digests:
            _leave_hole(state, step, chunk, seq)
        else:
            state.release(seq, Reason.PAYLOAD_LOST)
        chunk.seqs.remove(seq)
        chunk.revision += 1
    if not chunk.whole and (chunk.judged_by != incarnation or not state.fill(chunk, record)):
        return Blocked(edge=Edge.NO_GROUP)
    return state.chunk_record(step, index)


def _leave_hole(state: State, step: int, chunk: Chunk, seq: Seq) -> None:
    group = state.groups[seq]
    state.drop_payload(seq, group)
    state.leased -= 1
    state.bytes_used -= group.charged
    group.header, group.charged = None, 0
    state.bury(seq, Reason.PAYLOAD_LOST)
    state.keep_letter(seq, group, Reason.PAYLOAD_LOST, f"payload lost in a replay of step {step}")
    chunk.size -= 1


def trained(state: State, incarnation: int, step: int, digest: str) -> TrainedReply:
    if not (step == state.trained and state.trained_by == incarnation and state.digests.get(step) == digest):
        _finish(state, incarnation, step, digest)
    newest = max((one.step for one in state.checkpoints), default=0)
    wanted = state.trained_bytes * 2 > state.settings.byte_budget and newest < step and not state.settings.spill  # a spill frees bytes by itself
    return TrainedReply(trained=step, lineage=state.lineage, checkpoint_wanted=wanted)


def _finish(state: State, incarnation: int, step: int, digest: str) -> None:
    record = state.record(step)
    if step != state.trained + 1 or record is None:
        raise StepOrder(f"trained({step}): the newest trained step is {state.trained}")
    chunks = state.chunks_of(step)
    for index in range(chunks_in(record)):
        if index >= len(chunks) or not chunks[index].whole:
            raise StepOrder(f"trained({step}): chunk {index} has not been leased in full")
    state.free()
    state.compact()
    size = 0
    for chunk in chunks:
        for seq in chunk.seqs:
            group = state.groups[seq]
            group.state = GroupState.TRAINED
            state.leased -= 1
            state.trained_groups += 1
            size += group.charged
    state.trained_bytes += size
    state.end_step(step, incarnation, size)
    known, fork = state.digests.get(step), state.forks[incarnation]
    if known == digest and fork.parent and fork.step == step - 1:
        state.forks[incarnation] = Fork(fork.parent, step)  # rule V1: the same weights are the same version
    elif known is not None and known != digest:
        part(state, step)
    state.digests[step] = digest
    state.trained, state.trained_by = step, incarnation


def part(state: State, step: int) -> None:
    """Other weights came out of a replayed `step`: the lines part here for good. On-policy, what was taken for later steps goes with the old line (rule T6)."""
    if state.policy.on_policy and state.rules.rewound:
        for later in sorted(one for one in state.current if one > step):
            state.drop_step(later)
        state.drop_slots()
        state.drop_ready()
    else:
        for later in [one for one in state.digests if one > step]:
            state.digests[later] = ""


def checkpoint(state: State, incarnation: int, new: CheckpointRef, keep: int) -> tuple[CheckpointRef, ...]:
    if state.rules.fencing and (new.step > state.trained or new.incarnation != incarnation):
        raise StepOrder(f"checkpoint {new.step} of incarnation {new.incarnation}: step {state.trained} of incarnation {incarnation} is the newest trained")
    kept, keep = list(state.checkpoints), max(MIN_KEEP, keep)
    if all(one.step != new.step for one in kept):
        if kept and new.step < kept[-1].step and state.rules.fencing:
            raise StepOrder(f"checkpoint {new.step}: a newer one, {kept[-1].step}, is registered")
        kept = sorted([*kept, new], key=lambda one: one.step)
    state.checkpoints = kept[-keep:]
    if not state.rules.floor:
        state.floor = max(state.floor, new.step)
    elif len(kept) >= keep:
        state.floor = max(state.floor, state.checkpoints[0].step)
    state.free()
    state.compact()
    return tuple(state.checkpoints)


def drain(state: State) -> None:
    state.run = RunState.DRAINING
