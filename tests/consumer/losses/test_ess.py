from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from consumer.losses.ess import ess, lr_scale, weight_sums
from consumer.losses.terms import Terms


def weights(rollouts: Any) -> list[float]:
    return [math.prod(math.exp(token.pi) / math.exp(token.mu) for token in rollout) for rollout in rollouts]


def test_the_sums_are_of_the_ratios_of_whole_rollouts(rollouts: Any, terms: Terms):
    w = weights(rollouts)
    assert weight_sums(terms).tolist() == pytest.approx([sum(w), sum(x * x for x in w), len(w)])


def test_the_sums_add_up_over_micro_batches(make_terms: Any, rollouts: Any, terms: Terms):
    parts = [weight_sums(make_terms(part)) for part in (rollouts[:1], rollouts[1:9], [], rollouts[9:])]
    torch.testing.assert_close(torch.stack(parts).sum(0), weight_sums(terms))


def test_equal_weights_count_in_full_whatever_they_are():
    assert ess(8 * 0.3, 8 * 0.09) == pytest.approx(8)
    assert lr_scale(8 * 0.3, 8 * 0.09, 8) == pytest.approx(1)


def test_where_one_weight_dominates_the_step_is_worth_one_rollout():
    assert ess(1e8 + 15, 1e16 + 15) == pytest.approx(1, rel=1e-5)
    assert lr_scale(1e8 + 15, 1e16 + 15, 16) == pytest.approx(0.25, rel=1e-5)


def test_the_factor_is_the_root_of_the_effective_share(rollouts: Any, terms: Terms):
    w = weights(rollouts)
    factor = lr_scale(*weight_sums(terms).tolist())
    assert factor == pytest.approx(math.sqrt(sum(w) ** 2 / sum(x * x for x in w) / len(w)))
    assert 0 < factor < 1


def test_the_factor_never_exceeds_one_by_rounding_and_is_one_without_rollouts(make_terms: Any):
    assert lr_scale(3.0, 3.0 - 1e-12, 3) == 1
    assert lr_scale(*weight_sums(make_terms([])).tolist()) == 1
