"""Advantages by token: from a chunk to flat arrays over its tokens in the loss, and back. Pure functions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from consumer.advantages import Rewards, Starts, gae
from consumer.batch import ChunkBatch


def token_count(batch: ChunkBatch) -> int:
    """Tokens of these groups that are in the loss."""
    return sum(len(group.targets) for group in batch.groups)


def numbered(batch: ChunkBatch) -> ChunkBatch:
    """Each token in the loss by its place in the chunk, in the field of its age: micro-batches sort rows, and carry one whole number a token."""
    groups, begin = [], 0
    for group in batch.groups:
        places = np.arange(begin, begin + len(group.targets), dtype=np.int64)
        groups.append(dataclasses.replace(group, stretches=np.stack((np.ones_like(places), places))))
        begin += len(places)
    return dataclasses.replace(batch, groups=tuple(groups))


def with_advantages(batch: ChunkBatch, values: NDArray[np.float64]) -> ChunkBatch:
    """`batch` with these [N], one for each of its tokens in the loss."""
    cuts = itertools.pairwise(itertools.accumulate((len(group.targets) for group in batch.groups), initial=0))
    flat = values.astype(np.float32)
    groups = (dataclasses.replace(group, judged=flat[start:end]) for group, (start, end) in zip(batch.groups, cuts, strict=True))
    return dataclasses.replace(batch, groups=tuple(groups))


def flat_advantages(batches: Iterable[ChunkBatch]) -> NDArray[np.float64]:
    """[N] of all their tokens in the loss."""
    return np.concatenate([np.zeros(0), *(group.advantage for batch in batches for group in batch.groups)])


def rollouts_of(batch: ChunkBatch) -> tuple[Rewards, Starts]:
    """What `trainer.advantage` said of each rollout, and where its tokens lie among those in the loss; [M] and [M + 1], also of rollouts without any."""
    rewards = np.concatenate([np.zeros(0), *(group.advantages for group in batch.groups)])
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(group.kept for group in batch.groups)])
    return rewards, np.append(0, np.cumsum(lengths))


def returns_to_go(batch: ChunkBatch, penalties: NDArray[np.float64]) -> NDArray[np.float64]:
    """`R - sum of the penalties from a token to the end of its rollout`, over tokens in the loss, without discount; [N] to [N].

    Source: Hu et al., "REINFORCE++" (arXiv 2501.03262), equation 8.
    """
    rewards, starts = rollouts_of(batch)
    found, _ = gae(rewards, np.zeros(len(penalties)), starts, penalties=penalties)
    return found
