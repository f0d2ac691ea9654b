"""Rule R1 in the pure ledger: a ledger that lost acknowledged writes is told by the trainer what became of it.

    begin     groups of steps up to the oldest kept checkpoint's are TRAINED, and freed unless both sides know the same of their step; what the ledger took
              for other steps than the trainer did is RELEASED; `trained` is that checkpoint's step
    install   one step, ascending: its chunks are in the journal, its groups TRAINED; once for each later step
    end       bytes over the budget come free; the trainer's calls are let in again

After each of the three the ledger is one that could have come about without a loss, so a trainer that dies in between leaves nothing to mend but the rest.
"""

from __future__ import annotations

import bisect

from buffer.contract import CheckpointRef, History, PastStep
from buffer.ledger_state import Chunk, Group, State, payload_name
from buffer.ledger_steps import part
from protocol.errors import Fenced
from protocol.messages import GroupHeader, GroupState, Reason, Seq
from protocol.versions import Fork


def reassert(state: State, incarnation: int, incarnation_id: str, history: History, seen: int = 0) -> None:
    """`seen`: of the caller's last acknowledged call, as far as it knows. A ledger that is not behind it has been told already, and the call is a repeat that
    came late: what was done since stays.
    """
    state.sequence += 1
    other = incarnation == state.incarnation and "" not in (incarnation_id, state.incarnation_id) and incarnation_id != state.incarnation_id
    if state.incarnation > incarnation or other:
        raise Fenced(f"incarnation {state.incarnation} is attached: this trainer has been replaced and must stop")
    if incarnation == state.incarnation and 0 < seen <= state.trainer_sequence and state.rules.reassert_once:
        state.trainer_sequence = state.sequence
        return
    state.sequence = max(state.sequence, seen)
    covered = _begin(state, incarnation, incarnation_id, history)
    for past in history.steps:
        if past.step > covered and state.rules.reassert:
            _install(state, past, history.checkpoints)
    _end(state)


def covered_step(history: History) -> int:
    """The newest step that is known by its groups alone, or by a checkpoint alone."""
    journalled = [past.step for past in history.steps if past.chunks]
    if journalled:
        return min(journalled) - 1
    return max((*(past.step for past in history.steps), *(one.step for one in history.checkpoints)), default=0)


def _begin(state: State, incarnation: int, incarnation_id: str, history: History) -> int:
    state.incarnation, state.incarnation_id, state.trained_by = incarnation, incarnation_id, 0
    for one, (parent, step, known_id) in history.incarnations.items():
        state.forks[one] = Fork(parent, step)
        if known_id:
            state.attached.add(known_id)
    covered = max(covered_step(history), state.dropped)
    taken = {past.step: set(past.seqs) for past in history.steps if past.step > state.dropped}
    everything = set().union(*taken.values())
    follows = max(taken, default=covered)
    closed = _closed(state, covered, history)
    closed_bytes = state.bytes_up_to(closed)
    for step in sorted(state.current):
        mine = {seq for chunk in state.chunks_of(step) for seq in chunk.seqs}
        if closed < step <= covered:
            continue
        if step <= closed:
            _close(state, step, everything if step in taken else mine)
        elif step in taken:
            _reopen(state, step, taken[step])
        elif step == follows + 1 and not mine & everything:
            follows = step
            for seq in mine:
                state.untrain(seq)
        else:
            state.drop_step(step)
    if state.policy.on_policy or state.trained > max(taken, default=covered):
        state.drop_slots()
    _raise_high_water(state, max(everything, default=-1) + 1)
    for step, seqs in taken.items():
        for seq in seqs if step <= closed else ():
            _settle(state, seq)
    state.trained, state.floor, state.dropped, state.dropped_bytes = covered, max(state.floor, covered), closed, closed_bytes
    state.checkpoints = [one for one in history.checkpoints if one.step == covered]
    return covered


def _closed(state: State, covered: int, history: History) -> int:
    """The newest covered step that leaves the journal. Later ones stay, for replays and for the spill: both sides know the same of them."""
    theirs = {past.step: past for past in history.steps}
    closed = covered
    while state.dropped < closed <= state.trained and (past := theirs.get(closed)) is not None:
        mine = [seq for chunk in state.chunks_of(closed) for seq in chunk.seqs]
        if state.digests.get(closed) != past.digest or sorted(mine) != sorted(past.seqs):
            break
        closed -= 1
    return closed


def _close(state: State, step: int, trained: set[Seq]) -> None:
    """A step that a checkpoint covers leaves the journal; what the trainer did not take for it is RELEASED."""
    for chunk in state.chunks_of(step):
        for seq in [seq for seq in chunk.seqs if seq in trained]:
            _settle(state, seq)
            chunk.seqs.remove(seq)
    state.drop_step(step)


