"""What the ledger knows, and the moves its operations share. Pure: no clock of its own, no I/O.

    GENERATING ──put──► READY ──lease──► LEASED ──trained──► TRAINED ──free──► (compacted)
        │                 │                │ ▲                  │
        └── expired, ─────┴── stale ───────┘ └──── attach ──────┘
            failed, given back                (rewind)
            ▼
        RELEASED (handed out again, attempt + 1) or DEAD

Worked example, B = 2: groups 0 and 1 are reserved, put, leased as chunk 0 of step 1 and trained; `attach(None)` makes them LEASED again, and the same
chunk comes back.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field, fields

from buffer.config import BufferConfig
from buffer.contract import CheckpointRef, ChunkRecord, DeadLetter, RunState, Slot, StepRecord
from buffer.policy import Policy
from protocol.errors import Fenced, LedgerRegressed
from protocol.identity import RunIdentity
from protocol.messages import Attempt, GroupHeader, GroupState, Reason, Seq
from protocol.versions import Fork, Lineage, Version

TICK_MS = 1000
"""Rule S4: how far the ledger clock moves in one call at most."""
LETTER_LIMIT = 10_000
"""Dead letters kept; the oldest leave first."""
_COUNTED = (Reason.FAILED, Reason.STALE)
_FINAL = (Reason.FILTERED, Reason.RECORDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules that a test may switch off, to show that it notices."""

    partial_grant: bool = True
    named_heartbeat: bool = True
    request_id: bool = True
    persist_in_put: bool = True
    fencing: bool = True
    floor: bool = True
    min_version: bool = True
    slot_token: bool = True
    checkpoint_commit: bool = True
    regress: bool = True
    reassert: bool = True
    rewound: bool = True
    attach_once: bool = True
    reassert_once: bool = True
    ledger_clock: bool = True

    @classmethod
    def without(cls, *names: str) -> Rules:
        known = {one.name for one in fields(cls)}
        return cls(**{name: False for name in names if name in known})


@dataclass(slots=True, kw_only=True)
class Group:
    """One `seq`."""

    state: GroupState
    attempt: int
    failures: int = 0
    """Attempts that count against `max_attempts`."""
    token: str = ""
    owner: str = ""
    prompt_id: str | None = None
    charged: int = 0
    """Bytes it holds of the budget; of a LEASED or TRAINED group none once its payload is spilled."""
    deadline: int = 0
    header: GroupHeader | None = None
    score: int = 0
    """Its place among READY groups."""
    reason: Reason | None = None
    freed: bool = False
    """TRAINED, and its journal entry is dropped."""


