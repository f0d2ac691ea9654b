"""The ledger as a pure state machine: the rules in one place, under whatever clock the caller has.

    PureLedger       calls in, answers out; `now_ms` is an argument; the simulator and the random model drive it
    LocalLedger      the same behind `buffer.contract.Ledger`, for tests and single-process runs

Rows of the ledger and their moves: `buffer.ledger_state`.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypedDict, Unpack

from buffer import ledger_slots, ledger_steps, ledger_upkeep
from buffer.config import BufferConfig
from buffer.contract import (
    Attachment,
    Blocked,
    CheckpointRef,
    ChunkRecord,
    DeadLetter,
    Granted,
    History,
    LedgerStatus,
    PutResult,
    StepRecord,
    TrainedReply,
    TrainedStep,
)
from buffer.ledger_rebuild import reassert
from buffer.ledger_state import Rules, State, payload_name
from buffer.payloads import check_payload
from protocol.errors import LedgerRegressed, RunMissing
from protocol.identity import RunIdentity
from protocol.messages import Attempt, GroupHeader, GroupState, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Version


class Known(TypedDict, total=False):
    """What a trainer knows of its own attachment (rule R1)."""

    incarnation_id: str
    seen: int
    """`State.sequence` at its last acknowledged call."""


class PureLedger:
    """One run. Invariant: after every call `violations()` is empty."""

    def __init__(
        self, identity: RunIdentity, settings: BufferConfig, *, rules: Rules | None = None, new_token: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        self.state = State(identity=identity, settings=settings, rules=rules or Rules(), sequence=1)
        self._new_token = new_token

    def told(self, now_ms: int) -> None:
        """The server's clock, for calls that do not say it themselves and only note it."""
        self.state.now_ms = now_ms

    # producers --------------------------------------------------------------------------------------------------------------

    def reserve(self, now_ms: int, owner: str, request_id: str, n: int, *, max_bytes: int, served: Version | None = None) -> Granted | Blocked:
        self.state.sequence += 1
        return ledger_slots.reserve(self.state, now_ms, owner=owner, request_id=request_id, n=n, max_bytes=max_bytes, served=served, new_token=self._new_token)

    def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        self.state.sequence += 1
        return ledger_slots.bind(self.state, seq, token, prompt_id)

    def renew(self, now_ms: int, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        self.state.sequence += 1
        return ledger_slots.renew(self.state, now_ms, owner, slots)

    def set_payload(self, header: GroupHeader, payload: bytes) -> None:
        ledger_slots.set_payload(self.state, header, payload)

    def put(self, header: GroupHeader) -> PutResult | None:
        """After `set_payload`. None: the payload is not there."""
        self.state.sequence += 1
        return ledger_slots.put(self.state, header)

    def release(self, seq: Seq, token: SlotToken, reason: Reason, why: str = "") -> None:
        self.state.sequence += 1
        ledger_slots.release(self.state, seq, token, reason, why)

    # trainer: each call may name what the caller knows of itself, see `State.enter`; `state.sequence` after it is what the call was acknowledged with -----

    def attach(self, checkpoint: CheckpointRef | None, *, incarnation_id: str, abandon: Sequence[Seq] | None = None, above: int = 0) -> Attachment:
        return ledger_steps.attach(self.state, checkpoint, incarnation_id, abandon=abandon, above=above)

    def open_step(self, incarnation: int, step: int, **known: Unpack[Known]) -> StepRecord:
        self.state.enter(incarnation, **known)
        return ledger_steps.open_step(self.state, incarnation, step)

    def lease(self, now_ms: int, incarnation: int, step: int, chunk: int, **known: Unpack[Known]) -> ChunkRecord | Blocked:
        if self.state.rules.fencing:
            self.state.enter(incarnation, **known)
        return ledger_steps.lease(self.state, now_ms, incarnation, step, chunk)

    def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq, **known: Unpack[Known]) -> ChunkRecord | Blocked:
        self.state.enter(incarnation, **known)
        return ledger_steps.payload_lost(self.state, incarnation, step, chunk, seq)

    def trained(self, incarnation: int, step: int, digest: str, **known: Unpack[Known]) -> TrainedReply:
        self.state.enter(incarnation, **known)
        return ledger_steps.trained(self.state, incarnation, step, digest)

    def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int, **known: Unpack[Known]) -> tuple[CheckpointRef, ...]:
        if self.state.rules.fencing:
            self.state.enter(incarnation, **known)
        return ledger_steps.checkpoint(self.state, incarnation, checkpoint, keep)

    def drain(self, incarnation: int, **known: Unpack[Known]) -> None:
        self.state.enter(incarnation, **known)
        ledger_steps.drain(self.state)

    def reassert(self, incarnation: int, incarnation_id: str, history: History, *, seen: int = 0) -> None:
        reassert(self.state, incarnation, incarnation_id, history, seen)

    def set_aside(self, incarnation: int, groups: Sequence[tuple[Seq, SlotToken]], *, lost: bool = False, **known: Unpack[Known]) -> int:
        self.state.enter(incarnation, **known)
        return ledger_upkeep.set_aside(self.state, groups, lost=lost)

    def spillable(self, limit: int) -> tuple[int, ...]:
        return ledger_upkeep.spillable(self.state, limit)

    def spilled(self, incarnation: int, step: int, **known: Unpack[Known]) -> None:
        self.state.enter(incarnation, **known)
        ledger_upkeep.spilled(self.state, step)

    # people and readers -----------------------------------------------------------------------------------------------------

    def dead_letters(self, after: Seq, count: int) -> tuple[DeadLetter, ...]:
        return ledger_upkeep.dead_letters(self.state, after, count)

    def requeue(self, seqs: Sequence[Seq]) -> tuple[Seq, ...]:
        self.state.sequence += 1
        return ledger_upkeep.requeue(self.state, seqs)

    def ready(self, count: int) -> tuple[GroupHeader, ...]:
        return ledger_upkeep.ready(self.state, count)

    def follow(self, reader: str, step: int, ttl_ms: int) -> int:
        return ledger_upkeep.follow(self.state, reader, step, ttl_ms)

    def sweep(self, now_ms: int) -> tuple[str, ...]:
        """What takes place with nobody calling. Payload names of groups whose blobs are to be deleted; `swept` takes them off the list."""
        self.state.sequence += 1
        self.state.tick(now_ms)
        self.state.sweep()
        self.state.free()
        self.state.compact()
        return tuple(self.state.doomed_blobs)

    def swept(self, names: Sequence[str]) -> None:
        for name in names:
            self.state.doomed_blobs.pop(name, None)

    def trained_step(self, step: int) -> TrainedStep | None:
        end = self.state.ends.get(step)
        if end is None or step > self.state.trained:
            return None
        return TrainedStep(step=step, incarnation=end.incarnation, digest=self.state.digests[step], at=end.at_ms / 1000)

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
            dead=dict(+state.dead),
            releases=dict(state.releases),
            bytes_used=state.bytes_used,
            byte_budget=state.settings.byte_budget,
            admission_limit=state.policy.limit,
            checkpoints=tuple(state.checkpoints),
            lineage=state.lineage,
            ready_versions=dict(versions),
            sequence=state.sequence,
            letters=len(state.letters),
            dropped=state.dropped,
            to_spill=len(ledger_upkeep.spillable(state, ledger_upkeep.SPILL_LIMIT)),
            readers=ledger_upkeep.readers(state),
        )

    def violations(self) -> list[str]:
        """What invariants I1, I2 and I5 say is wrong; empty always."""
        state = self.state
        found = []
        by_state: dict[GroupState, set[Seq]] = {one: set() for one in GroupState}
        for seq, group in state.groups.items():
            by_state[group.state].add(seq)
        if {seq for seq in state.groups if seq >= state.low_seq} != set(range(state.low_seq, state.next_seq)):
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
        return found + self._left_over()

    def _left_over(self) -> list[str]:
        """What outlived its use."""
        state, found = self.state, []
        if any(group.state is not GroupState.DEAD for seq, group in state.groups.items() if seq in state.letters):
            found.append("a dead letter of a group that is not dead")
        if ended := [seq for seq, group in state.groups.items() if seq < state.low_seq and (group.freed or group.state is GroupState.DEAD)]:
            found.append(f"groups that have come to their end below low_seq: {ended}")
        held = {payload_name(seq, group.attempt, group.token) for seq, group in state.groups.items() if group.header is not None and group.charged}
        if lost := set(state.payloads) - held - state.unpersisted:
            found.append(f"payloads that nobody needs: {sorted(lost)}")
        if any(state.groups[seq].charged for (step, _), chunk in state.chunks.items() if step <= min(state.spilled, state.trained) for seq in chunk.seqs):
            found.append("a spilled step holds bytes")
        return found


