"""Every message of the service in one readable file. `protocol.codec` turns them into bytes and back.

A message is a frozen value. Each has a `schema` on the wire (`codec.SCHEMA`); fields a reader does not know are ignored, fields a writer left out
take the defaults below, a newer major is refused. Adding a field with a default is a minor change; anything else is a major one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, TypeAlias

from protocol.arrays import Array, FloatArray, IntArray, MaskArray
from protocol.versions import Version

Seq = NewType("Seq", int)
"""A group's identity: 0, 1, 2, … in the order of admission."""
Attempt = NewType("Attempt", int)
"""1, 2, 3, …: how often a `seq` has been handed out."""
SlotToken = NewType("SlotToken", str)
"""Random, made by the ledger for each slot; owning it is owning the slot."""
EngineId = NewType("EngineId", str)
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


class GroupState(StrEnum):
    """GENERATING → READY → LEASED → TRAINED, or RELEASED (will be retried) or DEAD (final)."""

    GENERATING = "generating"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    RELEASED = "released"
    DEAD = "dead"


class Reason(StrEnum):
    """Why a group was released or died."""

    STALE = "stale"
    """Too few of its tokens were within K."""
    FILTERED = "filtered"
    """The producer's filter refused it (final: DEAD)."""
    FAILED = "failed"
    """Generation or reward failed."""
    EXPIRED = "expired"
    """Its slot's deadline passed without a heartbeat."""
    GIVEN_BACK = "given_back"
    """Its producer stopped in good order."""
    REWOUND = "rewound"
    """Its step was abandoned on purpose."""
    PAYLOAD_LOST = "payload_lost"
    RECORDED = "recorded"
    """Left the buffer into a recording, where nothing is trained (final: DEAD)."""


class Edge(StrEnum):
    """What a waiting process waits for; the watchdog reports it and since when."""

    NO_RUN = "no run"
    NO_SLOT = "no slot"
    NO_ENGINE = "no engine"
    NO_VERSION = "no version"
    NO_BUDGET = "no budget"
    NO_GROUP = "no group"
    NO_TRAINER = "no trainer"
    FIRST_EVALUATION = "first evaluation"
    """Nothing is generated for training before it is recorded."""
    NO_TEACHER = "no teacher"
    NO_ACK = "no ack"
    """The last step is trained; the run ends once its engines serve the version."""


