"""Random ragged rollouts, and the comparison of a loss with a plain Python computation of its formula, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest
import torch

from consumer.losses.terms import Loss, Terms, TokenLoss

STEP = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Logprobs and what else belongs to one sampled token."""

    pi: float
    mu: float
    prox: float
    advantage: float
    age: int
    reference: float
    teacher: float
    entropy: float


Rollout = list[Token]
Naive = Callable[[Rollout, Sequence[float]], Sequence[float]]
"""The loss of each token of a rollout where log pi is the second argument, except in what is stop-gradient: there it is `Token.pi`."""


class Agrees(Protocol):
    def __call__(self, loss: Loss, naive: Naive, *, rollouts: list[Rollout] | None = None) -> TokenLoss: ...


def ragged(seed: int, count: int = 32) -> list[Rollout]:
    """Lengths 1 to 9, each rollout with a drift of its own: none, as small as engine noise, and as large as very stale ones."""
    rng = random.Random(seed)
    drifts, advantages = (0.0, 1e-4, 1e-3, 0.05, 0.3, 1.0), (1.3, -0.7, 0.0, -2.1, 0.4)
    found = []
    for i in range(count):
        drift, advantage, bias = drifts[i % len(drifts)], advantages[i % len(advantages)], rng.choice((-1, 0, 1))
        length = 1 if i < len(drifts) else rng.randint(1, 9)
        rollout = []
        for _ in range(length):
            mu = -rng.expovariate(0.5) - 0.02
            move = rng.gauss(bias * drift, drift)
            rollout.append(
                Token(
                    pi=min(-1e-4, mu + move) if drift else mu,
                    mu=mu,
                    prox=mu + move * rng.uniform(0.3, 1.1),
                    advantage=advantage,
                    age=rng.randint(0, 8) if drift else 0,
                    reference=mu + rng.gauss(0, 0.7),
                    teacher=mu + rng.gauss(0, 0.7),
                    entropy=rng.uniform(0, 3),
                )
            )
        found.append(rollout)
    return found


def terms_of(rollouts: Sequence[Rollout], dtype: torch.dtype = torch.float64) -> Terms:
    """All of them as one micro-batch; target and entropy are leaves with a gradient."""
    flat = [token for rollout in rollouts for token in rollout]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return Terms(
        target=column([t.pi for t in flat]).requires_grad_(),
        behaviour=column([t.mu for t in flat]),
        proximal=column([t.prox for t in flat]),
        advantage=column([t.advantage for t in flat]),
        rollout=torch.tensor([i for i, rollout in enumerate(rollouts) for _ in rollout], dtype=torch.int64),
        age=torch.tensor([t.age for t in flat], dtype=torch.int64),
        reference=column([t.reference for t in flat]),
        teacher=column([t.teacher for t in flat]),
        entropy=column([t.entropy for t in flat]).requires_grad_(),
    )


def gradient(told: TokenLoss, terms: Terms) -> torch.Tensor:
    """Of the summed loss by log pi; [N]."""
    (found,) = torch.autograd.grad(told.loss.sum(), terms.target, retain_graph=True)
    return found


@pytest.fixture
def rollouts() -> list[Rollout]:
    return ragged(3)


@pytest.fixture
def terms(rollouts: list[Rollout]) -> Terms:
    return terms_of(rollouts)


@pytest.fixture
def make_terms() -> Callable[..., Terms]:
    return terms_of


@pytest.fixture
def make_rollouts() -> Callable[..., list[Rollout]]:
    return ragged


@pytest.fixture
def slope() -> Callable[[TokenLoss, Terms], torch.Tensor]:
    return gradient


@pytest.fixture
def agrees(rollouts: list[Rollout]) -> Agrees:
    """Values equal the formula; the gradient of the sum equals its finite differences; the ratio is pi / mu. Returns what the loss said."""
    usual = rollouts

    def check(loss: Loss, naive: Naive, *, rollouts: list[Rollout] | None = None) -> TokenLoss:
        batch = usual if rollouts is None else rollouts
        terms = terms_of(batch)
        told = loss(terms)
        values, slopes = [], []
        for rollout in batch:
            at = [token.pi for token in rollout]
            values += naive(rollout, at)
            for t in range(len(rollout)):
                up, down = (sum(naive(rollout, [*at[:t], at[t] + h, *at[t + 1 :]])) for h in (STEP, -STEP))
                slopes.append((up - down) / (2 * STEP))
        assert told.loss.tolist() == pytest.approx(values, rel=1e-9, abs=1e-10)
        assert gradient(told, terms).tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(told.ratio, (terms.target - terms.behaviour).exp().detach())
        assert told.clipped.dtype == torch.bool
        return told

    return check
