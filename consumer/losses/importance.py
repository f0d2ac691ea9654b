"""Losses that weigh the gradient of each token by an importance ratio, and bound or mask that. Notation and invariants: `consumer.losses.terms`.

All but `icepop` are `-sg(w) A log r`: log r has the gradient of log pi (mu is a constant) and is finite where log pi may be -inf. At r = 1 all have the plain
policy gradient. Measured on the sorting task (250 updates) at constant staleness 4 and 8 and lr 1e-3: behind `ppo_clip` and `trust_region`; at mixed
staleness of mean 1.5 nearly level. What several of them are meant for, engines that compute otherwise than trainers, was not part of it.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from consumer.losses.clipping import clip
from consumer.losses.terms import LOG_RATIO_BOUND, Terms, TokenLoss, log_ratio, rollout_mean, rollout_sum


def truncated_is(terms: Terms, *, ratio_cap: float, level: Literal["token", "sequence", "geometric"] = "token") -> TokenLoss:
    """`-sg(min(rho, ratio_cap)) A log r`; rho: r, or of the rollout's r the product (`sequence`) or the geometric mean (`geometric`). `ratio_cap` 0: no cap.

    Without cap at level `token` it is the unclipped importance-weighted policy gradient. Levels above the token see what the guard left in of a rollout.
    Source: Espeholt et al., "IMPALA" (arXiv 1802.01561), section 4.1; for language models Wu et al., "LlamaRL" (arXiv 2505.24034), AIPO, and Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training" (2025); levels: Liu et al., "When speed kills stability" (2025).
    Others: slime multiplies PPO's loss by min(prox / mu, 2) instead, which with one optimizer step per batch has this gradient.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    rho = _at_level(log_r, terms.rollout, level)
    weight = rho.clamp(max=ratio_cap) if ratio_cap else rho
    return TokenLoss(-weight * terms.advantage * log_r, rho > weight, log_r.detach().exp())


def masked_is(terms: Terms, *, mask_low: float, mask_high: float, level: Literal["token", "sequence", "geometric"] = "token") -> TokenLoss:
    """`-sg(w) A log r`, `w = rho if mask_low <= rho <= mask_high else 0`; rho as in `truncated_is`.

    A rollout's geometric mean stays close to 1, so level `geometric` wants narrow bounds (NeMo-RL recommends 0.999 and 1.002).
    Source: Liu et al., "When speed kills stability" (2025), masked importance sampling at token, sequence and geometric level.
    Others: NeMo-RL masks by the geometric mean and weighs by the token's own ratio inside; here both are the same ratio.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    rho = _at_level(log_r, terms.rollout, level)
    dropped = (rho < mask_low) | (rho > mask_high)
    return TokenLoss(-rho.masked_fill(dropped, 0.0) * terms.advantage * log_r, dropped, log_r.detach().exp())


def icepop(terms: Terms, *, mask_low: float, mask_high: float, clip_low: float, clip_high: float) -> TokenLoss:
    """`-sg(w) min(u A, clip(u, 1 - clip_low, 1 + clip_high) A)`, `u = pi / prox`, `k = prox / mu`, `w = k if mask_low <= k <= mask_high else 0`.

    The mask goes by how much trainer and engine disagree (here staleness counts too), the clip by how far this step has moved. With one optimizer step per
    batch prox is pi, nothing clips, and the gradient is that of `masked_is` at level `token`.
    Source: Ling Team, "Every step evolves" (arXiv 2510.18855), IcePop; bounds 0.5 and 5.
    Others: slime and NeMo-RL mask at the same bounds; the authors found later (KPop, 2026) that fixed bounds mask less while the gap widens.
    """
    k = log_ratio(terms.proximal, terms.behaviour).exp()
    dropped = (k < mask_low) | (k > mask_high)
    loss, clipped = clip(log_ratio(terms.target, terms.proximal).exp(), terms.advantage, clip_low=clip_low, clip_high=clip_high)
    held = log_ratio(terms.target, terms.behaviour).detach().exp()
    return TokenLoss(k.masked_fill(dropped, 0.0) * loss, dropped | clipped, held)


def cispo(terms: Terms, *, ratio_floor: float, ratio_cap: float) -> TokenLoss:
    """`-sg(clip(r, ratio_floor, ratio_cap)) A log r`: every token keeps its gradient, only its weight is bounded. A bound of 0: none.

    Without floor it is `truncated_is` at level `token`.
    Source: MiniMax, "MiniMax-M1" (arXiv 2506.13585), CISPO, equations 4 and 5; caps are 1 + epsilon_high there, and no lower bound is used.
    Others: slime has a lower bound 1 - eps_clip; PipelineRL caps at 1.02 and divides by the number of rollouts.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    held = log_r.detach().exp()
    weight = held.clamp(min=ratio_floor, max=ratio_cap or None)
    return TokenLoss(-weight * terms.advantage * log_r, weight != held, held)


def topr(terms: Terms) -> TokenLoss:
    """`-sg(w) A log r`, w = 1 where A >= 0, else `min(rho, 1)` with rho the product of the rollout's r: good rollouts count in full, bad ones only
    as far as the policy would still write them. The product is over what the guard left in.

    Source: Le Roux et al., "Tapered off-policy REINFORCE" (arXiv 2503.14286), section 3, the TOPR gradient; there by the sign of the reward.
    Others: ROLL goes by the sign of the reward and has a weight for each of the two halves.
    """
    log_r = log_ratio(terms.target, terms.behaviour)
    rho = _at_level(log_r, terms.rollout, "sequence")
    bad = terms.advantage < 0
    weight = torch.where(bad, rho.clamp(max=1.0), torch.ones_like(rho))
    return TokenLoss(-weight * terms.advantage * log_r, bad & (rho > 1), log_r.detach().exp())


def _at_level(log_r: Tensor, rollout: Tensor, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """The ratio at the token, or of its rollout; [N], without gradient."""
    if level == "sequence":
        return rollout_sum(log_r, rollout).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(log_r.dtype)
    if level == "geometric":
        return rollout_mean(log_r, rollout).exp().to(log_r.dtype)
    return log_r.detach().exp()
