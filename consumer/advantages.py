"""Advantages: what a rollout was better by than its siblings. Pure functions on rewards.

Shapes: rewards `[N, G]` float64 (N groups of G siblings) to advantages `[N, G]` float32. Groups do not mix, so a step may be cut into chunks anywhere.
Invariant: a group whose rewards are all equal, or a group of one, has advantage exactly 0; every result is finite for finite rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Rewards: TypeAlias = NDArray[np.float64]
Advantages: TypeAlias = NDArray[np.float32]
STD_FLOOR = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not explode."""


def group_mean(rewards: Rewards) -> Advantages:
    """`A_i = R_i - mean(R)`.

    Source: Liu et al., "Understanding R1-Zero-like training" (arXiv 2503.20783), Dr. GRPO, section 3.2: no division by the standard deviation.
    """
    centred, _ = _centre(rewards)
    return centred.astype(np.float32)


def group_std(rewards: Rewards) -> Advantages:
    """`A_i = (R_i - mean(R)) / (std(R) + 1e-4)`, std with Bessel's correction.

    Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), GRPO, section 4.1.2 (outcome supervision).
    """
    centred, equal = _centre(rewards)
    size = rewards.shape[1]
    if size < 2:
        return centred.astype(np.float32)
    deviation = np.sqrt(np.square(centred).sum(1, keepdims=True) / (size - 1))
    return np.where(equal, 0.0, centred / (deviation + STD_FLOOR)).astype(np.float32)


ADVANTAGES: dict[str, Callable[[Rewards], Advantages]] = {"group_std": group_std, "group_mean": group_mean}


def _centre(rewards: Rewards) -> tuple[Rewards, NDArray[np.bool_]]:
    """Centred rewards, and `[N, 1]` where a group's rewards are all equal: the mean of equal numbers may round away from them."""
    equal = rewards.max(1, keepdims=True) == rewards.min(1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(1, keepdims=True)), equal
