"""Regularisers that are added to a policy loss: the divergence from a reference model and the entropy bonus. Notation: `consumer.losses.terms`."""

from __future__ import annotations

import torch
from torch import Tensor

from consumer.losses.config import KlKind
from consumer.losses.terms import Terms, log_ratio

K3_BOUND = 10.0
"""Of the low-variance estimate; reached where pi is 14 times less likely than the reference, or 60,000 times likelier."""


def kl_to_reference(terms: Terms, kind: KlKind) -> Tensor:
    """An estimate of `KL(pi || ref)` from the sampled token; [N], carries the gradient. `d = log(pi / ref)`, held within ±20; `k3 = exp(-d) - 1 + d`.

    k1             d                   the plain estimate. As a loss useless: its gradient is that of log pi, which is 0 on average
    k2             d^2 / 2             biased value, but on policy the gradient of the divergence
    k3             exp(-d) - 1 + d     unbiased value on policy, never negative; its gradient is that of KL(ref || pi)
    low_variance   min(k3, 10)         the same where bounded, no gradient beyond
    unbiased       r k3                value and gradient right also off policy; the gradient is `r d` times that of log pi

    `unbiased` carries the unbounded r, so it is for low staleness, or beside a small coefficient.
    Source: Schulman, "Approximating KL divergence" (2020) for k1 to k3; Shao et al., "DeepSeekMath" (arXiv 2402.03300), equation 4 (k3 as a loss);
    DeepSeek-AI, "DeepSeek-V3.2" (arXiv 2512.02556), section 3.1 (unbiased).
    Others: the bound of 10 is verl's and slime's `low_var_kl`. slime can weigh any estimate by r; prime-rl has a pull to mu (`trust_region`) and no reference.
    """
    assert terms.reference is not None, "kl_coef is above 0, but the micro-batch has no reference logprobs"
    d = log_ratio(terms.target, terms.reference)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    k3 = torch.expm1(-d) + d
    if kind == "low_variance":
        return k3.clamp(max=K3_BOUND)
    if kind == "unbiased":
        log_r = log_ratio(terms.target, terms.behaviour)
        held, ratio = log_r.detach(), log_r.detach().exp()
        # Left to differentiation, r d would be the difference of two numbers of the size of exp(-d).
        return ratio * k3.detach() + ratio * d.detach() * (log_r - held)
    return k3


def entropy_bonus(terms: Terms) -> Tensor:
    """`-H`, H the entropy of the next token in nats; [N], carries the gradient.

    Source: Williams and Peng, "Function optimization using connectionist reinforcement learning algorithms" (1991); as here in Schulman et al.,
    "Proximal policy optimization" (arXiv 1707.06347), equation 9.
    Off by default: it pushes all tokens alike, whatever their reward.
    """
    assert terms.entropy is not None, "entropy_coef is above 0, but the micro-batch has no entropy"
    return -terms.entropy
