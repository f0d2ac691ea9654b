"""The ledger's contract: what producers and trainers may ask, and the values that answer.

Two implementations satisfy it and pass the same tests: `buffer.ledger` (pure, in memory, explicit clock) and `buffer.redis_ledger` (Lua on Redis).
Nothing here waits: an operation that cannot be granted answers `Blocked(edge)`; waiting is `buffer.client`'s job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from buffer.config import BufferConfig
from protocol.identity import RunIdentity
from protocol.messages import Attempt, Edge, GroupHeader, JsonValue, Reason, Seq, SlotToken
from protocol.versions import Lineage, Version

WHY_CHARS = 500
"""Of what a producer says about a failed attempt so many characters are kept."""


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
class PastStep:
    """A step as its trainer knows it: what a ledger that lost it is told again (rule R1)."""

    step: int
    incarnation: int
    """That trained it."""
    digest: str
    """Of the weights after it."""
    seqs: tuple[Seq, ...]
    """Its groups, by the witness file."""
    chunks: tuple[ChunkRecord, ...]
    """As journalled; none for a step that the oldest kept checkpoint covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a trainer knows for certain: the files of its checkpoint, its witness file, its own memory. The truth that a regressed ledger is rebuilt from."""

    incarnations: Mapping[int, tuple[int, int, str]]
    """Incarnation → (parent, fork step, random id), as far back as is known."""
    checkpoints: tuple[CheckpointRef, ...]
    """Kept on disk, ascending."""
    steps: tuple[PastStep, ...]
    """On the surviving line, ascending, the last is the newest trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A group that was set aside: it failed, or was stale, too often, or its payload was lost in a replay."""

    seq: Seq
    attempt: Attempt
    reason: Reason
    failures: int
    """Counted attempts."""
    prompt_id: str | None
    """None: the source decides by `seq`."""
    why: str
    """What the last attempt died of, in its producer's words."""
    at: float
    """Unix seconds by the clock of Redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """How a journalled step ended."""

    step: int
    incarnation: int
    """That trained it, on the line that survives."""
    digest: str
    """Of the weights after it."""
    at: float
    """Unix seconds by the clock of Redis."""


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
    """Everything below is TRAINED or DEAD and compacted, but for dead letters that were queued again."""
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
    sequence: int = 0
    """Of the ledger's newest change; it falls only when the server lost acknowledged writes (rule R1)."""
    letters: int = 0
    """Dead letters kept."""
    dropped: int = 0
    """The journal holds later steps only."""
    to_spill: int = 0
    """Trained steps that wait to be spilled."""
    readers: Mapping[str, int] = field(default_factory=dict)
    """Live readers of the journal (rule T7): name → the step each wants next."""

    @property
    def outstanding(self) -> int:
        return self.generating + self.ready + self.leased


