"""Losses per token. Pure functions; the sum over a step's tokens, divided by their number, is the step's loss (token mean).

Shapes: target, behaviour, advantage `[N]`, the N tokens that enter the loss, masking already done. Result `[N]`.
Notation: `pi` the policy being optimised (its log is `target`, which carries the gradient), `mu` the policy that sampled (its log is `behaviour`),
`r = pi / mu`, `A` the advantage, `sg` stop-gradient.
With one optimizer step per batch the proximal policy is `pi` at the start of the step, so the ratio to `mu` is the only one there is.
Invariant: values and gradients are finite for every finite behaviour logprob: log r is held within ±20, and beyond it passes no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: far outside any trust region, and far inside float32."""


class TokenLoss(NamedTuple):
    """What a loss says of each token."""

    loss: Tensor
    """[N], carries the gradient."""
    clipped: Tensor
    """[N] bool: clipping or masking took this token's gradient."""
    ratio: Tensor
    """[N], r without gradient."""


def ppo_clip(target: Tensor, behaviour: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    Source: Schulman et al., "Proximal policy optimization" (arXiv 1707.06347), equation 7; the higher upper clip is Yu et al., "DAPO" (arXiv 2503.14476),
    section 3.1. Measured on the sorting task at constant staleness 4 and 8: ahead of truncated and unclipped importance weights, level with `trust_region`.
    """
    ratio = log_ratio(target, behaviour).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    held = ratio.detach()
    clipped = ((advantage > 0) & (held > 1 + clip_high)) | ((advantage < 0) & (held < 1 - clip_low))
    return TokenLoss(loss, clipped, held)


def trust_region(target: Tensor, behaviour: Tensor, advantage: Tensor, *, tv_threshold: float, ratio_cap: float, pull: float) -> TokenLoss:
    """`-keep A sg(min(r, ratio_cap)) log r + pull (log r)^2`, `keep = not (A > 0 and pi - mu > tv_threshold or A < 0 and pi - mu < -tv_threshold)`.

    A token whose probability has already moved further than the threshold in the direction its advantage asks for leaves the policy gradient; the pull
    towards `mu` applies to every token. The threshold alone does not bound r for rare tokens (mu = 1e-5, pi = 1e-2 passes), hence the cap; 0: no cap.
    Source: "DPPO" (arXiv 2602.04879), binary total-variation mask; the cap is the truncated importance weight of Espeholt et al., "IMPALA" (arXiv 1802.01561).
    """
    log_r = log_ratio(target, behaviour)
    held = log_r.detach().exp()
    moved = target.detach().exp() - behaviour.exp()
    dropped = ((advantage > 0) & (moved > tv_threshold)) | ((advantage < 0) & (moved < -tv_threshold))
    weight = (held.clamp(max=ratio_cap) if ratio_cap else held) * advantage
    # log r has the gradient of log pi (mu is a constant), and is bounded where log pi may be -inf (0 times -inf is no number).
    loss = -weight.masked_fill(dropped, 0.0) * log_r + pull * log_r.square()
    return TokenLoss(loss, dropped, held)


def log_ratio(target: Tensor, behaviour: Tensor) -> Tensor:
    """`log r`, held within ±20; [N] to [N]."""
    return (target - behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
