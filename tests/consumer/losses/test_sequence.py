"""Each loss against its formula in plain Python, and what is claimed of it besides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from consumer.losses.sequence import gspo, m2po, opsm
from consumer.losses.terms import Terms


def mean_log_ratio(rollout: Sequence[Any]) -> float:
    return sum(token.pi - token.mu for token in rollout) / len(rollout)


def naive_gspo(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    s = math.exp(mean_log_ratio(rollout))
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        s_t = s * math.exp(log_pi) / math.exp(token.pi)
        found.append(-min(s_t * token.advantage, min(max(s_t, 1 - 0.02), 1 + 0.03) * token.advantage))
    return found


def naive_opsm(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    far = -mean_log_ratio(rollout) > 0.01
    found = []
    for token, log_pi in zip(rollout, at, strict=True):
        r = math.exp(log_pi - token.mu)
        loss = -min(r * token.advantage, min(max(r, 0.8), 1.28) * token.advantage)
        found.append(0.0 if far and token.advantage < 0 else loss)
    return found


def kept(rollout: Sequence[Any], threshold: float) -> set[int]:
    """Takes out the largest, one by one, until the mean of the others is small enough."""
    left = {t: (token.pi - token.mu) ** 2 for t, token in enumerate(rollout)}
    while left and sum(left.values()) / len(left) > threshold:
        del left[max(left, key=left.__getitem__)]
    return set(left)


def naive_m2po(rollout: Sequence[Any], at: Sequence[float]) -> list[float]:
    keep = kept(rollout, 0.04)
    return [-math.exp(log_pi - token.mu) * token.advantage if t in keep else 0.0 for t, (token, log_pi) in enumerate(zip(rollout, at, strict=True))]


def test_gspo_is_its_formula(agrees: Any):
    told = agrees(partial(gspo, clip_low=0.02, clip_high=0.03), naive_gspo)
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_the_rollout_mean_of_gspo_has_the_gradient_of_the_papers_objective_per_rollout(rollouts: Any, terms: Terms, slope: Any):
    """Equation 5: of each rollout min(s A, clip(s) A), where s itself carries the gradient."""
    found = slope(gspo(terms, clip_low=0.02, clip_high=0.03), terms)
    at = 0
    for rollout in rollouts:
        mine = found[at : at + len(rollout)] / len(rollout)
        at += len(rollout)
        s = math.exp(mean_log_ratio(rollout))
        advantage = rollout[0].advantage
        clipped = (advantage > 0 and s > 1.03) or (advantage < 0 and s < 0.98)
        expected = 0.0 if clipped else -s * advantage / len(rollout)
        assert mine.tolist() == pytest.approx([expected] * len(rollout), rel=1e-9, abs=1e-12)


def test_opsm_is_its_formula(agrees: Any):
    told = agrees(partial(opsm, clip_low=0.2, clip_high=0.28, threshold=0.01), naive_opsm)
    assert 0 < told.clipped.sum() < len(told.clipped)


def test_m2po_is_its_formula(agrees: Any):
    told = agrees(partial(m2po, threshold=0.04), naive_m2po)
    assert 0 < told.clipped.sum() < len(told.clipped)


@pytest.mark.parametrize("threshold", [1e-9, 1e-3, 0.04, 1.0, 100.0])
def test_m2po_keeps_the_most_tokens_that_the_threshold_allows(rollouts: Any, terms: Terms, threshold: float):
    dropped = m2po(terms, threshold=threshold).clipped.tolist()
    starts = [0, *itertools.accumulate(len(rollout) for rollout in rollouts)]
    for rollout, (begin, end) in zip(rollouts, itertools.pairwise(starts), strict=True):
        assert {t for t, out in enumerate(dropped[begin:end]) if not out} == kept(rollout, threshold)
