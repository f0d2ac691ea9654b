"""Advantages: what a rollout was better by than its siblings. Pure functions on rewards.

Shapes: rewards `[N, G]` (N groups of G siblings) to advantages `[N, G]`, float32. Groups do not mix, so a step may be cut into chunks anywhere.
Invariant: a group whose rewards are all equal, or a group of one, has advantage exactly 0; every result is finite for finite rewards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not explode."""


def group_mean(rewards: Tensor) -> Tensor:
    """`A_i = R_i - mean(R)`.

    Source: Liu et al., "Understanding R1-Zero-like training" (arXiv 2503.20783), Dr. GRPO, section 3.2: no division by the standard deviation.
    """
    centred, _ = _centre(rewards)
    return centred.float()


def group_std(rewards: Tensor) -> Tensor:
    """`A_i = (R_i - mean(R)) / (std(R) + 1e-4)`, std with Bessel's correction.

    Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), GRPO, section 4.1.2 (outcome supervision).
    """
    centred, equal = _centre(rewards)
    size = rewards.shape[1]
    if size < 2:
        return centred.float()
    deviation = (centred.square().sum(1, keepdim=True) / (size - 1)).sqrt()
    return (centred / (deviation + STD_FLOOR)).masked_fill(equal, 0.0).float()


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"group_std": group_std, "group_mean": group_mean}


def _centre(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Centred rewards in float64, and `[N, 1]` where a group's rewards are all equal: the mean of equal numbers may round away from them."""
    exact = rewards.to(torch.float64)
    equal = exact.amax(1, keepdim=True) == exact.amin(1, keepdim=True)
    return (exact - exact.mean(1, keepdim=True)).masked_fill(equal, 0.0), equal
