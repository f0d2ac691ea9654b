"""Losses that judge a rollout as a whole. They see only those of its tokens that the staleness guard left in. Notation and invariants: `terms`."""

from __future__ import annotations

import torch
from torch import Tensor

from consumer.losses.clipping import clip, ppo_clip
from consumer.losses.terms import Terms, TokenLoss, log_ratio, rollout_mean


def gspo(terms: Terms, *, clip_low: float, clip_high: float) -> TokenLoss:
    """`-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)`, `s_t = sg(s) pi / sg(pi)`, s the geometric mean of the rollout's r.

    Clips whole rollouts. With the normaliser `rollout_mean` and one advantage a rollout its gradient is that of the paper's per-rollout objective.
    Source: Zheng et al., "Group sequence policy optimization" (arXiv 2507.18071), equations 5 and 7, in the token form of 13 and 14; clips 3e-4, 4e-4.
    Others: AReaL and verl take s to the trainer's recomputed policy at the start of the step, here it is to the engine's: staleness and mismatch count
    against these narrow bounds, so watch the clip fraction and widen them.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    held = log_r.detach()
    mean = rollout_mean(log_r, terms.rollout).to(log_r.dtype)
    loss, clipped = clip(mean.exp() * (log_r - held).exp(), terms.advantage, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(loss, clipped, held.exp())


def opsm(terms: Terms, *, clip_low: float, clip_high: float, threshold: float) -> TokenLoss:
    """`ppo_clip`, without the tokens where A < 0 and the rollout's mean of `log(mu / pi)` is over the threshold: bad rollouts that pi would hardly write.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1, off-policy sequence masking. It names no threshold; slime's default is 1e-4.
    Others: slime takes the mean to the trainer's recomputed policy, here (as in the paper) it is to the engine's, so staleness counts against the threshold:
    watch the clip fraction and raise it.
    """
    base = ppo_clip(terms, clip_low=clip_low, clip_high=clip_high)
    away = -rollout_mean(log_ratio(terms.target, terms.behaviour), terms.rollout)
    dropped = (terms.advantage < 0) & (away > threshold)
    return TokenLoss(base.loss.masked_fill(dropped, 0.0), base.clipped | dropped, base.ratio)


def m2po(terms: Terms, *, threshold: float) -> TokenLoss:
    """`-keep r A`; of a rollout's tokens the fewest with the largest `(log r)^2` are left out so that the mean of the others is at most the threshold.

    The paper's mean is over the batch; here it is over a rollout, so that the result does not depend on what else is in the batch.
    Source: Zheng et al., "Prosperity before collapse" (arXiv 2510.01161), second-moment mask and the objective without clip; threshold 0.04.
    Others: AReaL takes the second moment of prox / mu, which with one optimizer step per batch is the same.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    keep = _smallest(log_r.detach().square(), terms.rollout, threshold)
    return TokenLoss((-log_r.exp() * terms.advantage).masked_fill(~keep, 0.0), ~keep, log_r.detach().exp())


def _smallest(values: Tensor, rollout: Tensor, threshold: float) -> Tensor:
    """[N] bool: the most tokens of each rollout, smallest values first, whose mean is at most the threshold."""
    by_value = values.argsort(stable=True)
    order = by_value[rollout[by_value].argsort(stable=True)]  # by rollout, in it ascending
    ascending, owner = values[order].double(), rollout[order]
    total = ascending.cumsum(0)
    place = torch.arange(1, len(order) + 1, device=values.device)
    first = torch.ones_like(owner, dtype=torch.bool)
    first[1:] = owner[1:] != owner[:-1]
    # What lies before a rollout: 0 at the first, and ascending, so that the running maximum carries it through the rollout.
    before = torch.where(first, total - ascending, 0.0).cummax(0).values if len(order) else total
    skipped = torch.where(first, place - 1, 0).cummax(0).values if len(order) else place
    keep = torch.empty_like(first)
    keep[order] = (total - before) / (place - skipped) <= threshold
    return keep
