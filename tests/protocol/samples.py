"""One of every message with every field set, the same values for ever: their bytes are the golden files of the schema that is written now.

`python -m tests.protocol.samples` writes the files of messages that have none yet. It never rewrites one: bytes of a released schema do not change. A new minor
schema gets a folder of its own, and its new fields and messages an entry in `SINCE`: files of the schemas before it must read as the samples without them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

import numpy as np

from protocol.arrays import Array
from protocol.codec import encode, encode_group
from protocol.messages import (
    Attempt,
    BlobRef,
    Edge,
    EngineId,
    EngineState,
    EngineStatus,
    Event,
    GroupHeader,
    GroupTimings,
    LauncherStatus,
    Manifest,
    ProducerStatus,
    RelayStatus,
    Rollout,
    RolloutGroup,
    Seq,
    SlotToken,
    Span,
    TensorEntry,
    TrainerStatus,
    WeightServerStatus,
)
from protocol.versions import Version

GOLDEN = Path(__file__).parent / "golden" / "1.4"
SINCE: dict[str, dict[str, frozenset[str]]] = {
    "1.1": {
        "blob_ref": frozenset(),
        "group_header": frozenset({"blobs", "sampled"}),
        "trainer_status": frozenset({"moved_at", "spill_problem", "spill_failing_since"}),
    },
    "1.2": {
        "manifest": frozenset({"parent_version", "elements", "changed_elements"}),
        "engine_status": frozenset({"transport", "span_lag", "trouble", "kv_usage", "fleet"}),
        "producer_status": frozenset({"inflight_limit"}),
        "weight_server_status": frozenset(),
        "relay_status": frozenset(),
    },
    "1.3": {
        "producer_status": frozenset({"resting"}),
        "relay_status": frozenset({"trouble"}),
        "launcher_status": frozenset(),
    },
    "1.4": {
        "engine_status": frozenset({"adapters"}),
    },
}
"""Schema → message → fields that it brought; none: the message is new as a whole."""

HEADER = GroupHeader(
    seq=Seq(41),
    attempt=Attempt(2),
    token=SlotToken("9f3c"),
    prompt_id="17",
    producer_id="producer-0:c4d1",
    group_size=2,
    lengths=(6, 5),
    trainable={Version(1, 7): 3, Version(2, 8): 2},
    oldest=Version(1, 7),
    rewards=(1.0, -0.5),
    payload_bytes=777,
    payload_digest="00112233445566778899aabbccddeeff",
    created_at=1764460800.25,
    timings=GroupTimings(queue_s=0.5, generate_s=2.25, reward_s=0.125, encode_s=0.0),
    metadata={"level": 3, "tags": ["a", None, True], "nested": {"x": 0.5}},
    blobs={"experts": BlobRef(name="r/41-2-9f3c/experts", dtype="<i2", shape=(2, 3, 2), bytes=24, digest="ffeeddccbbaa99887766554433221100")},
    sampled=(3, 2),
)
MANIFEST = Manifest(
    version=Version(2, 8),
    kind="full",
    parent="",
    tensors=(TensorEntry(name="model.embed_tokens.weight", dtype="BF16", shape=(21, 64), file="model.safetensors", checksum="0123456789abcdef"),),
    digest="ffeeddccbbaa99887766554433221100",
    transport="store",
    location="/dev/shm/rollstream-0/r/2-8",
    total_bytes=2688,
    created_at=1764460801.0,
    parent_version=Version(2, 7),
    elements=1344,
    changed_elements=27,
)
ENGINE = EngineStatus(
    engine_id=EngineId("engine-0"),
    boot_nonce="boot:5ee1",
    url="http://127.0.0.1:30000",
    kind="embedded",
    state=EngineState.UNFIT,
    version=Version(1, 7),
    target=Version(2, 8),
    reason="checksum of model.norm.weight",
    running=3,
    queued=1,
    capacity=64,
    generated_tokens=123456789012,
    busy_s=1.5,
    uptime_s=4.0,
    paused_s=0.25,
    updates=7,
    host="node-1",
    pid=4242,
    transport="delta",
    span_lag=1,
    trouble="prepare 2:8: no space left on device",
    kv_usage=0.75,
    fleet="eval",
    adapters="rollstream-run-",
)
WEIGHT_SERVER = WeightServerStatus(
    server_id="node-1:4245",
    url="http://node-1:41000",
    device="cuda:0",
    backend="nccl",
    staged=Version(2, 8),
    groups=3,
    sent_bytes=15200000000,
    host="node-1",
    pid=4245,
)
RELAY = RelayStatus(
    relay_id="node-1:4246",
    folder="/dev/shm/rollstream-0/r-relay",
    version=Version(2, 8),
    fetched_bytes=15500000000,
    deltas=12,
    fulls=1,
    host="node-1",
    pid=4246,
    trouble="version 2:9: no space left on device",
)
LAUNCHER = LauncherStatus(
    launcher_id="node-1:/runs/r",
    wanted={"producer": 3, "engine": 2},
    running=("engine-0", "producer-0", "producer-1"),
    leaving=("producer-3",),
    wish=4,
    refused={"engine": "engine.urls has 2"},
    given_up={"engine-1": "engine-1 cannot run like this (exit 2)"},
    host="node-1",
    pid=4247,
)
PRODUCER = ProducerStatus(
    producer_id="producer-0:c4d1",
    inflight_groups=4,
    waiting_for=Edge.NO_VERSION,
    waiting_since=1764460800.0,
    groups_put=10,
    groups_failed=1,
    samples_retried=2,
    generated_tokens=4096,
    loop_lag_ms=1.5,
    inflight_limit=6,
    host="node-1",
    pid=4243,
    resting={"engine-1": "broke the connection"},
)
TRAINER = TrainerStatus(
    trainer_id="trainer:77aa",
    incarnation=2,
    step=9,
    trained=8,
    waiting_for=Edge.NO_GROUP,
    waiting_since=1764460802.5,
    moved_at=1764460802.25,
    spill_problem="No space left on device",
    spill_failing_since=1764460799.5,
    busy_s=30.0,
    uptime_s=60.0,
    host="node-2",
    pid=4244,
)
EVENT = Event(id="1764460800123-4", op="reserved", fields={"owner": "producer-0:c4d1", "slots": [[41, 2]]})
MESSAGES: dict[str, object] = {
    "group_header": HEADER,
    "manifest": MANIFEST,
    "engine_status": ENGINE,
    "producer_status": PRODUCER,
    "trainer_status": TRAINER,
    "weight_server_status": WEIGHT_SERVER,
    "relay_status": RELAY,
    "launcher_status": LAUNCHER,
    "event": EVENT,
    "group_timings": HEADER.timings,
    "blob_ref": HEADER.blobs["experts"],
    "span": Span(version=Version(1, 7), start=3, end=6),
    "tensor_entry": MANIFEST.tensors[0],
}


def rollout(*tokens: int, mask: tuple[int, ...], spans: tuple[Span, ...], reward: float) -> Rollout:
    """A rollout whose logprobs are -token/8 where the mask is 1."""
    return Rollout(
        tokens=np.array(tokens, dtype="<i4"),
        mask=np.array(mask, dtype="|u1"),
        logprobs=np.array([-token / 8 if on else 0.0 for token, on in zip(tokens, mask, strict=True)], dtype="<f4"),
        spans=spans,
        reward=reward,
        finish_reason="length",
        engine_id="engine-0",
        metadata={"turns": 1},
    )


GROUP = RolloutGroup(
    rollouts=(
        rollout(5, 6, 7, 8, 9, 1, mask=(0, 0, 0, 1, 1, 1), spans=(Span(version=Version(1, 7), start=3, end=6),), reward=1.0),
        rollout(
            5, 6, 7, 2, 1, mask=(0, 0, 0, 1, 1), spans=(Span(version=Version(1, 7), start=3, end=4), Span(version=Version(2, 8), start=4, end=5)), reward=-0.5
        ),
    ),
    extras={"experts": np.arange(12, dtype="<i2").reshape(2, 3, 2), "none": np.zeros((0, 4), dtype="<f4")},
)


def same_array(one: Array, other: Array) -> bool:
    """Equal in dtype, shape and bytes (NaN equals itself)."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def same_group(one: RolloutGroup, other: RolloutGroup) -> bool:
    """Equal field by field."""
    plain = ("spans", "reward", "finish_reason", "engine_id", "metadata")
    return (
        len(one.rollouts) == len(other.rollouts)
        and all(
            all(same_array(getattr(a, name), getattr(b, name)) for name in ("tokens", "mask", "logprobs"))
            and all(getattr(a, name) == getattr(b, name) for name in plain)
            for a, b in zip(one.rollouts, other.rollouts, strict=True)
        )
        and one.extras.keys() == other.extras.keys()
        and all(same_array(array, other.extras[name]) for name, array in one.extras.items())
    )


