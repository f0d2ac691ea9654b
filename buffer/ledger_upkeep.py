"""What keeps a run going beside its steps, in the pure ledger: the spill, dead letters, recordings, readers of the journal (rules P3, S4, T7)."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from buffer.contract import DeadLetter
from buffer.ledger_state import Group, State
from protocol.errors import ReplayGap, StepOrder
from protocol.messages import GroupHeader, GroupState, Reason, Seq, SlotToken

SPILL_LIMIT = 1000
"""Steps that are named at a time."""


def set_aside(state: State, groups: Sequence[tuple[Seq, SlotToken]], *, lost: bool = False) -> int:
    count = 0
    for seq, token in groups:
        group = state.groups.get(seq)
        if group is not None and group.state is GroupState.READY and group.token == token:
            state.release(seq, Reason.PAYLOAD_LOST if lost else Reason.RECORDED)
            count += 1
    return count


def spillable(state: State, limit: int) -> tuple[int, ...]:
    """Steps over the retention, and the oldest others while trained bytes fill over half the budget."""
    found: list[int] = []
    step, held, over = max(state.spilled, state.dropped), state.trained_bytes, state.retired()
    while state.settings.spill and len(found) < min(limit, SPILL_LIMIT) and step < state.trained:
        if step >= over and held * 2 <= state.settings.byte_budget:
            break
        step += 1
        found.append(step)
        held -= state.bytes_up_to(step) - state.bytes_up_to(step - 1)
    return tuple(found)


def spilled(state: State, step: int) -> None:
    done = max(state.spilled, state.dropped)
    if step <= done:
        return
    if step != done + 1 or step > state.trained:
        raise StepOrder(f"spilled({step}): steps are spilled in order once they are trained; {done} is the newest spilled, {state.trained} the newest trained")
    for chunk in state.chunks_of(step):
        for seq in chunk.seqs:
            group = state.groups[seq]
            state.drop_payload(seq, group, recorded=True)
            state.bytes_used -= group.charged
            state.trained_bytes -= group.charged
            group.charged = 0
    state.spilled = step
    state.free()
    state.compact()


def dead_letters(state: State, after: Seq, count: int) -> tuple[DeadLetter, ...]:
    return tuple(state.letters[seq] for seq in sorted(seq for seq in state.letters if seq > after)[:count])


def requeue(state: State, seqs: Sequence[Seq]) -> tuple[Seq, ...]:
    found = []
    for seq in seqs:
        letter, group = state.letters.pop(seq, None), state.groups.get(seq)
        if letter is None or (group is not None and group.state is not GroupState.DEAD):  # it was made good since
            continue
        state.groups[seq] = Group(state=GroupState.RELEASED, attempt=letter.attempt, prompt_id=letter.prompt_id, reason=letter.reason)
        bisect.insort(state.retry, seq)
        state.dead[letter.reason] -= 1
        found.append(seq)
    return tuple(found)


def ready(state: State, count: int) -> tuple[GroupHeader, ...]:
    return tuple(state.header(seq) for seq in state.ready[:count])


def follow(state: State, reader: str, step: int, ttl_ms: int) -> int:
    if step <= state.dropped:
        state.readers.pop(reader, None)
        raise ReplayGap(
            f"step {step} has left the journal, which starts at step {state.dropped + 1}: start there, keep more with buffer.retention, "
            "or read older steps from buffer.spill"
        )
    state.readers[reader] = (step, state.now_ms + ttl_ms)
    return state.trained


def readers(state: State) -> dict[str, int]:
    """Those that are live; the others are forgotten."""
    state.readers = {name: (step, expires) for name, (step, expires) in state.readers.items() if expires > state.now_ms}
    return {name: step for name, (step, _) in state.readers.items()}
