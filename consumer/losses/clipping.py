"""Losses that stop pushing a token that has already moved far enough. Notation and invariants: `consumer.losses.terms`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consumer.losses.terms import Terms, TokenLoss, log_ratio


def ppo_clip(terms: Terms, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> TokenLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; with `dual_clip` c, where A < 0: `-max(min(...), c A)`, which bounds the loss of a rare token.

    Source: Schulman et al., "Proximal policy optimization" (arXiv 1707.06347), equation 7; the higher upper clip is Yu et al., "DAPO" (arXiv 2503.14476),
    section 3.1; the dual clip is Ye et al., "Mastering complex control in MOBA games" (arXiv 1912.09729), dual-clip PPO.
    Others: verl and AReaL take r to the trainer's recomputed policy at the start of the step; here it is to the engine's, so staleness and mismatch are
    clipped too. With one optimizer step per batch their ratio is 1 and nothing is ever clipped. verl's dual clip is on at 3 by default, here it is off.
    Measured on the sorting task at constant staleness 4 and 8: ahead of truncated and unclipped importance weights, level with `trust_region`.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    loss, clipped = clip(log_r.exp(), terms.advantage, clip_low=clip_low, clip_high=clip_high)
    held = log_r.detach().exp()
    if dual_clip:
        loss = torch.where(terms.advantage < 0, torch.minimum(loss, -dual_clip * terms.advantage), loss)
        clipped = clipped | ((terms.advantage < 0) & (held > dual_clip))
    return TokenLoss(loss, clipped, held)


def trust_region(terms: Terms, *, tv_threshold: float, ratio_cap: float, pull: float) -> TokenLoss:
    """`-keep A sg(min(r, ratio_cap)) log r + pull (log r)^2`, `keep = not (A > 0 and pi - mu > t or A < 0 and pi - mu < -t)`, `t = tv_threshold`.

    A token whose probability has already moved further than the threshold in the direction its advantage asks for leaves the policy gradient; the pull
    towards `mu` applies to every token. The threshold alone does not bound r for rare tokens (mu = 1e-5, pi = 1e-2 passes), hence the cap; 0: no cap.
    A threshold that shrinks with a token's staleness, tried on the sorting task (250 updates, staleness 2 to 8, 31 pairs), showed no benefit, and is no option.
    Source: "DPPO" (arXiv 2602.04879), binary total-variation mask; the cap is the truncated importance weight of Espeholt et al., "IMPALA" (arXiv 1802.01561).
    Others: prime-rl's code has the mask and the pull but no cap, its documentation a cap.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    held = log_r.detach().exp()
    moved = terms.target.detach().exp() - terms.behaviour.exp()
    dropped = ((terms.advantage > 0) & (moved > tv_threshold)) | ((terms.advantage < 0) & (moved < -tv_threshold))
    weight = held.clamp(max=ratio_cap) if ratio_cap else held
    # log r has the gradient of log pi (mu is a constant), and is bounded where log pi may be -inf (0 times -inf is no number).
    loss = -(weight * terms.advantage).masked_fill(dropped, 0.0) * log_r + pull * log_r.square()
    return TokenLoss(loss, dropped | (held > weight), held)


def decoupled_ppo(terms: Terms, *, clip_low: float, clip_high: float, ratio_cap: float, proximal: Literal["recompute", "loglinear"] = "recompute") -> TokenLoss:
    """`-sg(min(prox / mu, ratio_cap)) min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)`, `u = pi / prox`: correct back to mu, stay near prox.

    `recompute` takes `terms.proximal`. With one optimizer step per batch that is pi itself: u = 1, nothing clips, and this is `truncated_is`.
    `loglinear` estimates prox as the policy one step before pi (`loglinear_proximal`), which clips also then. `ratio_cap` 0: no cap.
    Source: Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), decoupled clipped objective; Fu et al., "AReaL"
    (arXiv 2505.24298), section 5.2; the estimate is "A-3PO" (arXiv 2512.06547).
    Others: AReaL drops tokens with prox / mu over its cap (5) instead of bounding them, divides by the tokens before that, and by its code's default has no
    weight prox / mu at all.
    """
    held = log_ratio(terms.target, terms.behaviour).detach().exp()
    near = loglinear_proximal(terms) if proximal == "loglinear" else terms.proximal
    rho = log_ratio(near, terms.behaviour).exp()
    weight = rho.clamp(max=ratio_cap) if ratio_cap else rho
    loss, clipped = clip(log_ratio(terms.target, near).exp(), terms.advantage, clip_low=clip_low, clip_high=clip_high)
    return TokenLoss(weight * loss, clipped | (rho > weight), held)


def loglinear_proximal(terms: Terms) -> Tensor:
    """`log mu + (1 - 1/age) sg(log r)`, mu itself up to age 1: the policy one step before pi, if log-probabilities moved evenly. [N], without gradient.

    Source: "A-3PO" (arXiv 2512.06547), as in AReaL: the interpolation weight is (v_prox - v_mu) / (v_pi - v_mu) with v_prox = v_pi - 1.
    """
    share = 1 - 1 / terms.age.clamp(min=1).to(terms.behaviour.dtype)
    return terms.behaviour + share * log_ratio(terms.target, terms.behaviour).detach()


def clip(ratio: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic surrogate as a loss, and where it has no gradient; [N] and [N] bool."""
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    held = ratio.detach()
    return loss, ((advantage > 0) & (held > 1 + clip_high)) | ((advantage < 0) & (held < 1 - clip_low))
