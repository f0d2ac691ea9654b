"""The ledger as a pure state machine: the rules in one place, under whatever clock the caller has.

    PureLedger       calls in, answers out; `now_ms` is an argument; the simulator and the random model drive it
    LocalLedger      the same behind `buffer.contract.Ledger`, for tests and single-process runs

Rows of the ledger and their moves: `buffer.ledger_state`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from buffer import ledger_slots, ledger_steps
from buffer.config import BufferConfig
from buffer.contract import (
    Attachment,
    Blocked,
    CheckpointRef,
    ChunkRecord,
    Granted,
    LedgerStatus,
    PutResult,
    StepRecord,
    TrainedReply,
)
from buffer.ledger_state import Rules, State, payload_name
from buffer.payloads import check_payload
from protocol.errors import RunMissing
from protocol.identity import RunIdentity
from protocol.messages import GroupHeader, GroupState, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Version


class PureLedger:
    """One run. Invariant: after every call `violations()` is empty."""

    def __init__(
        self, identity: RunIdentity, settings: BufferConfig, *, rules: Rules | None = None, new_token: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        self.state = State(identity=identity, settings=settings, rules=rules or Rules())
        self._new_token = new_token

    # producers --------------------------------------------------------------------------------------------------------------

    def reserve(self, now_ms: int, owner: str, request_id: str, n: int, *, max_bytes: int) -> Granted | Blocked:
        return ledger_slots.reserve(self.state, now_ms, owner=owner, request_id=request_id, n=n, max_bytes=max_bytes, new_token=self._new_token)

    def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        return ledger_slots.bind(self.state, seq, token, prompt_id)

    def renew(self, now_ms: int, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        return ledger_slots.renew(self.state, now_ms, owner, slots)

    def set_payload(self, header: GroupHeader, payload: bytes) -> None:
        ledger_slots.set_payload(self.state, header, payload)

    def put(self, header: GroupHeader) -> PutResult | None:
        """After `set_payload`. None: the payload is not there."""
        return ledger_slots.put(self.state, header)

    def release(self, seq: Seq, token: SlotToken, reason: Reason) -> None:
        ledger_slots.release(self.state, seq, token, reason)

    # trainer ----------------------------------------------------------------------------------------------------------------

    def attach(self, checkpoint: CheckpointRef | None, *, incarnation_id: str) -> Attachment:
        return ledger_steps.attach(self.state, checkpoint, incarnation_id)

    def open_step(self, incarnation: int, step: int) -> StepRecord:
        return ledger_steps.open_step(self.state, incarnation, step)

    def lease(self, now_ms: int, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        return ledger_steps.lease(self.state, now_ms, incarnation, step, chunk)

    def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        return ledger_steps.payload_lost(self.state, incarnation, step, chunk, seq)

    def trained(self, incarnation: int, step: int, digest: str) -> TrainedReply:
        return ledger_steps.trained(self.state, incarnation, step, digest)

    def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        return ledger_steps.checkpoint(self.state, incarnation, checkpoint, keep)

    def drain(self, incarnation: int) -> None:
        ledger_steps.drain(self.state, incarnation)

    # readers ----------------------------------------------------------------------------------------------------------------

    def payload(self, header: GroupHeader) -> bytes:
        return check_payload(header, self.state.payloads.get(payload_name(header.seq, header.attempt, header.token)))

    def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        steps = sorted(step for step in self.state.current if first_step <= step <= last_step)
        return tuple(self.state.chunk_record(step, index) for step in steps for index in range(len(self.state.chunks_of(step))))

    def status(self, now_ms: int) -> LedgerStatus:
        state = self.state
        state.tick(now_ms)
        state.sweep()
        versions: Counter[Version] = Counter()
        for seq in state.ready:
            versions.update(state.header(seq).trainable)
        return LedgerStatus(
            state=state.run,
            incarnation=state.incarnation,
            trained=state.trained,
            next_seq=state.next_seq,
            low_seq=state.low_seq,
            generating=len(state.generating),
            ready=len(state.ready),
            leased=state.leased,
            released=len(state.retry),
            trained_groups=state.trained_groups,
            dead=dict(state.dead),
            releases=dict(state.releases),
            bytes_used=state.bytes_used,
            byte_budget=state.settings.byte_budget,
            admission_limit=state.settings.admission_limit,
            checkpoints=tuple(state.checkpoints),
            lineage=state.lineage,
            ready_versions=dict(versions),
        )

    def violations(self) -> list[str]:
        """What invariants I1, I2 and I5 say is wrong; empty always."""
        state = self.state
        found = []
        by_state: dict[GroupState, set[Seq]] = {one: set() for one in GroupState}
        for seq, group in state.groups.items():
            by_state[group.state].add(seq)
        if set(state.groups) != set(range(state.low_seq, state.next_seq)):
            found.append("I1: groups are not low_seq to next_seq")
        for name, kept, one in (
            ("generating", set(state.generating), GroupState.GENERATING),
            ("ready", set(state.ready), GroupState.READY),
            ("retry", set(state.retry), GroupState.RELEASED),
        ):
            if kept != by_state[one]:
                found.append(f"I1: {name} is {sorted(kept)}, groups say {sorted(by_state[one])}")
        if state.leased != len(by_state[GroupState.LEASED]):
            found.append(f"I1: leased counts {state.leased} of {sorted(by_state[GroupState.LEASED])}")
        journalled = [seq for chunk in state.chunks.values() for seq in chunk.seqs]
        if len(journalled) != len(set(journalled)):
            found.append("I2: a group is in two chunks")
        unfreed = {seq for seq in by_state[GroupState.TRAINED] if not state.groups[seq].freed}
        if set(journalled) != by_state[GroupState.LEASED] | unfreed:
            found.append("I2: the journal is not what is leased or trained")
        charged = sum(group.charged for group in state.groups.values())
        if not 0 <= state.bytes_used == charged <= state.settings.byte_budget:
            found.append(f"I5: {state.bytes_used} bytes counted, {charged} charged, budget {state.settings.byte_budget}")
        if state.trained_bytes != sum(state.groups[seq].charged for seq in unfreed):
            found.append("I5: trained bytes")
        return found


class LocalLedger:
    """`PureLedger` behind the contract. `on_change(topic)` is called where Redis would publish a wake-up."""

    def __init__(self, *, now_ms: Callable[[], int] = lambda: int(time.time() * 1000), on_change: Callable[[str], None] = lambda _topic: None) -> None:
        self._pure: PureLedger | None = None
        self._now_ms = now_ms
        self._on_change = on_change

    @property
    def pure(self) -> PureLedger:
        if self._pure is None:
            raise RunMissing("the run does not exist: create it first")
        return self._pure

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        if self._pure is not None:
            return False
        self._pure = PureLedger(identity, settings)
        self._on_change("run")
        return True

    async def join(self, identity: RunIdentity) -> BufferConfig:
        self.pure.state.identity.check(identity, run="local")
        return self.pure.state.settings

    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int) -> Granted | Blocked:
        return self.pure.reserve(self._now_ms(), owner, request_id, n, max_bytes=max_bytes)

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        return self.pure.bind(seq, token, prompt_id)

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        return self.pure.renew(self._now_ms(), owner, slots)

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        if len(payload) != header.payload_bytes:
            raise ValueError(f"group {header.seq}: header says {header.payload_bytes} bytes, the payload has {len(payload)}")
        self.pure.set_payload(header, payload)
        result = self.pure.put(header)
        assert result is not None, "the payload was set just now"
        self._on_change("ready")
        return result

    async def release(self, seq: Seq, token: SlotToken, reason: Reason) -> None:
        self.pure.release(seq, token, reason)
        self._on_change("slot")

    async def attach(self, checkpoint: CheckpointRef | None, *, trainer_id: str) -> Attachment:  # noqa: ARG002 - for the audit stream, which a local ledger has not
        attachment = self.pure.attach(checkpoint, incarnation_id=secrets.token_hex(8))
        self._on_change("run")
        self._on_change("slot")
        return attachment

    async def open_step(self, incarnation: int, step: int) -> StepRecord:
        return self.pure.open_step(incarnation, step)

    async def lease(self, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        try:
            return self.pure.lease(self._now_ms(), incarnation, step, chunk)
        finally:
            self._on_change("slot")

    async def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        return self.pure.payload_lost(incarnation, step, chunk, seq)

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue]) -> TrainedReply:  # noqa: ARG002 - stats are for the audit stream
        reply = self.pure.trained(incarnation, step, digest)
        self._on_change("slot")
        return reply

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        kept = self.pure.checkpoint(incarnation, checkpoint, keep=keep)
        self._on_change("slot")
        return kept

    async def drain(self, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the reason is for the audit stream
        self.pure.drain(incarnation)
        for topic in ("run", "slot", "ready"):
            self._on_change(topic)

    async def payload(self, header: GroupHeader) -> bytes:
        return self.pure.payload(header)

    async def payloads(self, headers: Sequence[GroupHeader]) -> tuple[bytes, ...]:
        return tuple(self.pure.payload(header) for header in headers)

    async def step_record(self, step: int) -> StepRecord | None:
        return self.pure.state.record(step)

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        return self.pure.chunks(first_step, last_step)

    async def status(self) -> LedgerStatus:
        return self.pure.status(self._now_ms())
