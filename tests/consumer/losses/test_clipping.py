"""Each loss against its formula in plain Python, and what is claimed of it besides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from consumer.losses.clipping import clip, decoupled_ppo, loglinear_proximal, ppo_clip, trust_region
from consumer.losses.importance import truncated_is
from consumer.losses.terms import Terms


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    clipped = 1 - low if ratio < 1 - low else min(ratio, 1 + high)
    return -min(ratio * advantage, clipped * advantage)


def naive_ppo(rollout: Sequence[Any], at: Sequence[float], *, dual: float = 0.0) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        objective = -surrogate(math.exp(log_pi - token.mu), token.advantage, 0.2, 0.28)
        if dual and token.advantage < 0:
            objective = max(objective, dual * token.advantage)
        found.append(-objective)
    return found


def naive_trust(rollout: Sequence[Any], at: Sequence[float], *, cap: float) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        moved, threshold = math.exp(token.pi) - math.exp(token.mu), 0.1
        dropped = (token.advantage > 0 and moved > threshold) or (token.advantage < 0 and moved < -threshold)
        weight = math.exp(token.pi - token.mu)
        if cap:
            weight = min(weight, cap)
        found.append((0.0 if dropped else -weight * token.advantage * (log_pi - token.mu)) + 1e-3 * (log_pi - token.mu) ** 2)
    return found


def naive_decoupled(rollout: Sequence[Any], at: Sequence[float], *, cap: float, loglinear: bool) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        near = token.prox
        if loglinear:
            share = (token.age - 1) / token.age if token.age > 1 else 0.0
            near = token.mu + share * (token.pi - token.mu)
        weight = math.exp(near - token.mu)
        if cap:
            weight = min(weight, cap)
        found.append(weight * surrogate(math.exp(log_pi - near), token.advantage, 0.2, 0.28))
    return found


@pytest.mark.parametrize("dual", [0.0, 1.5])
def test_ppo_clip_is_its_formula(agrees: Any, terms: Terms, slope: Any, dual: float):
    told = agrees(partial(ppo_clip, clip_low=0.2, clip_high=0.28, dual_clip=dual), partial(naive_ppo, dual=dual))
    assert 0 < told.clipped.sum() < len(told.clipped)
    again = ppo_clip(terms, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    assert torch.equal(again.clipped, (slope(again, terms) == 0) & (terms.advantage != 0))


def test_the_dual_clip_bounds_what_a_rare_token_with_negative_advantage_costs(make_terms: Callable[..., Terms], rollouts: Any):
    terms = make_terms(rollouts)
    plain, dual = (ppo_clip(terms, clip_low=0.2, clip_high=0.28, dual_clip=c) for c in (0.0, 1.5))
    bad = terms.advantage < 0
    assert torch.equal(plain.loss[~bad], dual.loss[~bad])
    assert (dual.loss[bad] <= 1.5 * terms.advantage[bad].abs()).all()
    assert (plain.loss[bad] > 1.5 * terms.advantage[bad].abs()).any()


@pytest.mark.parametrize("cap", [2.0, 0.0])
def test_trust_region_is_its_formula(agrees: Any, terms: Terms, slope: Any, cap: float):
    told = agrees(partial(trust_region, tv_threshold=0.1, ratio_cap=cap, pull=1e-3), partial(naive_trust, cap=cap))
    kept = [slope(trust_region(terms, tv_threshold=bound, ratio_cap=most, pull=0.0), terms) for bound, most in ((0.1, cap), (1.0, 0.0))]
    found = trust_region(terms, tv_threshold=0.1, ratio_cap=cap, pull=0.0).clipped
    assert torch.equal(found & (terms.advantage != 0), kept[0] != kept[1]), "just those whose gradient is another"
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_the_cap_bounds_a_rare_token_that_the_threshold_lets_pass(make_terms: Callable[..., Terms], rollouts: Any, slope: Any):
    rare = type(rollouts[0][0])(pi=math.log(1e-2), mu=math.log(1e-5), prox=0.0, advantage=1.0, age=0, reference=0.0, teacher=0.0, entropy=0.0)
    for cap, expected in ((5.0, 5.0), (0.0, 1000.0)):
        terms = make_terms([[rare]])
        told = trust_region(terms, tv_threshold=0.2, ratio_cap=cap, pull=0.0)
        assert -slope(told, terms).item() == pytest.approx(expected)
        assert told.clipped.tolist() == [cap > 0]


@pytest.mark.parametrize("cap", [1.2, 0.0])
@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_decoupled_ppo_is_its_formula(agrees: Any, cap: float, proximal: Any):
    loss = partial(decoupled_ppo, clip_low=0.2, clip_high=0.28, ratio_cap=cap, proximal=proximal)
    told = agrees(loss, partial(naive_decoupled, cap=cap, loglinear=proximal == "loglinear"))
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_where_proximal_is_target_decoupled_ppo_has_the_gradient_of_truncated_importance_sampling(terms: Terms, slope: Any):
    terms = replace(terms, proximal=terms.target.detach())
    told = decoupled_ppo(terms, clip_low=0.2, clip_high=0.28, ratio_cap=2.0)
    truncated = truncated_is(terms, ratio_cap=2.0)
    torch.testing.assert_close(slope(told, terms), slope(truncated, terms))
    assert torch.equal(told.clipped, truncated.clipped)
    assert told.clipped.any()


def test_the_loglinear_proximal_goes_from_behaviour_to_target_with_age(terms: Terms):
    near = loglinear_proximal(terms)
    assert not near.requires_grad
    assert torch.equal(near[terms.age <= 1], terms.behaviour[terms.age <= 1])
    old = terms.age == 4
    assert old.any()
    torch.testing.assert_close(near[old], (0.25 * terms.behaviour + 0.75 * terms.target.detach())[old])


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_each_side_is_clipped_at_its_own_bound_and_only_where_the_advantage_asks_for_more(advantage: float):
    ratio = torch.tensor([0.7, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0])
    _, clipped = clip(ratio, torch.full_like(ratio, advantage), clip_low=0.2, clip_high=0.28)
    too_high, too_low = [False] * 5 + [True] * 2, [True] * 2 + [False] * 5
    assert clipped.tolist() == {1.0: too_high, -1.0: too_low, 0.0: [False] * 7}[advantage]