class Ledger(Protocol):
    """Every call is atomic and idempotent: asked again after a lost reply, it answers the same and changes nothing.

    Calls that carry an `incarnation` raise `Fenced` if it is not the attached one, and `LedgerRegressed` if the ledger forgot something it had acknowledged
    to that trainer: then `reassert` before anything else (rule R1).
    """

    async def create(self, identity: RunIdentity, settings: BufferConfig) -> bool:
        """Create the run; False if it is there (then nothing changes and the caller decides: `join`, `RunExists`)."""

    async def join(self, identity: RunIdentity) -> BufferConfig:
        """Settings of the run. Raises: `RunMissing`, `IdentityMismatch`."""

    # producers --------------------------------------------------------------------------------------------------------------
    async def reserve(self, owner: str, request_id: str, n: int, *, max_bytes: int, served: Version | None = None) -> Granted | Blocked:
        """Up to `n` slots and at least 1, each charged `max_bytes`; rules S1, S3, P3. `served`: what the caller's groups are written by, in place of asking
        for a routable engine; for imports.

        Edges, in this order: no trainer (none has ever attached), no slot, no budget, no engine (none routable), no version (none that the guard would take).
        Raises: `RunEnded`; `ConfigError` for a `max_bytes` over the whole budget.
        """

    async def bind(self, seq: Seq, token: SlotToken, prompt_id: str) -> str:
        """Bind the prompt of a `seq` once (rule S5); the bound id, which an earlier attempt may have chosen. Raises: `SlotLost`."""

    async def renew(self, owner: str, slots: Sequence[tuple[Seq, SlotToken]]) -> tuple[Seq, ...]:
        """Heartbeat of exactly these slots; those that are lost come back (rule S2)."""

    async def put(self, header: GroupHeader, payload: bytes) -> PutResult:
        """GENERATING → READY (rule P1).

        Raises: `SlotLost`, `PayloadTooLarge` and, for a version that this run never trained, `DecodeError` (both keep the slot; `release` it as failed). After
        a loss (rule R1) the ledger knows the newest versions again once its trainer has told it: until then a put of one of them is asked again.
        """

    async def release(self, seq: Seq, token: SlotToken, reason: Reason, *, why: str = "", lengths: Sequence[int] = ()) -> None:
        """FAILED: a counted attempt, retried or dead. FILTERED: dead. GIVEN_BACK: retried, not counted. Raises: `SlotLost`.

        `why` goes into the dead letter; `lengths`, sampled tokens of each rollout that was finished, into the audit event, for the report of bias.
        """

    # trainer ----------------------------------------------------------------------------------------------------------------
    async def attach(self, checkpoint: CheckpointRef | None, *, trainer_id: str, abandon: Sequence[Seq] | None = None, above: int = 0) -> Attachment:
        """New incarnation and rewind to `checkpoint` in one script (rule T1). Reopens a draining run. None: from the starting weights, step 0.

        `abandon` gives up what was taken after the checkpoint instead of replaying it: TRAINED and LEASED become RELEASED(rewound), and their steps leave the
        journal (rule T5). It lists the groups, by the witness file, of steps whose journal entries are freed already; with all of them a run may go back
        further than what is kept. `above` is the newest incarnation the caller has seen anywhere: the new one is greater (rule R1).

        Each call is a new attachment; only a repeat by the connection is the same. Its parent is the incarnation before, where the checkpoint lies on that
        one's line. Newer registered checkpoints are forgotten. Raises: `StepOrder` if `checkpoint` is not registered, or None is older than what is kept;
        `Fenced` for a repeat that comes after another trainer attached.
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

    async def reassert(self, incarnation: int, incarnation_id: str, history: History) -> None:
        """Make a ledger that lost acknowledged writes agree with `history` (rule R1): its groups are TRAINED, whatever they are here; groups in between that
        nobody remembers are RELEASED; checkpoints are registered; `incarnation` is attached. Raises: `Fenced` if another trainer attached meanwhile.
        """

    async def set_aside(self, incarnation: int, groups: Sequence[tuple[Seq, SlotToken]], *, lost: bool = False) -> int:
        """READY → DEAD(recorded): these have gone into a recording and are not trained here. `lost`: READY → RELEASED(payload_lost), for another to take:
        their payloads are gone (rule P2). The number that were READY; asked again, 0.
        """

    async def spillable(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` steps whose payloads should leave Redis now, ascending: they are over the retention, or trained payloads fill over half the budget.
        Without `buffer.spill`: none.
        """

    async def spilled(self, incarnation: int, step: int) -> None:
        """The step's groups are durable in the spill: their payloads leave Redis and hold no bytes of the budget. Their journal entries stay as long as they
        would (rule T5); `payload` raises `PayloadLost` for them. Their blobs belong to the spill from now on. Asked again, a no-op.

        Steps are spilled in order. Raises: `Fenced`; `StepOrder` for any but the next one, or one that is not trained.
        """

    # people and readers -----------------------------------------------------------------------------------------------------
    async def dead_letters(self, after: Seq, count: int) -> tuple[DeadLetter, ...]:
        """Up to `count` with a greater `seq` than `after` (-1: from the first), ascending. Filtered and recorded groups leave no letter."""

    async def requeue(self, seqs: Sequence[Seq]) -> tuple[Seq, ...]:
        """Dead letters become RELEASED, their failures forgotten; those that were letters."""

    async def ready(self, count: int) -> tuple[GroupHeader, ...]:
        """Headers of the READY groups that would be selected next; nothing is taken."""

    async def follow(self, reader: str, step: int, *, ttl_s: float) -> int:
        """A reader of the journal says that it wants `step` next, for `ttl_s` (rule T7). It holds nothing back. The newest trained step.

        Raises: `ReplayGap` if the journal has dropped the step.
        """

    async def sweep(self, delete_blobs: Callable[[Seq, Attempt, SlotToken], Awaitable[None]] | None = None) -> int:
        """Finish what scripts could not do themselves: on a cluster, payload keys to persist or delete (rule P1); blobs of groups that are gone, where the
        caller can delete them; steps that outlived the retention. Any live process may call it, at any time; a bounded number of things is done, and told.

        `delete_blobs` deletes all blobs of one attempt, if there are any; what it could not delete (it raises) is asked of a later sweep again. Blobs of
        groups that were spilled or recorded are not among them: whoever reads the recording needs them.
        """

    async def payload(self, header: GroupHeader) -> bytes:
        """The payload as stored. Raises: `PayloadLost` if it is gone or its digest is not the header's."""

    async def payloads(self, headers: Sequence[GroupHeader]) -> tuple[bytes, ...]:
        """Several payloads in one round trip; the caller bounds the bytes. Raises: `PayloadLost` for the first that is gone or damaged."""

    async def step_record(self, step: int) -> StepRecord | None:
        """A journalled step, for readers."""

    async def trained_step(self, step: int) -> TrainedStep | None:
        """How a step that the journal still holds ended; None if it was not trained (or was rewound), or has been dropped."""

    async def chunks(self, first_step: int, last_step: int) -> tuple[ChunkRecord, ...]:
        """Journalled chunks in order, for checkpoints and readers."""

    async def status(self) -> LedgerStatus:
        """A consistent picture."""
