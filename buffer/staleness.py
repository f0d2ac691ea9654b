"""Staleness of tokens and the loss mask that follows from it: pure functions of a group and the record of the step that takes it (rules V2, T2).

A step's record freezes lineage, cutoff and guard, so a replay masks the same tokens.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from buffer.config import StalenessGuard
from buffer.contract import StepRecord
from protocol.arrays import IntArray, MaskArray
from protocol.messages import GroupHeader, RolloutGroup
from protocol.versions import Lineage, Version


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
    bounded = record.guard != StalenessGuard.CORRECT
    ages_by_version = _Ages(record.lineage, record.step)
    oldest = record.step - 1 - record.cutoff
    result = []
    for rollout in group.rollouts:
        ages = np.zeros(len(rollout.tokens), dtype=np.int32)
        for span in rollout.spans:
            ages[span.start : span.end] = ages_by_version(span.version)
        mask = rollout.mask
        if bounded:
            mask = np.where(ages > oldest, np.uint8(0), mask)
        result.append((mask, ages))
    return tuple(result)


class _Ages:
    """Staleness by version in one step; a group has few versions and many spans."""

    def __init__(self, lineage: Lineage, step: int) -> None:
        self._of = lru_cache(maxsize=None)(lambda version: lineage.staleness(version, step))

    def __call__(self, version: Version) -> int:
        return self._of(version)
