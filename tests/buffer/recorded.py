"""Steps and groups to record, with payloads that are what their headers say."""

from __future__ import annotations

import numpy as np

from buffer.contract import ChunkRecord, StepRecord
from buffer.recording import RecordedGroup, RecordedStep
from protocol.codec import digest, encode_group
from protocol.messages import Attempt, GroupHeader, Rollout, RolloutGroup, Seq, SlotToken, Span
from protocol.versions import Fork, Lineage, Version


def a_group(seq: int, *, token: str = "t", extras: dict[str, np.ndarray] | None = None) -> tuple[RolloutGroup, RecordedGroup]:
    """A group of one rollout whose tokens tell its seq."""
    rollout = Rollout(
        tokens=np.arange(seq, seq + 6, dtype="<i4"),
        mask=np.array([0, 0, 1, 1, 1, 1], dtype="|u1"),
        logprobs=np.zeros(6, dtype="<f4"),
        spans=(Span(version=Version(1, 0), start=2, end=6),),
        reward=float(seq),
    )
    group = RolloutGroup(rollouts=(rollout,), extras=extras or {})
    payload = encode_group(group)
    header = GroupHeader(
        seq=Seq(seq),
        attempt=Attempt(1),
        token=SlotToken(token),
        prompt_id=f"row-{seq}",
        producer_id="p",
        group_size=1,
        lengths=(6,),
        trainable={Version(1, 0): 4},
        oldest=Version(1, 0),
        rewards=(float(seq),),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )
    return group, RecordedGroup(header=header, payload=payload)


def a_step(step: int, incarnation: int = 1, *, seqs: tuple[tuple[int, ...], ...] = ((0, 1), (2,))) -> RecordedStep:
    """A step of these groups, by chunk."""
    lineage = Lineage({1: Fork(0, 0), incarnation: Fork(incarnation - 1, 0)}, head=incarnation)
    record = StepRecord(step=step, incarnation=incarnation, groups=3, chunk=2, guard="mask", cutoff=step - 9, lineage=lineage)
    groups = [[a_group(seq)[1] for seq in chunk] for chunk in seqs]
    return RecordedStep(
        step=step,
        incarnation=incarnation,
        digest=f"w{step}",
        at=100.0 + step,
        chunks=tuple(
            ChunkRecord(step=step, chunk=i, revision=i, headers=tuple(group.header for group in chunk), last=i == len(groups) - 1, record=record)
            for i, chunk in enumerate(groups)
        ),
        payloads=tuple(tuple(group.payload for group in chunk) for chunk in groups),
    )


def same_step(one: RecordedStep, other: RecordedStep) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in RecordedStep.__dataclass_fields__)