def _reopen(state: State, step: int, theirs: set[Seq]) -> None:
    """A step that is to be told again is open, with what both sides know of it."""
    for chunk in state.chunks_of(step):
        for seq in chunk.seqs:
            state.untrain(seq)
            if seq not in theirs:
                state.release(seq, Reason.REWOUND)
        chunk.seqs = [seq for seq in chunk.seqs if seq in theirs]


def _raise_high_water(state: State, high: int) -> None:
    for seq in range(state.next_seq, high):
        state.groups[Seq(seq)] = Group(state=GroupState.RELEASED, attempt=0)
        bisect.insort(state.retry, Seq(seq))
    state.next_seq = max(state.next_seq, high)


def _settle(state: State, seq: Seq) -> None:
    """TRAINED and freed, whatever it was. The spill may have it already, and refer to its blobs: they stay."""
    group = state.groups.get(seq)
    if group is None:
        _exhume(state, seq)
        state.trained_groups += 1
        return
    if group.freed:
        return
    _detach(state, seq, group)
    state.drop_payload(seq, group, recorded=bool(state.settings.spill))
    state.trained_groups += 1
    if seq < state.low_seq:
        del state.groups[seq]
    else:
        state.groups[seq] = Group(state=GroupState.TRAINED, attempt=group.attempt, freed=True)


def _exhume(state: State, seq: Seq) -> None:
    """A group without a row has come to its end: DEAD if there is a letter of it, else TRAINED. Then it counts as neither."""
    letter = state.letters.pop(seq, None)
    if letter is not None:
        state.dead[letter.reason] -= 1
    else:
        state.trained_groups -= 1


def _detach(state: State, seq: Seq, group: Group) -> None:
    """Out of whatever counts it."""
    if group.state is GroupState.GENERATING:
        del state.generating[seq]
    elif group.state is GroupState.READY:
        state.ready.remove(seq)
    elif group.state is GroupState.LEASED:
        state.leased -= 1
    elif group.state is GroupState.RELEASED:
        state.retry.remove(seq)
    elif group.state is GroupState.DEAD:
        assert group.reason is not None
        state.dead[group.reason] -= 1
        state.letters.pop(seq, None)
    else:
        state.trained_groups -= 1
        state.trained_bytes -= group.charged
    state.bytes_used -= group.charged


def _install(state: State, past: PastStep, checkpoints: tuple[CheckpointRef, ...]) -> None:
    state.sequence += 1
    size = 0
    for chunk in past.chunks:
        record = chunk.record
        state.current[past.step], state.records[past.step, record.incarnation] = record.incarnation, record
        state.chunks[past.step, chunk.chunk] = Chunk(
            size=len(chunk.headers),
            judged_by=record.incarnation,
            leased_by=past.incarnation,
            revision=chunk.revision,
            seqs=[header.seq for header in chunk.headers],
        )
        for header in chunk.headers:
            size += _train(state, header)
    if state.digests.get(past.step, past.digest) != past.digest:
        part(state, past.step)
    state.digests[past.step] = past.digest
    state.end_step(past.step, past.incarnation, size)
    state.trained, state.trained_by = past.step, past.incarnation
    state.checkpoints += [one for one in checkpoints if one.step == past.step]


def _train(state: State, header: GroupHeader) -> int:
    """TRAINED by this attempt, whatever it was. A payload that went with the loss holds no bytes. Its bytes."""
    name, group = payload_name(header.seq, header.attempt, header.token), state.groups.get(header.seq)
    if group is not None:
        _detach(state, header.seq, group)
        if group.token != header.token:
            state.drop_payload(header.seq, group)
    else:
        _exhume(state, header.seq)
    charged = header.payload_bytes if name in state.payloads else 0
    state.unpersisted.discard(name)
    state.groups[header.seq] = Group(
        state=GroupState.TRAINED,
        attempt=header.attempt,
        failures=group.failures if group is not None else 0,
        token=header.token,
        prompt_id=group.prompt_id if group is not None else None,
        charged=charged,
        header=header,
    )
    state.trained_groups += 1
    state.trained_bytes += charged
    state.bytes_used += charged
    return charged


def _end(state: State) -> None:
    state.sequence += 1
    for seq in [*reversed(state.ready), *sorted(state.generating, reverse=True)]:
        if state.bytes_used > state.settings.byte_budget:
            state.release(seq, Reason.REWOUND)
    state.free()
    state.compact()
    state.trainer_sequence = state.sequence
