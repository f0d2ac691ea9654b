"""Staleness of tokens and the loss mask that follows from it: pure functions of a group and the record of the step that takes it (rules V2, T2).

A step's record freezes lineage, cutoff and guard, so a replay masks the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from buffer.config import StalenessGuard
from buffer.contract import StepRecord
from protocol.arrays import IntArray, MaskArray
from protocol.messages import GroupHeader, RolloutGroup
from protocol.versions import Version


def kept_tokens(header: GroupHeader, record: StepRecord) -> int:
    """Trainable tokens of the group that enter the loss of the step."""
    if record.guard == StalenessGuard.CORRECT:
        return sum(header.trainable.values())
    return sum(tokens for version, tokens in header.trainable.items() if record.lineage.shared(version) >= record.cutoff)


def accepts(header: GroupHeader, record: StepRecord, *, min_kept_share: float) -> bool:
    """Whether the guard lets the group into the step; a refused group is released as stale.

    Raises: `ValueError` for a token from the future of the step: a bug, never clipped.
    """
    for version in header.trainable:
        record.lineage.staleness(version, record.step)
    total, kept = sum(header.trainable.values()), kept_tokens(header, record)
    if record.guard == StalenessGuard.MASK:
        return total == 0 or (kept > 0 and kept >= min_kept_share * total)
    return kept == total


def token_mask(group: RolloutGroup, record: StepRecord) -> tuple[tuple[MaskArray, IntArray], ...]:
    """Per rollout, the loss mask after the guard and the staleness of every token.

    Shapes: mask [T] uint8, 1: enters the loss. Staleness [T] int32 in steps, 0 where no span covers the token.
    Invariant: with the guard `mask` or `drop`, no token with mask 1 is older than the cutoff of `record`.
    """
    versions = list(dict.fromkeys(span.version for rollout in group.rollouts for span in rollout.spans))
    judged = dict(zip(versions, judge(versions, record), strict=True))
    result = []
    for rollout in group.rollouts:
        ages, mask = np.zeros(len(rollout.tokens), dtype=np.int32), rollout.mask.copy()
        for span in rollout.spans:
            age, enters = judged[span.version]
            ages[span.start : span.end] = age
            if not enters:
                mask[span.start : span.end] = 0
        result.append((mask, ages))
    return tuple(result)


def judge(versions: Iterable[Version], record: StepRecord) -> list[tuple[int, bool]]:
    """Per version the staleness of its tokens in the step, and whether the guard lets them into the loss.

    Raises: `ValueError` for a version from the future of the step: a bug, never clipped.
    """
    ages = [record.lineage.staleness(version, record.step) for version in versions]
    bounded, oldest = record.guard != StalenessGuard.CORRECT, record.step - 1 - record.cutoff
    return [(age, not bounded or age <= oldest) for age in ages]
