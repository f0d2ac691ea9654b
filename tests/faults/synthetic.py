"""Groups without a model: each is a pure function of its `seq`, so that a test knows what was trained without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from protocol.messages import Rollout, RolloutGroup, Span
from protocol.versions import Version

GROUP_SIZE = 2
MAX_NEW_TOKENS = 12
EXTRA = 32
PROMPT = "1+2="
PROMPT_TOKENS = 4
HELD_UNTIL = "TEST_HELD_UNTIL"
"""In the environment of a producer that makes nothing before this file is there."""
VOCABULARY = (3, 16)
"""First token and end: what the tiny model of tests/consumer knows as characters."""


def is_filtered(seq: int) -> bool:
    """Its rewards are all equal: a producer that filters by variance sets it aside."""
    return seq % 13 == 5


def fails(seq: int, attempt: int) -> bool:
    return attempt == 1 and seq % 7 == 3


def group_of(seq: int, versions: Sequence[Version]) -> RolloutGroup:
    """The group of `seq`. One or two `versions` wrote it, each a part of every rollout; they are all that is not decided by `seq`."""
    rng = np.random.default_rng(seq)
    prompt = rng.integers(*VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
    reward = rng.random()
    return RolloutGroup(rollouts=tuple(_rollout(rng, prompt, versions, reward if is_filtered(seq) else rng.random()) for _ in range(GROUP_SIZE)))


def extra_of(seq: int, i: int) -> np.ndarray:
    """What goes with rollout `i`: small enough for a payload, or out of line where that is asked for."""
    return np.random.default_rng((seq, i)).random(EXTRA, dtype=np.float32)


def _rollout(rng: np.random.Generator, prompt: np.ndarray, versions: Sequence[Version], reward: float) -> Rollout:
    new = int(rng.integers(2, MAX_NEW_TOKENS + 1))
    start, end = PROMPT_TOKENS, PROMPT_TOKENS + new
    cuts = [start + new * i // len(versions) for i in range(len(versions) + 1)]
    logprobs = np.zeros(end, dtype=np.float32)
    logprobs[start:] = -rng.random(new, dtype=np.float32) - 0.5
    return Rollout(
        tokens=np.concatenate([prompt, rng.integers(*VOCABULARY, new, dtype=np.int32)]),
        mask=(np.arange(end) >= start).astype(np.uint8),
        logprobs=logprobs,
        spans=tuple(Span(version=version, start=cuts[i], end=cuts[i + 1]) for i, version in enumerate(versions)),
        reward=float(reward),
    )
