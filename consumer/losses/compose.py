"""The [loss] section made into one function of a micro-batch's terms."""

from __future__ import annotations

from functools import partial

from consumer.losses.clipping import decoupled_ppo, ppo_clip, trust_region
from consumer.losses.config import LossConfig, LossKind
from consumer.losses.divergence import entropy_bonus, kl_to_reference
from consumer.losses.imitation import distillation, sft
from consumer.losses.importance import cispo, icepop, masked_is, topr, truncated_is
from consumer.losses.sequence import gspo, m2po, opsm
from consumer.losses.terms import Loss, Terms, TokenLoss


def compose(config: LossConfig) -> Loss:
    """`policy + kl_coef KL + entropy_coef (-H)` of each token; `clipped` and `ratio` are the policy loss's."""
    policy = _policies(config)[config.kind]
    if not config.needs_reference and not config.needs_entropy:
        return policy

    def loss(terms: Terms) -> TokenLoss:
        told = policy(terms)
        total = told.loss
        if config.needs_reference:
            total = total + config.kl_coef * kl_to_reference(terms, config.kl_kind)
        if config.needs_entropy:
            total = total + config.entropy_coef * entropy_bonus(terms)
        return told._replace(loss=total)

    return loss


def _policies(config: LossConfig) -> dict[LossKind, Loss]:
    low, high, cap = config.clip_low, config.clip_high, config.ratio_cap
    return {
        "ppo_clip": partial(ppo_clip, clip_low=low, clip_high=high, dual_clip=config.dual_clip),
        "trust_region": partial(trust_region, tv_threshold=config.tv_threshold, ratio_cap=cap, pull=config.trust_pull),
        "decoupled_ppo": partial(decoupled_ppo, clip_low=low, clip_high=high, ratio_cap=cap, proximal=config.proximal),
        "truncated_is": partial(truncated_is, ratio_cap=cap, level=config.is_level),
        "masked_is": partial(masked_is, mask_low=config.mask_low, mask_high=config.mask_high, level=config.is_level),
        "icepop": partial(icepop, mask_low=config.mask_low, mask_high=config.mask_high, clip_low=low, clip_high=high),
        "cispo": partial(cispo, ratio_floor=config.ratio_floor, ratio_cap=cap),
        "topr": topr,
        "gspo": partial(gspo, clip_low=config.gspo_clip_low, clip_high=config.gspo_clip_high),
        "opsm": partial(opsm, clip_low=low, clip_high=high, threshold=config.opsm_threshold),
        "m2po": partial(m2po, threshold=config.m2_threshold),
        "sft": sft,
        "distillation": partial(distillation, ratio_cap=cap),
    }
