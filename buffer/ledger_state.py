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
from buffer.contract import CheckpointRef, ChunkRecord, RunState, Slot, StepRecord
from buffer.staleness import accepts
from protocol.errors import Fenced
from protocol.identity import RunIdentity
from protocol.messages import GroupHeader, GroupState, Reason, Seq
from protocol.versions import Fork, Lineage, Version

TICK_MS = 1000
"""Rule S4: how far the ledger clock moves in one call at most."""
_COUNTED = (Reason.FAILED, Reason.STALE)


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
    """Bytes it holds of the budget."""
    deadline: int = 0
    header: GroupHeader | None = None
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


@dataclass(slots=True, kw_only=True)
class State:
    """Everything about one run."""

    identity: RunIdentity
    settings: BufferConfig
    rules: Rules = Rules()
    run: RunState = RunState.OPEN
    clock_ms: int = 0
    seen_ms: int | None = None
    # lineage
    incarnation: int = 0
    incarnation_id: str = ""
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
    """Ascending."""
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
    # what others registered
    routable: dict[str, Version] = field(default_factory=dict)

    @property
    def lineage(self) -> Lineage:
        return Lineage(dict(self.forks) or {0: Fork(0, 0)}, self.incarnation)

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + self.leased

    @property
    def bound(self) -> int:
        """Steps a token may be old: K, and 0 when on-policy."""
        return 0 if self.settings.pipeline_depth == 0 else self.settings.max_staleness

    # -- time ----------------------------------------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Follow the server's clock, at most a second a call (rule S4), and take back what expired."""
        if self.seen_ms is not None:
            self.clock_ms += max(0, min(TICK_MS, now_ms - self.seen_ms))
        self.seen_ms = now_ms

    def sweep(self) -> None:
        for seq in [seq for seq in self.generating if self.groups[seq].deadline < self.clock_ms]:
            self.release(seq, Reason.EXPIRED)

    # -- groups --------------------------------------------------------------------------------------------------------------

    def release(self, seq: Seq, reason: Reason) -> None:
        """GENERATING, READY or LEASED → RELEASED, or DEAD when it is filtered or has failed too often."""
        group = self.groups[seq]
        self.payloads.pop(payload_name(seq, group.attempt, group.token), None)
        if group.state is GroupState.GENERATING:
            del self.generating[seq]
        elif group.state is GroupState.READY:
            remove(self.ready, seq)
        else:
            self.leased -= 1
        self.bytes_used -= group.charged
        group.failures += reason in _COUNTED
        final = reason is Reason.FILTERED or (reason in _COUNTED and group.failures >= self.settings.max_attempts)
        group.state, group.reason = (GroupState.DEAD if final else GroupState.RELEASED), reason
        group.header, group.charged, group.owner = None, 0, ""
        if final:
            self.dead[reason] += 1
        else:
            bisect.insort(self.retry, seq)
            self.releases[reason] += 1

    def fill(self, chunk: Chunk, record: StepRecord) -> bool:
        """Complete `chunk` from READY, oldest first, releasing what the guard refuses. False, and nothing taken, when there is too little."""
        picks: list[Seq] = []
        refused: list[Seq] = []
        for seq in self.ready:
            if len(picks) == chunk.size - len(chunk.seqs):
                break
            ok = accepts(self.header(seq), record, min_kept_share=self.settings.min_kept_share)
            (picks if ok else refused).append(seq)
        for seq in refused:
            self.release(seq, Reason.STALE)
        if len(picks) + len(chunk.seqs) < chunk.size:
            return False
        for seq in picks:
            remove(self.ready, seq)
            self.groups[seq].state = GroupState.LEASED
        self.leased += len(picks)
        chunk.seqs += picks
        return True

    def header(self, seq: Seq) -> GroupHeader:
        header = self.groups[seq].header
        assert header is not None, f"group {seq} is {self.groups[seq].state} without a header"
        return header

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def fence(self, incarnation: int) -> None:
        """Raises: `Fenced` unless `incarnation` is attached (rule T1)."""
        if incarnation != self.incarnation:
            raise Fenced(f"incarnation {self.incarnation} is attached: this trainer has been replaced and must stop")

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

    def free(self) -> int:
        """Drop journal entries that no kept checkpoint and no retention needs, with their payloads. Groups freed."""
        freed = 0
        while self.dropped < self.floor - self.settings.retention:
            step = self.dropped + 1
            for index, chunk in enumerate(self.chunks_of(step)):
                for seq in chunk.seqs:
                    group = self.groups[seq]
                    self.payloads.pop(payload_name(seq, group.attempt, group.token), None)
                    self.bytes_used -= group.charged
                    self.trained_bytes -= group.charged
                    group.freed, group.header, group.charged = True, None, 0
                    freed += 1
                del self.chunks[step, index]
            self.records = {key: record for key, record in self.records.items() if key[0] != step}
            self.current.pop(step, None)
            self.digests.pop(step, None)
            self.dropped = step
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


def remove(ascending: list[Seq], seq: Seq) -> None:
    at = bisect.bisect_left(ascending, seq)
    assert ascending[at] == seq
    del ascending[at]