@dataclass(slots=True, kw_only=True)
class Chunk:
    size: int
    """Groups it has when whole; smaller where a replay keeps a hole."""
    judged_by: int
    """Incarnation whose record of the step it was judged by."""
    leased_by: int
    revision: int = 0
    seqs: list[Seq] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return len(self.seqs) == self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Of a trained step."""

    incarnation: int
    at_ms: int
    bytes: int
    """Of all steps up to it, as they were trained."""


@dataclass(slots=True, kw_only=True)
class State:
    """Everything about one run."""

    identity: RunIdentity
    settings: BufferConfig
    rules: Rules = Rules()
    run: RunState = RunState.OPEN
    clock_ms: int = 0
    seen_ms: int | None = None
    now_ms: int = 0
    """The server's clock as it was last told."""
    sequence: int = 0
    """Calls that may have changed something (rule R1)."""
    trainer_sequence: int = 0
    """`sequence` at the attached trainer's newest call. Nobody else moves it, so nobody's later writes hide that such a call was lost."""
    # lineage
    incarnation: int = 0
    incarnation_id: str = ""
    attached: set[str] = field(default_factory=set)
    """Ids of all incarnations."""
    forks: dict[int, Fork] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    """Of every step on the line, and of those a rewind has still to repeat."""
    trained: int = 0
    trained_by: int = 0
    # groups
    groups: dict[Seq, Group] = field(default_factory=dict)
    next_seq: int = 0
    low_seq: int = 0
    ready: list[Seq] = field(default_factory=list)
    """In the order of selection: by score."""
    arrivals: int = 0
    """Puts so far."""
    retry: list[Seq] = field(default_factory=list)
    """Ascending."""
    generating: dict[Seq, None] = field(default_factory=dict)
    leased: int = 0
    trained_groups: int = 0
    dead: Counter[Reason] = field(default_factory=Counter)
    releases: Counter[Reason] = field(default_factory=Counter)
    requests: dict[tuple[str, str], tuple[int, tuple[Slot, ...]]] = field(default_factory=dict)
    # bytes
    bytes_used: int = 0
    trained_bytes: int = 0
    payloads: dict[str, bytes] = field(default_factory=dict)
    unpersisted: set[str] = field(default_factory=set)
    """Payloads that would expire: SET, not yet put."""
    # steps
    current: dict[int, int] = field(default_factory=dict)
    """Step → incarnation whose record its next chunk is judged by."""
    records: dict[tuple[int, int], StepRecord] = field(default_factory=dict)
    chunks: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    checkpoints: list[CheckpointRef] = field(default_factory=list)
    floor: int = 0
    """Step of the oldest kept checkpoint."""
    dropped: int = 0
    """The journal holds later steps only."""
    dropped_bytes: int = 0
    """Of all steps up to `dropped`."""
    ends: dict[int, Ending] = field(default_factory=dict)
    spilled: int = 0
    """Payloads of steps up to this one have left for the spill."""
    # people and readers
    letters: dict[Seq, DeadLetter] = field(default_factory=dict)
    """In the order of their deaths."""
    readers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name → the step it wants next, and when it expires."""
    doomed_blobs: dict[str, None] = field(default_factory=dict)
    """Payload names of groups whose blobs nobody needs."""
    # what others registered
    routable: dict[str, Version] = field(default_factory=dict)

    @property
    def lineage(self) -> Lineage:
        return Lineage(dict(self.forks) or {0: Fork(0, 0)}, self.incarnation)

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + self.leased

    @property
    def policy(self) -> Policy:
        return Policy(self.settings)

    # -- time ----------------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Follow the server's clock, at most a second a call (rule S4), and take back what expired."""
        if self.seen_ms is not None:
            self.clock_ms += max(0, min(TICK_MS if self.rules.ledger_clock else now_ms, now_ms - self.seen_ms))
        self.seen_ms = self.now_ms = now_ms

    def sweep(self) -> None:
        for seq in [seq for seq in self.generating if self.groups[seq].deadline < self.clock_ms]:
            self.release(seq, Reason.EXPIRED)

    # -- groups --------------------------------------------------------------------------------------------------------------

    def release(self, seq: Seq, reason: Reason, why: str = "") -> None:
        """GENERATING, READY or LEASED → RELEASED, or DEAD when it is filtered, recorded or has failed too often."""
        group = self.groups[seq]
        self.drop_payload(seq, group, recorded=reason is Reason.RECORDED)
        if group.state is GroupState.GENERATING:
            del self.generating[seq]
        elif group.state is GroupState.READY:
            self.ready.remove(seq)
        else:
            self.leased -= 1
        self.bytes_used -= group.charged
        group.failures += reason in _COUNTED
        spent = reason in _COUNTED and group.failures >= self.settings.max_attempts
        group.header, group.charged, group.owner = None, 0, ""
        if spent or reason in _FINAL:
            self.bury(seq, reason)
        else:
            group.state, group.reason = GroupState.RELEASED, reason
            bisect.insort(self.retry, seq)
            self.releases[reason] += 1
        if spent:
            self.keep_letter(seq, group, reason, why)

    def bury(self, seq: Seq, reason: Reason) -> None:
        """→ DEAD. What was queued again from below `low_seq` leaves no row."""
        group = self.groups[seq]
        group.state, group.reason = GroupState.DEAD, reason
        self.dead[reason] += 1
        if seq < self.low_seq:
            del self.groups[seq]

    def keep_letter(self, seq: Seq, group: Group, reason: Reason, why: str) -> None:
        self.letters[seq] = DeadLetter(
            seq=seq,
            attempt=Attempt(group.attempt),
            reason=reason,
            failures=group.failures,
            prompt_id=group.prompt_id,
            why=why,
            at=self.now_ms / 1000,
        )
        if len(self.letters) > LETTER_LIMIT:
            del self.letters[next(iter(self.letters))]

    def drop_payload(self, seq: Seq, group: Group, *, recorded: bool = False) -> None:
        """Nobody needs it any more, nor the group's blobs unless a recording refers to them. Of what is spilled nothing is left here."""
        if group.charged == 0:
            return
        name = payload_name(seq, group.attempt, group.token)
        self.payloads.pop(name, None)
        written = bool(group.header.blobs) if group.header is not None else bool(self.settings.blobs)  # a producer may have written them before its put
        if written and not recorded:
            self.doomed_blobs[name] = None

    def untrain(self, seq: Seq) -> None:
        """TRAINED → LEASED, in the same chunk."""
        group = self.groups[seq]
        if group.state is GroupState.TRAINED:
            group.state = GroupState.LEASED
            self.trained_groups -= 1
            self.leased += 1
            self.trained_bytes -= group.charged

    def drop_step(self, step: int) -> None:
        """Give up a journalled step (rules T5, T6): its groups become RELEASED, for another to take."""
        for index, chunk in enumerate(self.chunks_of(step)):
            for seq in chunk.seqs:
                self.untrain(seq)
                self.release(seq, Reason.REWOUND)
            del self.chunks[step, index]
        self.records = {key: record for key, record in self.records.items() if key[0] != step}
        self.current.pop(step, None)
        self.digests.pop(step, None)
        self.ends.pop(step, None)

    def drop_ready(self) -> None:
        """On-policy, what other weights wrote is of no use."""
        for seq in list(self.ready):
            self.release(seq, Reason.REWOUND)

    def drop_slots(self) -> None:
        """After steps were given up: a slot may ask for a version that the line reaches only once the slot is filled. Its owner hears it is lost."""
        for seq in sorted(self.generating):
            self.release(seq, Reason.REWOUND)

    def fill(self, chunk: Chunk, record: StepRecord) -> bool:
        """Complete `chunk` from READY, in order of selection, releasing what the guard refuses. False, and nothing taken, when there is too little."""
        late = [seq for seq in self.ready if self.policy.lies_late(self.groups[seq].score, record)]
        for seq in late:
            if not self.policy.accepts(self.header(seq), record):
                self.release(seq, Reason.STALE, f"stale in step {record.step}")
        picks: list[Seq] = []
        refused: list[Seq] = []
        for seq in self.ready:
            if len(picks) == chunk.size - len(chunk.seqs):
                break
            ok = self.policy.accepts(self.header(seq), record)
            (picks if ok else refused).append(seq)
        for seq in refused:
            self.release(seq, Reason.STALE, f"stale in step {record.step}")
        if len(picks) + len(chunk.seqs) < chunk.size:
            return False
        for seq in picks:
            self.ready.remove(seq)
            self.groups[seq].state = GroupState.LEASED
        self.leased += len(picks)
        chunk.seqs += picks
        return True

    def header(self, seq: Seq) -> GroupHeader:
        header = self.groups[seq].header
        assert header is not None, f"group {seq} is {self.groups[seq].state} without a header"
        return header

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def enter(self, incarnation: int, incarnation_id: str = "", seen: int = 0) -> None:
        """Let the attached trainer in and count its call; `incarnation_id` and `seen`, the `sequence` of its last acknowledged call, as far as it knows them.

        Raises: `Fenced` for one that was replaced (rule T1); `LedgerRegressed` where the ledger forgot the call, or the attachment itself (rule R1).
        """
        other = incarnation == self.incarnation and incarnation_id not in ("", self.incarnation_id)
        if incarnation < self.incarnation or other or (incarnation > self.incarnation and not self.rules.regress):
            raise Fenced(f"incarnation {self.incarnation} is attached: this trainer has been replaced and must stop")
        if incarnation > self.incarnation or (seen > self.trainer_sequence and self.rules.regress):
            raise LedgerRegressed(
                f"the ledger is at incarnation {self.incarnation}, call {self.trainer_sequence}; seen were {incarnation}, call {seen}: "
                "Redis lost writes it had acknowledged; its trainer re-asserts them, or resumes"
            )
        self.sequence += 1
        self.trainer_sequence = self.sequence

    def record(self, step: int) -> StepRecord | None:
        opened = self.current.get(step)
        return None if opened is None else self.records[step, opened]

    def chunks_of(self, step: int) -> list[Chunk]:
        """Journalled chunks of a step, in order."""
        found: list[Chunk] = []
        while (chunk := self.chunks.get((step, len(found)))) is not None:
            found.append(chunk)
        return found

    def chunk_record(self, step: int, index: int) -> ChunkRecord:
        chunk = self.chunks[step, index]
        record = self.records[step, chunk.judged_by]
        headers = tuple(self.header(seq) for seq in chunk.seqs)
        return ChunkRecord(step=step, chunk=index, revision=chunk.revision, headers=headers, last=index == chunks_in(record) - 1, record=record)

    def bytes_up_to(self, step: int) -> int:
        """Of the payloads of all steps, as they were trained."""
        return self.ends[step].bytes if step in self.ends else self.dropped_bytes

    def end_step(self, step: int, incarnation: int, size: int) -> None:
        """It was trained now; `size` bytes of payloads are here."""
        self.ends[step] = Ending(incarnation=incarnation, at_ms=self.now_ms, bytes=self.bytes_up_to(step - 1) + size)
        if self.spilled >= step:
            self.spilled = step - 1  # what the spill has of it is of a line that was given up

    def retired(self) -> int:
        """The newest step that may leave the journal: the oldest kept checkpoint covers it, and it is over a limit of the retention."""
        limits = self.settings
        newest = max(self.dropped, self.floor - limits.retention)
        if newest >= self.floor or not (limits.retention_bytes or limits.retention_seconds):
            return newest
        total, since = self.bytes_up_to(self.floor), self.now_ms - int(limits.retention_seconds * 1000)
        while newest < self.floor:
            end = self.ends.get(newest + 1)
            large = limits.retention_bytes > 0 and total - self.bytes_up_to(newest) > limits.retention_bytes
            if end is not None and not large and not (limits.retention_seconds > 0 and end.at_ms < since):
                break
            newest += 1
        return newest

    def free(self) -> int:
        """Drop journal entries that no kept checkpoint and no retention needs, with their payloads. With a spill, only of steps that it has; the blobs they
        refer to are the spill's. Groups freed.
        """
        freed, target = 0, self.retired()
        if self.settings.spill:
            target = min(target, self.spilled)
        while self.dropped < target:
            step = self.dropped + 1
            for index, chunk in enumerate(self.chunks_of(step)):
                for seq in chunk.seqs:
                    group = self.groups[seq]
                    self.drop_payload(seq, group)
                    self.bytes_used -= group.charged
                    self.trained_bytes -= group.charged
                    group.freed, group.header, group.charged = True, None, 0
                    if seq < self.low_seq:
                        del self.groups[seq]
                    freed += 1
                del self.chunks[step, index]
            self.records = {key: record for key, record in self.records.items() if key[0] != step}
            self.current.pop(step, None)
            self.digests.pop(step, None)
            self.dropped, self.dropped_bytes = step, self.bytes_up_to(step)
            self.ends.pop(step, None)
        return freed

    def compact(self) -> None:
        """Rule T8: forget everything below the first group that is neither TRAINED and freed nor DEAD."""
        while self.low_seq < self.next_seq:
            group = self.groups[Seq(self.low_seq)]
            if not (group.freed or group.state is GroupState.DEAD):
                return
            del self.groups[Seq(self.low_seq)]
            self.low_seq += 1


def chunks_in(record: StepRecord) -> int:
    return -(-record.groups // record.chunk)


def payload_name(seq: int, attempt: int, token: str) -> str:
    """Rule P1: a name is written once."""
    return f"{seq}:{attempt}:{token}"
