"""The teacher's logprobs on their way from a payload to the tokens of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from consumer.losses.config import LossConfig
from consumer.siblings import Siblings
from protocol.arrays import FloatArray
from protocol.errors import ConfigError, RollstreamError
from protocol.groups import TEACHER_LOGPROBS
from protocol.messages import RolloutGroup, Seq

if TYPE_CHECKING:
    from consumer.batch import ChunkBatch


def with_teacher(seqs: Sequence[Seq], siblings: tuple[Siblings, ...], groups: Sequence[RolloutGroup]) -> tuple[Siblings, ...]:
    """The groups, each with what a teacher said of its tokens in the loss, where its payload has that.

    Raises: `RollstreamError` for a group whose scores are not one finite number a token.
    """
    return tuple(_with_teacher(seq, one, group) if TEACHER_LOGPROBS in group.extras else one for seq, one, group in zip(seqs, siblings, groups, strict=True))


def _with_teacher(seq: Seq, siblings: Siblings, group: RolloutGroup) -> Siblings:
    told = group.extras[TEACHER_LOGPROBS]
    if told.shape != siblings.tokens.shape or told.dtype != np.float32 or not np.isfinite(told).all():
        raise RollstreamError(
            f"group {seq}: extra {TEACHER_LOGPROBS} has {told.dtype} of shape {list(told.shape)} for {len(siblings.tokens)} tokens; expected one finite "
            "float32 each, look at what wrote the group"
        )
    return replace(siblings, teacher=cast("FloatArray", told)[siblings.targets])


def check_teacher(batch: ChunkBatch, loss: LossConfig) -> None:
    """Raises: `ConfigError` naming the first group that the loss has no teacher's logprobs of."""
    if not loss.needs_teacher:
        return
    for seq, group in zip(batch.seqs, batch.groups, strict=True):
        if group.teacher is None:
            raise ConfigError(
                f"group {seq} has no teacher's logprobs, which loss.kind {loss.kind} needs: set teacher.urls where its producers run, "
                "or train on what was generated with them; or choose another loss.kind"
            )
