"""The effective sample size of a step's rollouts, and the learning rate it allows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from consumer.losses.terms import LOG_RATIO_BOUND, Terms, log_ratio, rollout_sum


@torch.no_grad()
def weight_sums(terms: Terms) -> Tensor:
    """`[sum w, sum w^2, count]` over the micro-batch's rollouts, w the product of a rollout's r; [3] float64. They add up over micro-batches and ranks."""
    weight = rollout_sum(log_ratio(terms.target, terms.behaviour), terms.rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    first = torch.ones_like(weight)  # 1 at the first token of each rollout
    first[1:] = (terms.rollout[1:] != terms.rollout[:-1]).to(first.dtype)
    return torch.stack([(weight * first).sum(), (weight.square() * first).sum(), first.sum()])


def ess(total: float, squares: float) -> float:
    """`(sum w)^2 / sum w^2`: as many rollouts of equal weight would give an estimate as noisy. 0 without any.

    Source: Kong, "A note on importance sampling using standardized weights" (1992).
    """
    return total * total / squares if squares > 0 else 0.0


def lr_scale(total: float, squares: float, count: float) -> float:
    """`sqrt(ESS / N)`, in (0, 1]; 1 without rollouts, which say nothing. The factor of the learning rate of a step of N rollouts.

    Source: Huang et al., "Stable asynchrony: variance-controlled off-policy RL for LLMs" (VCPO, arXiv 2602.17616): square-root scaling, as for AdamW.
    """
    return math.sqrt(min(1.0, ess(total, squares) / count)) if count > 0 else 1.0
