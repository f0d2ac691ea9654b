"""Losses against an independent scalar computation in Python floats; gradients by finite differences of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from consumer.losses import LOG_RATIO_BOUND, TokenLoss, ppo_clip, trust_region

Scalar = Callable[[float, float, float], float]


def naive_ppo(log_pi: float, log_mu: float, advantage: float) -> float:
    ratio = math.exp(log_pi - log_mu)
    clipped = max(0.8, min(1.28, ratio))
    return -min(ratio * advantage, clipped * advantage)


def naive_trust(log_pi: float, log_mu: float, advantage: float, *, held: float | None = None, cap: float = 5.0) -> float:
    """`held`: the log pi at which the stop-gradient weight and mask are taken."""
    at = log_pi if held is None else held
    moved = math.exp(at) - math.exp(log_mu)
    keep = not ((advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2))
    weight = math.exp(at - log_mu)
    weight = min(weight, cap) if cap else weight
    return -(weight * advantage * (log_pi - log_mu) if keep else 0.0) + 1e-3 * (log_pi - log_mu) ** 2


def torch_ppo(target: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor) -> TokenLoss:
    return ppo_clip(target, behaviour, advantage, clip_low=0.2, clip_high=0.28)


def torch_trust(target: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, cap: float = 5.0) -> TokenLoss:
    return trust_region(target, behaviour, advantage, tv_threshold=0.2, ratio_cap=cap, pull=1e-3)


def random_tokens(n: int) -> list[tuple[float, float, float]]:
    """Log pi, log mu, advantage, kept away from the corners where a finite difference is not the gradient."""
    rng = random.Random(7)
    out: list[tuple[float, float, float]] = []
    while len(out) < n:
        log_mu = -rng.expovariate(0.5) - 0.01
        log_pi = min(-1e-3, log_mu + rng.gauss(0, 0.8))
        ratio, moved = math.exp(log_pi - log_mu), math.exp(log_pi) - math.exp(log_mu)
        corners = (ratio - 0.8, ratio - 1.28, ratio - 5.0, abs(moved) - 0.2)
        if min(map(abs, corners)) > 1e-4:
            out.append((log_pi, log_mu, rng.choice((rng.gauss(0, 1.5), 0.0)) if rng.random() < 0.1 else rng.gauss(0, 1.5)))
    return out


def columns(tokens: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    target, behaviour, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    return target.requires_grad_(), behaviour, advantage


def test_ppo_clip_equals_the_scalar_formula_and_its_finite_differences():
    tokens = random_tokens(2000)
    target, behaviour, advantage = columns(tokens)
    told = torch_ppo(target, behaviour, advantage)
    told.loss.sum().backward()
    assert target.grad is not None
    h = 1e-6
    for (log_pi, log_mu, a), value, slope, clipped in zip(tokens, told.loss.tolist(), target.grad.tolist(), told.clipped.tolist(), strict=True):
        assert value == pytest.approx(naive_ppo(log_pi, log_mu, a), abs=1e-9)
        expected = (naive_ppo(log_pi + h, log_mu, a) - naive_ppo(log_pi - h, log_mu, a)) / (2 * h)
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert clipped == (expected == 0 and a != 0)


@pytest.mark.parametrize("cap", [5.0, 0.0])
def test_trust_region_equals_the_scalar_formula_and_its_finite_differences(cap: float):
    tokens = random_tokens(2000)
    target, behaviour, advantage = columns(tokens)
    told = torch_trust(target, behaviour, advantage, cap)
    told.loss.sum().backward()
    assert target.grad is not None
    h = 1e-6
    for (log_pi, log_mu, a), value, slope in zip(tokens, told.loss.tolist(), target.grad.tolist(), strict=True):
        assert value == pytest.approx(naive_trust(log_pi, log_mu, a, cap=cap), rel=1e-9, abs=1e-9)
        up, down = (naive_trust(log_pi + d, log_mu, a, held=log_pi, cap=cap) for d in (h, -h))
        assert slope == pytest.approx((up - down) / (2 * h), rel=1e-5, abs=1e-6)
    assert 0 < told.clipped.sum() < len(tokens)


def test_on_policy_both_losses_have_the_plain_policy_gradient():
    behaviour = torch.tensor([-0.1, -2.0, -7.0])
    advantage = torch.tensor([1.0, -0.5, 2.0])
    for loss in (torch_ppo, torch_trust):
        target = behaviour.clone().requires_grad_()
        loss(target, behaviour, advantage).loss.sum().backward()
        assert target.grad is not None
        torch.testing.assert_close(target.grad, -advantage)


@pytest.mark.parametrize("loss", [torch_ppo, torch_trust])
@pytest.mark.parametrize("advantage", [-3.0, 0.0, 3.0])
@pytest.mark.parametrize(("log_pi", "log_mu"), [(0.0, -300.0), (-300.0, 0.0), (-math.inf, -1.0), (-1e-7, -104.0), (-1e30, -2.0), (0.0, 0.0)])
def test_extreme_ratios_give_finite_values_and_gradients(loss: Callable[..., TokenLoss], advantage: float, log_pi: float, log_mu: float):
    target = torch.tensor([log_pi]).requires_grad_()
    told = loss(target, torch.tensor([log_mu]), torch.tensor([advantage]))
    told.loss.sum().backward()
    assert target.grad is not None
    assert torch.isfinite(told.loss).all()
    assert torch.isfinite(target.grad).all()
    assert told.ratio.max() <= math.exp(LOG_RATIO_BOUND) * 1.001


@pytest.mark.parametrize("loss", [torch_ppo, torch_trust])
def test_no_tokens_give_no_loss_and_an_empty_gradient(loss: Callable[..., TokenLoss]):
    target = torch.zeros(0, requires_grad=True)
    told = loss(target, torch.zeros(0), torch.zeros(0))
    told.loss.sum().backward()
    assert told.loss.sum() == 0
    assert target.grad is not None
    assert target.grad.shape == (0,)


@pytest.mark.parametrize("loss", [torch_ppo, torch_trust])
def test_zero_advantages_give_no_policy_gradient_on_policy(loss: Callable[..., TokenLoss]):
    behaviour = torch.tensor([-0.3, -1.0])
    target = behaviour.clone().requires_grad_()
    loss(target, behaviour, torch.zeros(2)).loss.sum().backward()
    assert target.grad is not None
    assert target.grad.abs().max() == 0


def test_the_cap_bounds_a_rare_token_that_the_threshold_lets_pass():
    log_mu, log_pi = math.log(1e-5), math.log(1e-2)
    for cap, expected in ((5.0, 5.0), (0.0, 1000.0)):
        target = torch.tensor([log_pi], dtype=torch.float64).requires_grad_()
        trust_region(target, torch.tensor([log_mu], dtype=torch.float64), torch.tensor([1.0]), tv_threshold=0.2, ratio_cap=cap, pull=0.0).loss.sum().backward()
        assert target.grad is not None
        assert -target.grad.item() == pytest.approx(expected)
