"""The ledger's contract: what producers and trainers may ask, and the values that answer.

Two implementations satisfy it and pass the same tests: `buffer.ledger` (pure, in memory, explicit clock) and `buffer.redis_ledger` (Lua on Redis).
Nothing here waits: an operation that cannot be granted answers `Blocked(edge)`; waiting is `buffer.client`'s job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from buffer.config import BufferConfig
from protocol.identity import RunIdentity
from protocol.messages import Attempt, Edge, GroupHeader, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Lineage, Version


class RunState(StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    """The end is decided: reserve answers `RunEnded`, nothing new is leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The right to have one group outstanding."""

    seq: Seq
    attempt: Attempt
    token: SlotToken
    min_version: Version
    """Generate with an engine on the current line at this version or newer."""
    prompt_id: str | None
    """What an earlier attempt of this `seq` bound; None: the source decides."""
    max_bytes: int
    """The payload's upper bound, charged now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Not now; wait on the edge and ask again with the same request id."""

    edge: Edge


class PutResult(StrEnum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    """This very attempt is already stored: a no-op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A step as frozen by `open_step`; a replay reads the same record, so it masks the same tokens."""

    step: int
    incarnation: int
    """The incarnation that first opened it; a replay keeps it."""
    groups: int
    """B"""
    chunk: int
    guard: str
    cutoff: int
    """Tokens with n' below this are over K: `step - 1 - K`."""
    lineage: Lineage
    """Fork table and line at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """One chunk of a step as journalled: the same ids in the same order for ever."""

    step: int
    chunk: int
    revision: int
    """Grows when a lost payload was taken out of the unfinished head step."""
    headers: tuple[GroupHeader, ...]
    last: bool
    """The step is complete after this chunk."""
    record: StepRecord
    """What this chunk was judged by; mask by this one. It differs from the step's when a trainer died in the middle of the step and another went on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A registered checkpoint."""

    step: int
    incarnation: int
    digest: str
    """Digest of the weights after `step`."""
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A trainer's attachment: one incarnation."""

    incarnation: int
    incarnation_id: str
    """Random; lives here and in the registry, not in version strings."""
    resume_step: int
    """Trained up to and including this step; 0 at the start."""
    lineage: Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    trained: int
    lineage: Lineage
    """May have grown: an equal weight digest moves the fork step (rule V1)."""
    checkpoint_wanted: bool
    """Over half the byte budget is trained bytes that no checkpoint covers (rule P3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerStatus:
    """A consistent picture of the ledger."""

    state: RunState
    incarnation: int
    trained: int
    next_seq: int
    """High-water mark: every smaller `seq` is in exactly one state."""
    low_seq: int
    """Everything below is TRAINED or DEAD and compacted."""
    generating: int
    ready: int
    leased: int
    released: int
    """Waiting to be handed out again."""
    trained_groups: int
    dead: Mapping[Reason, int]
    releases: Mapping[Reason, int]
    bytes_used: int
    byte_budget: int
    admission_limit: int
    checkpoints: tuple[CheckpointRef, ...]
    lineage: Lineage
    ready_versions: Mapping[Version, int]
    """READY trainable tokens by version."""

    @property
    def outstanding(self) -> int:
        return self.generating + self.ready + self.leased


class Ledger(Protocol):
    """Every call is atomic and idempotent: asked again after a lost reply, it answers the same and changes nothing.

    Calls that carry an `incarnation` raise `Fenced` if it is not the attached one.
    """

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        """Create the run; False if it is there (then nothing changes and the caller decides: `join`, `RunExists`)."""

    async def join(self, identity: RunIdentity) -> BufferConfig:
        """Settings of the run. Raises: `RunMissing`, `IdentityMismatch`."""

    # producers --------------------------------------------------------------------------------------------------------------
    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int) -> Granted | Blocked:
        """Up to `n` slots and at least 1, each charged `max_bytes`; rules S1, S3, P3.

        Edges, in this order: no trainer (none has ever attached), no slot, no budget, no engine (none routable), no version (none that the guard would take).
        Raises: `RunEnded`; `ConfigError` for a `max_bytes` over the whole budget.
        """

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        """Bind the prompt of a `seq` once (rule S5); the bound id, which an earlier attempt may have chosen. Raises: `SlotLost`."""

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        """Heartbeat of exactly these slots; those that are lost come back (rule S2)."""

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        """GENERATING → READY (rule P1).

        Raises: `SlotLost`, `PayloadTooLarge` and, for a version that this run never trained, `DecodeError` (both keep the slot; `release` it as failed).
        """

    async def release(self, seq: Seq, token: SlotToken, reason: Reason) -> None:
        """FAILED: a counted attempt, retried or dead. FILTERED: dead. GIVEN_BACK: retried, not counted. Raises: `SlotLost`."""

    # trainer ----------------------------------------------------------------------------------------------------------------
    async def attach(self, checkpoint: CheckpointRef | None, *, trainer_id: str) -> Attachment:
        """New incarnation and rewind to `checkpoint` in one script (rule T1). Reopens a draining run. None: from the starting weights, step 0.

        Each call is a new attachment; only a repeat by the connection is the same. Its parent is the incarnation before, where the checkpoint lies on that
        one's line. Newer registered checkpoints are forgotten. Raises: `StepOrder` if `checkpoint` is not registered, or None is older than what is kept.
        """

    async def open_step(self, incarnation: int, step: int) -> StepRecord:
        """Freeze step `trained + 1` (rule T2), or the record that is journalled. Raises: `Fenced`, `StepOrder`."""

    async def lease(self, incarnation: int, step: int, chunk: int) -> ChunkRecord | Blocked:
        """The journalled chunk, or exactly the chunk's size of READY groups, oldest first, after the guard (rule T3).

        Raises: `Fenced`; `StepOrder`, also when this incarnation has not opened the step; `RunEnded` for a chunk that a draining run has not journalled.
        """

    async def payload_lost(self, incarnation: int, step: int, chunk: int, seq: Seq) -> ChunkRecord | Blocked:
        """Take a group whose payload is gone out of the unfinished head step and refill (rule P2); in a replayed step, leave a hole."""

    async def trained(self, incarnation: int, step: int, digest: str, stats: Mapping[str, JsonValue]) -> TrainedReply:
        """LEASED → TRAINED for the whole step (rule T4). `stats` go into the audit event."""

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]:
        """Register a durable checkpoint, keep the newest `keep` (at least 2), free what the oldest kept one covers (rule T5). Returns those kept.

        While fewer than `keep` are registered the starting weights count as one, and nothing is freed.
        """

    async def drain(self, incarnation: int, reason: str) -> None:
        """End of the run (rule T8)."""

    async def payload(self, header: GroupHeader) -> bytes:
        """The payload as stored. Raises: `PayloadLost` if it is gone or its digest is not the header's."""

    async def payloads(self, headers: Sequence[GroupHeader]) -> tuple[bytes, ...]:
        """Several payloads in one round trip; the caller bounds the bytes. Raises: `PayloadLost` for the first that is gone or damaged."""

    async def step_record(self, step: int) -> StepRecord | None:
        """A journalled step, for readers."""

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        """Journalled chunks in order, for checkpoints and readers."""

    async def status(self) -> LedgerStatus:
        """A consistent picture."""
