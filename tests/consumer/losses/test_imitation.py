"""Each loss against its formula in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from consumer.losses.imitation import distillation, sft
from consumer.losses.terms import Terms


def naive_sft(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    return [-log_pi for log_pi in at]


def naive_distillation(rollout: Sequence[Any], at: Sequence[float], *, cap: float) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        weight = math.exp(token.pi - token.mu)
        if cap:
            weight = min(weight, cap)
        found.append(weight * (token.pi - token.teacher) * (1 + log_pi - token.pi))
    return found


def test_sft_is_its_formula_whatever_the_advantage(agrees: Any):
    assert not agrees(sft, naive_sft).clipped.any()


@pytest.mark.parametrize("cap", [1.2, 0.0])
def test_distillation_is_its_formula(agrees: Any, cap: float):
    told = agrees(partial(distillation, ratio_cap=cap), partial(naive_distillation, cap=cap))
    assert bool(told.clipped.any()) == bool(cap)


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_divergence_off_policy(make_terms: Callable[..., Terms], rollouts: Any):
    pi, mu, teacher = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.1, 0.6, 0.3]
    token = type(rollouts[0][0])
    rows = [
        [token(pi=0.0, mu=math.log(q), prox=0.0, advantage=0.0, age=0, reference=0.0, teacher=math.log(f), entropy=0.0)]
        for q, f in zip(mu, teacher, strict=True)
    ]
    terms = make_terms(rows)
    logits = torch.tensor([math.log(p) for p in pi], dtype=torch.float64, requires_grad=True)
    terms = replace(terms, target=logits.log_softmax(0))
    mean = (torch.tensor(mu, dtype=torch.float64) * distillation(terms, ratio_cap=0.0).loss).sum()
    (slope,) = torch.autograd.grad(mean, logits)
    divergence = sum(p * math.log(p / f) for p, f in zip(pi, teacher, strict=True))
    assert mean.item() == pytest.approx(divergence)
    assert slope.tolist() == pytest.approx([p * (math.log(p / f) - divergence) for p, f in zip(pi, teacher, strict=True)])
