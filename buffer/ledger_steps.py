"""The trainer's half of the pure ledger: attach, open_step, lease, payload_lost, trained, checkpoint, drain (rules V1, P2, T1-T5, T8)."""

from __future__ import annotations

from buffer.contract import Attachment, Blocked, CheckpointRef, ChunkRecord, RunState, StepRecord, TrainedReply
from buffer.ledger_state import Chunk, State, chunks_in, payload_name
from protocol.errors import RunEnded, StepOrder
from protocol.messages import Edge, GroupState, Reason, Seq
from protocol.versions import Fork, Version

MIN_KEEP = 2


def attach(state: State, checkpoint: CheckpointRef | None, incarnation_id: str) -> Attachment:
    if not (state.incarnation and state.incarnation_id == incarnation_id):
        _rewind(state, checkpoint, incarnation_id)
    return Attachment(incarnation=state.incarnation, incarnation_id=incarnation_id, resume_step=state.trained, lineage=state.lineage)


def _rewind(state: State, checkpoint: CheckpointRef | None, incarnation_id: str) -> None:
    step = checkpoint.step if checkpoint is not None else 0
    if checkpoint is None:
        known = state.floor == 0
    else:
        known = any((one.step, one.incarnation) == (checkpoint.step, checkpoint.incarnation) for one in state.checkpoints)
    if not known and state.rules.checkpoint_commit:
        raise StepOrder(f"attach to {checkpoint or 'the starting weights'}: not a registered checkpoint; registered are {state.checkpoints}")
    parent = state.incarnation
    if checkpoint is not None and parent:
        lineage = state.lineage
        if not lineage.contains(Version(checkpoint.incarnation, checkpoint.step)):
            parent = checkpoint.incarnation
    for trained in range(step + 1, state.trained + 1):
        for chunk in state.chunks_of(trained):
            for seq in chunk.seqs:
                group = state.groups[seq]
                group.state = GroupState.LEASED
                state.trained_groups -= 1
                state.leased += 1
                state.trained_bytes -= group.charged
    state.incarnation += 1
    state.incarnation_id = incarnation_id
    state.forks[state.incarnation] = Fork(parent, step)
    state.trained, state.trained_by, state.run = step, 0, RunState.OPEN
    state.checkpoints = [one for one in state.checkpoints if one.step <= step]


def open_step(state: State, incarnation: int, step: int) -> StepRecord:
    state.fence(incarnation)
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
        guard=settings.staleness_guard.value,
        cutoff=step - 1 - state.bound,
        lineage=state.lineage,
    )
    state.current[step], state.records[step, incarnation] = incarnation, record
    return record


def lease(state: State, now_ms: int, incarnation: int, step: int, index: int) -> ChunkRecord | Blocked:
    if state.rules.fencing:
        state.fence(incarnation)
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
    state.fence(incarnation)
    chunk, record = state.chunks.get((step, index)), state.record(step)
    if step != state.trained + 1 or chunk is None or record is None:
        raise StepOrder(f"payload_lost({step}, {index}): not a leased chunk of step {state.trained + 1}")
    if seq in chunk.seqs:
        if step in state.digests:
            _leave_hole(state, chunk, seq)
        else:
            state.release(seq, Reason.PAYLOAD_LOST)
        chunk.seqs.remove(seq)
        chunk.revision += 1
    if not chunk.whole and (chunk.judged_by != incarnation or not state.fill(chunk, record)):
        return Blocked(edge=Edge.NO_GROUP)
    return state.chunk_record(step, index)


def _leave_hole(state: State, chunk: Chunk, seq: Seq) -> None:
    group = state.groups[seq]
    state.payloads.pop(payload_name(seq, group.attempt, group.token), None)
    state.leased -= 1
    state.bytes_used -= group.charged
    state.dead[Reason.PAYLOAD_LOST] += 1
    group.state, group.reason, group.header, group.charged = GroupState.DEAD, Reason.PAYLOAD_LOST, None, 0
    chunk.size -= 1


def trained(state: State, incarnation: int, step: int, digest: str) -> TrainedReply:
    state.fence(incarnation)
    if not (step == state.trained and state.trained_by == incarnation and state.digests.get(step) == digest):
        _finish(state, incarnation, step, digest)
    newest = max((one.step for one in state.checkpoints), default=0)
    wanted = state.trained_bytes * 2 > state.settings.byte_budget and newest < step
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
    for chunk in chunks:
        for seq in chunk.seqs:
            group = state.groups[seq]
            group.state = GroupState.TRAINED
            state.leased -= 1
            state.trained_groups += 1
            state.trained_bytes += group.charged
    known, fork = state.digests.get(step), state.forks[incarnation]
    if known == digest and fork.parent and fork.step == step - 1:
        state.forks[incarnation] = Fork(fork.parent, step)  # rule V1: the same weights are the same version
    elif known is not None and known != digest:
        for later in [one for one in state.digests if one > step]:
            state.digests[later] = ""  # the lines part here for good
    state.digests[step] = digest
    state.trained, state.trained_by = step, incarnation


def checkpoint(state: State, incarnation: int, new: CheckpointRef, keep: int) -> tuple[CheckpointRef, ...]:
    if state.rules.fencing:
        state.fence(incarnation)
        if new.step > state.trained or new.incarnation != incarnation:
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


def drain(state: State, incarnation: int) -> None:
    state.fence(incarnation)
    state.run = RunState.DRAINING
