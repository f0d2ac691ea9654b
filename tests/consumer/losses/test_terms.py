from __future__ import annotations

import math

import pytest
import torch

from consumer.losses.terms import LOG_RATIO_BOUND, log_ratio, negative_log, rollout_mean, rollout_sum


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"),
    [(-1.0, -3.0, 2.0), (-1.0, -300.0, LOG_RATIO_BOUND), (-math.inf, -1.0, -LOG_RATIO_BOUND), (-math.inf, -math.inf, 0.0), (-1.0, -math.inf, LOG_RATIO_BOUND)],
)
def test_a_log_ratio_is_a_number_within_its_bound(numerator: float, denominator: float, expected: float):
    assert log_ratio(torch.tensor([numerator]), torch.tensor([denominator])).item() == expected


def test_a_log_ratio_passes_its_gradient_inside_the_bound_only():
    target = torch.tensor([-1.0, -50.0, -math.inf], requires_grad=True)
    log_ratio(target, torch.full((3,), -2.0)).sum().backward()
    assert target.grad is not None
    assert target.grad.tolist() == [1.0, 0.0, 0.0]


def test_a_logprob_that_is_no_number_stays_none():
    assert log_ratio(torch.tensor([math.nan]), torch.tensor([-1.0])).isnan().all()


def test_the_negative_log_keeps_the_gradient_of_unlikely_tokens():
    target = torch.tensor([-300.0, -math.inf], requires_grad=True)
    negative_log(target).sum().backward()
    assert target.grad is not None
    assert target.grad.tolist() == [-1.0, 0.0]


def test_sums_and_means_are_of_each_rollout_alone_and_carry_no_gradient():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], requires_grad=True)
    rollout = torch.tensor([0, 1, 1, 2, 2])
    assert rollout_sum(values, rollout).tolist() == [1, 6, 6, 24, 24]
    assert rollout_mean(values, rollout).tolist() == [1, 3, 3, 12, 12]
    assert not rollout_sum(values, rollout).requires_grad
    assert rollout_mean(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
