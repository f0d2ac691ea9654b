"""The producers' half of the pure ledger: reserve, bind, renew, put, release (rules S1-S5, P1, P3)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from buffer.contract import WHY_CHARS, Blocked, Granted, PutResult, RunState, Slot
from buffer.ledger_state import Group, State, payload_name
from protocol.errors import ConfigError, DecodeError, PayloadTooLarge, RunEnded, SlotLost
from protocol.messages import Attempt, Edge, GroupHeader, GroupState, Reason, Seq, SlotToken
from protocol.versions import Version

_RELEASABLE = (Reason.FAILED, Reason.FILTERED, Reason.GIVEN_BACK)


def reserve(
    state: State, now_ms: int, *, owner: str, request_id: str, n: int, max_bytes: int, served: Version | None, new_token: Callable[[], str]
) -> Granted | Blocked:
    if n < 1 or max_bytes < 1:
        raise ValueError(f"reserve of {n} slots of {max_bytes} bytes: both must be at least 1")
    if state.run is not RunState.OPEN:
        raise RunEnded("the run is draining: nothing new is handed out")
    state.tick(now_ms)
    slot_ms = int(state.settings.slot_seconds * 1000)
    for old in [request for request, (at, _) in state.requests.items() if at <= state.clock_ms - slot_ms]:
        del state.requests[old]
    state.sweep()
    if state.rules.request_id and (answered := state.requests.get((owner, request_id))) is not None:
        return Granted(slots=answered[1])
    granted = _admit(state, n, max_bytes, served)
    if isinstance(granted, Edge):
        return Blocked(edge=granted)
    slots = []
    for needed in granted:
        if state.retry:
            seq = state.retry.pop(0)
            group = state.groups[seq]
        else:
            seq = Seq(state.next_seq)
            state.next_seq += 1
            group = state.groups[seq] = Group(state=GroupState.RELEASED, attempt=0)
        group.state, group.attempt, group.token, group.owner = GroupState.GENERATING, group.attempt + 1, new_token(), owner
        group.charged, group.deadline, group.reason = max_bytes, state.clock_ms + slot_ms, None
        state.generating[seq] = None
        slots.append(
            Slot(
                seq=seq,
                attempt=Attempt(group.attempt),
                token=SlotToken(group.token),
                min_version=Version(state.incarnation, needed),
                prompt_id=group.prompt_id,
                max_bytes=max_bytes,
            )
        )
    state.bytes_used += len(slots) * max_bytes
    state.requests[owner, request_id] = (state.clock_ms, tuple(slots))
    return Granted(slots=tuple(slots))


def _admit(state: State, n: int, max_bytes: int, served: Version | None) -> list[int] | Edge:
    """The version each granted slot needs (rule S3), or the edge that is in the way."""
    settings = state.settings
    if max_bytes > settings.byte_budget:
        raise ConfigError(f"buffer.byte_budget {settings.byte_budget} is smaller than one group's upper bound: raise it, or lower rollout.max_new_tokens")
    if state.incarnation == 0:
        return Edge.NO_TRAINER
    outstanding, wanted = state.outstanding, n
    n = min(n, state.policy.limit - outstanding)
    if n < 1 or (n < wanted and not state.rules.partial_grant):
        return Edge.NO_SLOT
    n = min(n, (settings.byte_budget - state.bytes_used) // max_bytes)
    if n < 1 or (n < wanted and not state.rules.partial_grant):
        return Edge.NO_BUDGET
    if not state.rules.min_version:
        return [0] * n
    if served is None and not state.routable:
        return Edge.NO_ENGINE
    newest = _newest_served(state) if served is None else _shared(state, served)
    needs = [state.policy.needed(trained=state.trained, outstanding=outstanding + i) for i in range(n)]
    return [needed for needed in needs if needed <= newest] or Edge.NO_VERSION


def _newest_served(state: State) -> int:
    """By engines on the line; -1: none."""
    lineage = state.lineage
    return max((version.n for version in state.routable.values() if version.incarnation in state.forks and lineage.contains(version)), default=-1)


def _shared(state: State, version: Version) -> int:
    return state.lineage.shared(version) if version.incarnation in state.forks else -1


def bind(state: State, seq: Seq, token: SlotToken, prompt_id: str) -> str:
    group = _slot(state, seq, token)
    if group.prompt_id is None:
        group.prompt_id = prompt_id
    return group.prompt_id


def renew(state: State, now_ms: int, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
    state.tick(now_ms)
    deadline = state.clock_ms + int(state.settings.slot_seconds * 1000)
    lost = []
    for seq, token in slots:
        group = state.groups.get(seq)
        if group is not None and group.state is GroupState.GENERATING and group.token == token:
            group.deadline = deadline
        else:
            lost.append(seq)
    if not state.rules.named_heartbeat:
        for seq in state.generating:
            if state.groups[seq].owner == owner:
                state.groups[seq].deadline = deadline
    state.sweep()
    return tuple(lost)


def set_payload(state: State, header: GroupHeader, payload: bytes) -> None:
    """The first half of a put: written once, and gone after a while unless the second half follows."""
    name = payload_name(header.seq, header.attempt, header.token)
    if name not in state.payloads:
        state.payloads[name] = payload
        state.unpersisted.add(name)


def put(state: State, header: GroupHeader) -> PutResult | None:
    """The second half: GENERATING → READY if the payload is there; None if it is not, then both halves are done again."""
    name = payload_name(header.seq, header.attempt, header.token)
    group = state.groups.get(header.seq)
    if group is None or group.freed or not _same_attempt(state, group, header) or group.state in (GroupState.RELEASED, GroupState.DEAD):
        _drop_payload(state, name)
        if header.blobs and group is not None and not group.freed and group.reason is not Reason.RECORDED:
            state.doomed_blobs[name] = None
        raise SlotLost(f"group {header.seq}: the slot expired or was given away; drop what it made")
    if group.state is not GroupState.GENERATING:
        if group.charged == 0:  # its payload is in the spill
            _drop_payload(state, name)
        return PutResult.DUPLICATE
    if header.payload_bytes > group.charged:
        _drop_payload(state, name)
        raise PayloadTooLarge(
            f"group {header.seq}, {header.payload_bytes} bytes: {group.charged} were charged at reserve; release it as failed, "
            "and reserve with the limit its tokens allow"
        )
    for version in header.trainable:
        if not _known(state, version):
            _drop_payload(state, name)
            raise DecodeError("header.trainable", f"group {header.seq}: this run never trained version {version}")
    if name not in state.payloads:
        return None
    if state.rules.persist_in_put:
        state.unpersisted.discard(name)
    del state.generating[header.seq]
    state.bytes_used += header.payload_bytes - group.charged
    group.state, group.charged, group.header, group.owner = GroupState.READY, header.payload_bytes, header, ""
    state.arrivals += 1
    group.score = state.policy.score(header, state.lineage, arrival=state.arrivals)
    bisect.insort(state.ready, header.seq, key=lambda seq: state.groups[seq].score)
    return PutResult.STORED


def _known(state: State, version: Version) -> bool:
    return version.incarnation in state.forks and state.lineage.shared(version) <= state.trained


def _drop_payload(state: State, name: str) -> None:
    state.payloads.pop(name, None)
    state.unpersisted.discard(name)


def _same_attempt(state: State, group: Group, header: GroupHeader) -> bool:
    if not state.rules.slot_token:
        return group.attempt == header.attempt
    return group.attempt == header.attempt and group.token == header.token


def release(state: State, seq: Seq, token: SlotToken, reason: Reason, why: str) -> None:
    if reason not in _RELEASABLE:
        raise ValueError(f"a producer releases a slot as failed, filtered or given_back, not {reason}")
    group = state.groups.get(seq)
    if group is not None and group.token == token and group.state in (GroupState.RELEASED, GroupState.DEAD) and group.reason is reason:
        return
    _slot(state, seq, token)
    state.release(seq, reason, why[:WHY_CHARS])


def _slot(state: State, seq: Seq, token: SlotToken) -> Group:
    group = state.groups.get(seq)
    if group is None or group.state is not GroupState.GENERATING or group.token != token:
        raise SlotLost(f"group {seq}: the slot expired or was given away; drop what it made")
    return group