class LocalLedger:
    """`PureLedger` behind the contract. `on_change(topic)` is called where Redis would publish a wake-up."""

    def __init__(self, *, now_ms: Callable[[], int] = lambda: int(time.time() * 1000), on_change: Callable[[str], None] = lambda _topic: None) -> None:
        self._pure: PureLedger | None = None
        self._now_ms = now_ms
        self._on_change = on_change
        self._sequence = 0
        self._attached: dict[int, Known] = {}

    @property
    def pure(self) -> PureLedger:
        if self._pure is None:
            raise RunMissing("the run does not exist: create it first")
        return self._pure

    @contextlib.contextmanager
    def _owner(self) -> Iterator[PureLedger]:
        """Around a call of a slot's owner. Raises: `LedgerRegressed`, once, if the ledger's number fell."""
        known = self._sequence
        self.pure.told(self._now_ms())
        try:
            yield self.pure
        finally:
            now = self.pure.state.sequence
            self._sequence = now if now <= known else max(self._sequence, now)
            if now <= known:  # the call itself was counted
                raise LedgerRegressed(f"the ledger is at change {self._sequence}, {known} was seen: it lost writes it had acknowledged; ask again")

    @contextlib.contextmanager
    def _trainer(self, incarnation: int) -> Iterator[Known]:
        """Around a call of an attached trainer: what it knows, and what it learns."""
        known = self._attached.get(incarnation, {})
        before = self.pure.state.sequence
        self.pure.told(self._now_ms())
        try:
            yield known
        finally:
            now = self.pure.state.sequence
            self._sequence = max(self._sequence, now)
            if known and now > before:
                known["seen"] = now

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        if self._pure is not None:
            return False
        self._pure = PureLedger(identity, settings)
        self._on_change("run")
        return True

    async def join(self, identity: RunIdentity) -> BufferConfig:
        self.pure.state.identity.check(identity, run="local")
        return self.pure.state.settings

    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int, served: Version | None = None) -> Granted | Blocked:
        with self._owner() as pure:
            return pure.reserve(self._now_ms(), owner, request_id, n, max_bytes=max_bytes, served=served)

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        with self._owner() as pure:
            return pure.bind(seq, token, prompt_id)

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        with self._owner() as pure:
            return pure.renew(self._now_ms(), owner, slots)

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        if len(payload) != header.payload_bytes:
            raise ValueError(f"group {header.seq}: header says {header.payload_bytes} bytes, the payload has {len(payload)}")
        with self._owner() as pure:
            pure.set_payload(header, payload)
            result = pure.put(header)
        assert result is not None, "the payload was set just now"
        self._on_change("ready")
        return result

    async def release(
        self,
        seq: Seq,
        token: SlotToken,
        reason: Reason,
        *,
        why: str = "",
        lengths: Sequence[int] = (),  # noqa: ARG002 - for the audit stream
    ) -> None:
        with self._owner() as pure:
            pure.release(seq, token, reason, why)
        self._on_change("slot")

    async def attach(
        self,
        checkpoint: CheckpointRef | None,
        *,
        trainer_id: str,  # noqa: ARG002 - for the audit stream, which a local ledger has not
        abandon: Sequence[Seq] | None = None,
        above: int = 0,
    ) -> Attachment:
        attachment = self.pure.attach(checkpoint, incarnation_id=secrets.token_hex(8), abandon=abandon, above=above)
        self._remember(attachment.incarnation, attachment.incarnation_id)
        return attachment

    async def open_step(self, incarnation: int, step: int) -> StepRecord:
        with self._trainer(incarnation) as known:
            return self.pure.open_step(incarnation, step, **known)

    async def lease(self, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        try:
            with self._trainer(incarnation) as known:
                return self.pure.lease(self._now_ms(), incarnation, step, chunk, **known)
        finally:
            self._on_change("slot")

    async def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        with self._trainer(incarnation) as known:
            return self.pure.payload_lost(incarnation, step, chunk, seq, **known)

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue]) -> TrainedReply:  # noqa: ARG002 - stats are for the audit stream
        with self._trainer(incarnation) as known:
            reply = self.pure.trained(incarnation, step, digest, **known)
        self._on_change("slot")
        return reply

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        with self._trainer(incarnation) as known:
            kept = self.pure.checkpoint(incarnation, checkpoint, keep=keep, **known)
        self._on_change("slot")
        return kept

    async def drain(self, incarnation: int, reason: str) -> None:  # noqa: ARG002 - the reason is for the audit stream
        with self._trainer(incarnation) as known:
            self.pure.drain(incarnation, **known)
        for topic in ("run", "slot", "ready"):
            self._on_change(topic)

    async def reassert(self, incarnation: int, incarnation_id: str, history: History) -> None:
        self.pure.reassert(incarnation, incarnation_id, history, seen=self._attached.get(incarnation, {}).get("seen", 0))
        self._remember(incarnation, incarnation_id)

    def _remember(self, incarnation: int, incarnation_id: str) -> None:
        now = self.pure.state.sequence
        self._sequence = max(self._sequence, now)
        self._attached[incarnation] = {"incarnation_id": incarnation_id, "seen": now}
        for topic in ("run", "slot", "ready"):
            self._on_change(topic)

    async def set_aside(self, incarnation: int, groups: Sequence[tuple[Seq, SlotToken]], *, lost: bool = False) -> int:
        with self._trainer(incarnation) as known:
            count = self.pure.set_aside(incarnation, groups, lost=lost, **known)
        self._on_change("slot")
        return count

    async def spillable(self, limit: int) -> tuple[int, ...]:
        self.pure.told(self._now_ms())
        return self.pure.spillable(limit)

    async def spilled(self, incarnation: int, step: int) -> None:
        with self._trainer(incarnation) as known:
            self.pure.spilled(incarnation, step, **known)
        self._on_change("slot")

    async def dead_letters(self, after: Seq, count: int) -> tuple[DeadLetter, ...]:
        return self.pure.dead_letters(after, count)

    async def requeue(self, seqs: Sequence[Seq]) -> tuple[Seq, ...]:
        found = self.pure.requeue(seqs)
        self._sequence = max(self._sequence, self.pure.state.sequence)
        self._on_change("slot")
        return found

    async def ready(self, count: int) -> tuple[GroupHeader, ...]:
        return self.pure.ready(count)

    async def follow(self, reader: str, step: int, *, ttl_s: float) -> int:
        self.pure.told(self._now_ms())
        return self.pure.follow(reader, step, int(ttl_s * 1000))

    async def sweep(self, delete_blobs: Callable[[Seq, Attempt, SlotToken], Awaitable[None]] | None = None) -> int:
        names = self.pure.sweep(self._now_ms())
        self._sequence = max(self._sequence, self.pure.state.sequence)
        self._on_change("slot")
        if delete_blobs is None:
            return 0
        for name in names:
            seq, attempt, token = name.split(":", 2)
            await delete_blobs(Seq(int(seq)), Attempt(int(attempt)), SlotToken(token))
        self.pure.swept(names)
        return len(names)

    async def payload(self, header: GroupHeader) -> bytes:
        return self.pure.payload(header)

    async def payloads(self, headers: Sequence[GroupHeader]) -> tuple[bytes, ...]:
        return tuple(self.pure.payload(header) for header in headers)

    async def step_record(self, step: int) -> StepRecord | None:
        return self.pure.state.record(step)

    async def trained_step(self, step: int) -> TrainedStep | None:
        return self.pure.trained_step(step)

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        return self.pure.chunks(first_step, last_step)

    async def status(self) -> LedgerStatus:
        return self.pure.status(self._now_ms())
