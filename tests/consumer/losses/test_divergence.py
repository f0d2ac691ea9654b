"""Estimates of the divergence against plain Python, and their expectation against the exact divergence of small distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from consumer.losses.config import KlKind
from consumer.losses.divergence import K3_BOUND, entropy_bonus, kl_to_reference
from consumer.losses.terms import Terms, TokenLoss, log_ratio

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3", "low_variance", "unbiased")


def as_loss(kind: KlKind) -> Callable[[Terms], TokenLoss]:
    def loss(terms: Terms) -> TokenLoss:
        found = kl_to_reference(terms, kind)
        return TokenLoss(found, torch.zeros_like(terms.rollout, dtype=torch.bool), log_ratio(terms.target, terms.behaviour).detach().exp())

    return loss


def naive(rollout: Sequence[Any], at: Sequence[float], *, kind: str) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        d = log_pi - token.reference
        k3 = math.exp(token.reference) / math.exp(log_pi) - 1 + d
        ratio = math.exp(log_pi - token.mu)
        found.append({"k1": d, "k2": d * d / 2, "k3": k3, "low_variance": min(k3, 10.0), "unbiased": ratio * k3}[kind])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_estimate_is_its_formula_and_carries_its_gradient(agrees: Any, kind: KlKind):
    agrees(as_loss(kind), partial(naive, kind=kind))


def three_tokens() -> tuple[list[float], list[float], list[float]]:
    """pi, mu, reference over a vocabulary of three."""
    return [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.1, 0.6, 0.3]


def expectation(kind: KlKind, over: Sequence[float], make_terms: Callable[..., Terms], token: Any) -> tuple[float, list[float]]:
    """Value, and gradient by the three logits of pi, of the estimate's mean where tokens are sampled from `over`."""
    pi, mu, reference = three_tokens()
    logits = torch.tensor([math.log(p) for p in pi], dtype=torch.float64, requires_grad=True)
    rows = [
        [token(pi=0.0, mu=math.log(q), prox=0.0, advantage=0.0, age=0, reference=math.log(f), teacher=0.0, entropy=0.0)]
        for q, f in zip(mu, reference, strict=True)
    ]
    terms = make_terms(rows)
    terms = replace(terms, target=logits.log_softmax(0))
    terms = replace(terms, behaviour=torch.tensor(over, dtype=torch.float64).log())
    mean = (torch.tensor(over, dtype=torch.float64) * kl_to_reference(terms, kind)).sum()
    (slope,) = torch.autograd.grad(mean, logits)
    return mean.item(), slope.tolist()


def exact() -> tuple[float, list[float]]:
    """KL(pi || reference) and its gradient by the logits: pi_i (log(pi_i / ref_i) - KL)."""
    pi, _, reference = three_tokens()
    value = sum(p * math.log(p / f) for p, f in zip(pi, reference, strict=True))
    return value, [p * (math.log(p / f) - value) for p, f in zip(pi, reference, strict=True)]


def test_unbiased_has_the_value_and_gradient_of_the_divergence_off_policy(make_terms: Any, rollouts: Any):
    value, slope = expectation("unbiased", three_tokens()[1], make_terms, type(rollouts[0][0]))
    assert value == pytest.approx(exact()[0])
    assert slope == pytest.approx(exact()[1])


@pytest.mark.parametrize(("kind", "value_right", "slope_right"), [("k1", True, False), ("k2", False, True), ("k3", True, False), ("unbiased", True, True)])
def test_on_policy_each_estimate_is_right_in_what_its_documentation_says(make_terms: Any, rollouts: Any, kind: KlKind, value_right: bool, slope_right: bool):
    value, slope = expectation(kind, three_tokens()[0], make_terms, type(rollouts[0][0]))
    assert (value == pytest.approx(exact()[0])) is value_right
    assert (slope == pytest.approx(exact()[1])) is slope_right
    if kind == "k1":
        assert slope == pytest.approx([0.0] * 3, abs=1e-12)


def test_the_low_variance_estimate_is_bounded_and_has_no_gradient_beyond(make_terms: Any, rollouts: Any, slope: Any):
    token = type(rollouts[0][0])
    rows = [[token(pi=pi, mu=pi, prox=pi, advantage=0.0, age=0, reference=f, teacher=0.0, entropy=0.0)] for pi, f in ((-9.0, -1.0), (-1.0, -2.0))]
    terms = make_terms(rows)
    told = as_loss("low_variance")(terms)
    assert told.loss.tolist() == pytest.approx([K3_BOUND, math.exp(-1)])
    assert slope(told, terms).tolist() == pytest.approx([0.0, 1 - math.exp(-1)])


def test_unbiased_has_an_exact_gradient_in_float32_where_the_reference_is_far_likelier(make_terms: Any, rollouts: Any, slope: Any):
    token = type(rollouts[0][0])
    terms = make_terms([[token(pi=-19.0, mu=-19.0, prox=0.0, advantage=0.0, age=0, reference=-1.0, teacher=0.0, entropy=0.0)]], torch.float32)
    assert slope(as_loss("unbiased")(terms), terms).item() == pytest.approx(-18.0, rel=1e-5)


def test_the_entropy_bonus_rewards_entropy(terms: Terms):
    assert terms.entropy is not None
    assert torch.equal(entropy_bonus(terms), -terms.entropy)