def golden(name: str, schema: str = GOLDEN.name) -> bytes:
    """The bytes of a golden file: hexadecimal, wrapped."""
    return bytes.fromhex((GOLDEN.parent / schema / f"{name}.hex").read_text("ascii"))


def as_of(schema: str) -> dict[str, object]:
    """The samples as a reader of today sees them in frames of an earlier schema: what came later has its default."""
    later = [fields for since, fields in SINCE.items() if _order(since) > _order(schema)]
    messages = dict(MESSAGES)
    for fields in later:
        for name, new in fields.items():
            if not new:
                messages.pop(name, None)
            elif name in messages:
                messages[name] = _without(messages[name], new)
    return messages


def _without(message: object, names: frozenset[str]) -> object:
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(message)  # type: ignore[arg-type]
        if field.name in names
    }
    assert defaults.keys() == names
    return dataclasses.replace(message, **defaults)  # type: ignore[type-var]


def _order(schema: str) -> tuple[int, ...]:
    return tuple(int(part) for part in schema.split("."))


def main() -> None:
    """Write the golden files that are missing."""
    GOLDEN.mkdir(exist_ok=True)
    frames = {name: encode(message) for name, message in MESSAGES.items()}
    frames |= {"rollout_group": encode_group(GROUP), "rollout_group_zstd": encode_group(GROUP, compress=True)}
    for name, frame in frames.items():
        path = GOLDEN / f"{name}.hex"
        if not path.exists():
            path.write_text("\n".join(textwrap.wrap(frame.hex(), 160)) + "\n", "ascii")


if __name__ == "__main__":
    main()