class EngineState(StrEnum):
    STARTING = "starting"
    """Registered, no version acked since this boot: not routable."""
    ROUTABLE = "routable"
    UNFIT = "unfit"
    """A version failed to apply or an answer contradicted the registry: not routable until it acks again."""
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, end) of one rollout, indices into `Rollout.tokens`, written under one version."""

    version: Version
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One sampled response to a prompt.

    Shapes: T = prompt and response tokens together.
    Invariant: mask is 1 on exactly the tokens the policy sampled; spans are disjoint, ascending, and cover every token with mask 1.
    """

    tokens: IntArray
    """[T] int32, prompt then response, as sampled, never re-tokenised."""
    mask: MaskArray
    """[T] uint8; 1: sampled by the policy, may enter a loss. 0: context."""
    logprobs: FloatArray
    """[T] float32, nats: behaviour logprobs, after temperature; 0.0 where mask is 0."""
    spans: tuple[Span, ...]
    reward: float
    finish_reason: str = "stop"
    """As the engine gave it: stop, length or abort."""
    engine_id: str = ""
    """The engine that wrote the last token."""
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimings:
    """Seconds, by monotonic clock of the producer."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    reward_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """An array in the blob store."""

    name: str
    """Of the object in the store, `buffer.blobs` of the run."""
    dtype: str
    """NumPy spelling, little-endian: "<i4"."""
    shape: tuple[int, ...]
    bytes: int
    digest: str
    """xxh3-128, hex, of the array's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHeader:
    """What may be known of a group without its payload: enough to select, mask-count, balance and show it."""

    seq: Seq
    attempt: Attempt
    token: SlotToken
    prompt_id: str
    """Names the row of the data set (and, for a curriculum, the choice)."""
    producer_id: str
    group_size: int
    lengths: tuple[int, ...]
    """[G] tokens of each rollout, prompt included."""
    trainable: Mapping[Version, int]
    """Trainable tokens by the version that wrote them, summed over the group."""
    oldest: Version
    """Oldest version of any trainable token."""
    rewards: tuple[float, ...]
    payload_bytes: int
    payload_digest: str
    """xxh3-128, hex, of the payload bytes as stored."""
    created_at: float = 0.0
    """Unix seconds, the producer's clock; for people only."""
    timings: GroupTimings = GroupTimings()
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    blobs: Mapping[str, BlobRef] = field(default_factory=dict)
    """Extras that lie outside the payload, by name; a reader puts them back into `RolloutGroup.extras`."""
    sampled: tuple[int, ...] = ()
    """[G] tokens of each rollout that the policy sampled (mask 1); () where the writer did not say."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """The payload: the G sibling rollouts of one prompt."""

    rollouts: Sequence[Rollout]
    """Immutable."""
    extras: Mapping[str, Array] = field(default_factory=dict)
    """Named arrays beyond the standard ones (routed experts, multimodal features)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a manifest."""

    name: str
    """Hugging Face parameter name."""
    dtype: str
    """safetensors spelling: F32, BF16, …"""
    shape: tuple[int, ...]
    file: str
    """Name of a file at the manifest's location. Empty in a delta: the tensor is as in the parent, and lies in no file."""
    checksum: str
    """xxh3-64, hex, of the tensor's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One published version. Immutable; visible only once every byte it names is readable."""

    version: Version
    kind: str
    """full | delta | adapter"""
    parent: str
    """Digest of the version a delta applies to; "" for any other."""
    tensors: tuple[TensorEntry, ...]
    """Of the whole version, also where the files hold only what changed: shapes and checksums are those after a delta is applied."""
    digest: str
    """xxh3-128, hex, over names, shapes and bytes of all tensors: equal digest means equal weights."""
    transport: str
    """store"""
    location: str
    """Directory or URL that holds the files."""
    total_bytes: int
    """Of the tensors that the files hold; of a delta, of what it holds."""
    created_at: float = 0.0
    parent_version: Version | None = None
    """Whose digest `parent` is; None for full."""
    elements: int = 0
    """Of all tensors; 0: not counted (a full version)."""
    changed_elements: int = 0
    """Of these, those that differ from the parent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """An engine as its host reports it. Registered under `engine_id`; a new `boot_nonce` is a new engine."""

    engine_id: EngineId
    boot_nonce: str
    url: str
    kind: str
    """embedded | sglang | external"""
    state: EngineState
    version: Version | None = None
    """Newest version acked since this boot."""
    target: Version | None = None
    """Version being prepared or applied; pinned against garbage collection."""
    reason: str = ""
    """Why it is unfit."""
    running: int = 0
    queued: int = 0
    capacity: int = 0
    """Requests it decodes at once."""
    generated_tokens: int = 0
    busy_s: float = 0.0
    """Seconds spent computing since boot."""
    uptime_s: float = 0.0
    paused_s: float = 0.0
    """Seconds paused for updates since boot."""
    updates: int = 0
    host: str = ""
    pid: int = 0
    transport: str = ""
    """What brought the version it serves; empty before the first."""
    span_lag: int = 0
    """Tokens after an in-place update that its spans give to the new version although the old one sampled them."""
    trouble: str = ""
    """Why it does not serve the newest version yet, although it is fit; empty while all is well."""
    kv_usage: float = 0.0
    """Share of its KV cache that is in use, 0 to 1; 0 also where it does not tell."""
    fleet: str = "rollout"
    """rollout | eval: whose requests it takes."""
    adapters: str = ""
    """Its versions are adapters, which a request names by this and the version (`weightsync.lora`); empty: it has one set of weights at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightServerStatus:
    """A process that holds versions on a device and hands them to engines."""

    server_id: str
    url: str
    device: str
    """torch's spelling: cpu, cuda:0."""
    backend: str
    """nccl | gloo | ipc"""
    staged: Version | None = None
    """The newest version it can send without reading a file."""
    groups: int = 0
    """Engines that it is connected to."""
    sent_bytes: int = 0
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """A process that keeps whole versions in the memory of one machine, for all of its engines."""

    relay_id: str
    folder: str
    version: Version | None = None
    """The newest one that is whole there."""
    fetched_bytes: int = 0
    deltas: int = 0
    """Versions it made from a delta."""
    fulls: int = 0
    """Versions it fetched whole."""
    host: str = ""
    pid: int = 0
    trouble: str = ""
    """Why the newest version is not whole there yet; empty while all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherStatus:
    """`rollstream up` on one machine: how many producers and engines it is to have, and which are there."""

    launcher_id: str
    wanted: Mapping[str, int] = field(default_factory=dict)
    """"producer", "engine" → how many; engines of an evaluation's own are not counted."""
    running: tuple[str, ...] = ()
    """Those of them that run and have announced themselves, such as "producer-0"."""
    leaving: tuple[str, ...] = ()
    """Those that were told to leave and have not left yet."""
    wish: int = 0
    """Number of the newest wish that it knows of; 0: there was none."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why it does not follow the newest wish for a role."""
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Those that are wanted and are not started any more, and why."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatus:
    producer_id: str
    inflight_groups: int = 0
    waiting_for: Edge | None = None
    waiting_since: float = 0.0
    """Unix seconds; 0 when not waiting."""
    groups_put: int = 0
    groups_failed: int = 0
    samples_retried: int = 0
    generated_tokens: int = 0
    loop_lag_ms: float = 0.0
    """Worst event-loop lag since the last heartbeat."""
    inflight_limit: int = 0
    """Groups that the load of the engines allows it to have under way now; 0: not limited by it."""
    host: str = ""
    pid: int = 0
    resting: Mapping[str, str] = field(default_factory=dict)
    """Engines that it leaves alone for a while as their requests failed, by id, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    trainer_id: str
    incarnation: int = 0
    step: int = 0
    """The step being trained."""
    trained: int = 0
    waiting_for: Edge | None = None
    waiting_since: float = 0.0
    moved_at: float = 0.0
    """Unix seconds: when it last took a chunk, trained one or ended a step. A trainer that is here, waits for nobody and does not move is stuck."""
    spill_problem: str = ""
    """Why trained steps cannot be spilled now; empty: nothing is wrong."""
    spill_failing_since: float = 0.0
    """Unix seconds of the first failure in a row; 0: nothing is wrong."""
    busy_s: float = 0.0
    uptime_s: float = 0.0
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of the audit stream. `op` is the state change, `fields` what it changed; see `buffer/README.md` for the list."""

    id: str
    """Redis stream id: milliseconds-sequence, the order of events."""
    op: str
    fields: Mapping[str, JsonValue]

    @property
    def at(self) -> float:
        """Unix seconds by the clock of Redis."""
        return int(self.id.partition("-")[0]) / 1000
