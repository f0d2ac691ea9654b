"""Losses without a reward: what was sampled is right (`sft`), or a teacher says how right it is. Notation and invariants: `consumer.losses.terms`."""

from __future__ import annotations

import torch

from consumer.losses.terms import Terms, TokenLoss, log_ratio, negative_log


def sft(terms: Terms) -> TokenLoss:
    """`-log pi` on every token in the loss; the advantage is not read.

    For demonstrations, or for rollouts of which a filter kept the good ones (rejection sampling fine-tuning).
    Source: maximum likelihood; as the first stage of Ouyang et al., "InstructGPT" (arXiv 2203.02155), section 3.5.
    """
    nothing = torch.zeros_like(terms.rollout, dtype=torch.bool)
    return TokenLoss(negative_log(terms.target), nothing, log_ratio(terms.target, terms.behaviour).detach().exp())


def distillation(terms: Terms, *, ratio_cap: float) -> TokenLoss:
    """`sg(min(r, ratio_cap) d) (1 + log r - sg(log r))`, `d = log(pi / teacher)` held within ±20: reverse KL to the teacher at the sampled tokens.

    The value estimates `KL(pi || teacher)` a token, the gradient is that of this divergence for the next token, corrected from mu to pi; what a token does to
    later ones is left out. The advantage is not read. `ratio_cap` 0: no cap.
    Source: Agarwal et al., "On-policy distillation of language models" (arXiv 2306.13649), reverse KL; Lu, "On-policy distillation" (Thinking Machines, 2025)
    for the estimate from the sampled token alone, as an advantage of `-d`.
    Others: the latter, and slime's (which adds -d to the advantage), take d once from mu or from the start of the step; here it is that of pi.
    """
    assert terms.teacher is not None, "kind distillation, but the micro-batch has no teacher logprobs"
    log_r = log_ratio(terms.target, terms.behaviour)
    held = log_r.detach()
    ratio = held.exp()
    weight = ratio.clamp(max=ratio_cap) if ratio_cap else ratio
    away = log_ratio(terms.target, terms.teacher).detach()
    return TokenLoss(weight * away * (1 + log_r - held), ratio > weight, ratio)
