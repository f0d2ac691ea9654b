"""Each loss against its formula in plain Python, and what is claimed of it besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from consumer.losses.importance import cispo, icepop, masked_is, topr, truncated_is
from consumer.losses.terms import Terms

LEVELS = ["token", "sequence", "geometric"]


def rho(rollout: Sequence[Any], t: int, level: str) -> float:
    if level == "token":
        return math.exp(rollout[t].pi - rollout[t].mu)
    product = 1.0
    for token in rollout:
        product *= math.exp(token.pi) / math.exp(token.mu)
    return product if level == "sequence" else product ** (1 / len(rollout))


def weighted(rollout: Sequence[Any], at: Sequence[float], weights: Sequence[float]) -> list[float]:
    return [-w * token.advantage * (log_pi - token.mu) for token, log_pi, w in zip(rollout, at, weights, strict=True)]


def naive_truncated(rollout: Sequence[Any], at: Sequence[float], *, cap: float, level: str) -> list[float]:
    ratios = [rho(rollout, t, level) for t in range(len(rollout))]
    return weighted(rollout, at, [min(r, cap) if cap else r for r in ratios])


def naive_masked(rollout: Sequence[Any], at: Sequence[float], *, low: float, high: float, level: str) -> list[float]:
    ratios = [rho(rollout, t, level) for t in range(len(rollout))]
    return weighted(rollout, at, [r if low <= r <= high else 0.0 for r in ratios])


def naive_icepop(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        k, u = math.exp(token.prox - token.mu), math.exp(log_pi - token.prox)
        weight = k if 0.8 <= k <= 1.25 else 0.0
        found.append(-weight * min(u * token.advantage, min(max(u, 0.9), 1.1) * token.advantage))
    return found


def naive_cispo(rollout: Sequence[Any], at: Sequence[float], *, floor: float, cap: float) -> list[float]:
    weights = []
    for token in rollout:
        weight = max(math.exp(token.pi - token.mu), floor)
        weights.append(min(weight, cap) if cap else weight)
    return weighted(rollout, at, weights)


def naive_topr(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    return weighted(rollout, at, [1.0 if token.advantage >= 0 else min(rho(rollout, 0, "sequence"), 1.0) for token in rollout])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cap", [1.1, 0.0])
def test_truncated_importance_sampling_is_its_formula(agrees: Any, level: Any, cap: float):
    told = agrees(partial(truncated_is, ratio_cap=cap, level=level), partial(naive_truncated, cap=cap, level=level))
    assert bool(told.clipped.any()) == bool(cap)
    assert not told.clipped.all()


@pytest.mark.parametrize(("level", "low", "high"), [("token", 0.7, 1.5), ("sequence", 0.5, 2.0), ("geometric", 0.999, 1.002)])
def test_masked_importance_sampling_is_its_formula(agrees: Any, terms: Terms, slope: Any, level: Any, low: float, high: float):
    loss = partial(masked_is, mask_low=low, mask_high=high, level=level)
    told = agrees(loss, partial(naive_masked, low=low, high=high, level=level))
    assert 0 < told.clipped.sum() < len(told.clipped)
    assert (slope(loss(terms), terms)[told.clipped] == 0).all()


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_above_the_token_a_rollout_is_masked_as_a_whole(terms: Terms, level: Any):
    dropped = masked_is(terms, mask_low=0.99, mask_high=1.01, level=level).clipped
    for i in range(int(terms.rollout[-1]) + 1):
        mine = dropped[terms.rollout == i]
        assert mine.all() or not mine.any()


def test_icepop_is_its_formula(agrees: Any):
    told = agrees(partial(icepop, mask_low=0.8, mask_high=1.25, clip_low=0.1, clip_high=0.1), naive_icepop)
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_where_proximal_is_target_icepop_has_the_gradient_of_masked_importance_sampling(terms: Terms, slope: Any):
    terms = replace(terms, proximal=terms.target.detach())
    pop, mask = icepop(terms, mask_low=0.5, mask_high=2.0, clip_low=0.2, clip_high=0.2), masked_is(terms, mask_low=0.5, mask_high=2.0)
    torch.testing.assert_close(slope(pop, terms), slope(mask, terms))
    assert torch.equal(pop.clipped, mask.clipped)


@pytest.mark.parametrize(("floor", "cap"), [(0.0, 1.3), (0.8, 1.3), (0.8, 0.0)])
def test_cispo_is_its_formula(agrees: Any, floor: float, cap: float):
    told = agrees(partial(cispo, ratio_floor=floor, ratio_cap=cap), partial(naive_cispo, floor=floor, cap=cap))
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_without_floor_cispo_is_truncated_importance_sampling(terms: Terms):
    assert torch.equal(cispo(terms, ratio_floor=0.0, ratio_cap=2.0).loss, truncated_is(terms, ratio_cap=2.0).loss)


def test_topr_is_its_formula(agrees: Any):
    told = agrees(topr, naive_topr)
    assert 0 < told.clipped.sum() < len(told.clipped)
