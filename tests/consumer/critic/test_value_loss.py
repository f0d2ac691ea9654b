"""The value loss and its figures against plain Python, and against finite differences."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from consumer.critic.value_loss import Sums, measure, nothing, value_loss


def by_loops(value: float, before: float, target: float, clip: float) -> float:
    plain = (value - target) ** 2
    if not clip:
        return plain / 2
    moved = min(max(value, before - clip), before + clip)
    return max(plain, (moved - target) ** 2) / 2


def drawn(count: int, *, seed: int = 1) -> tuple[list[float], list[float], list[float]]:
    rng = random.Random(seed)
    before = [rng.gauss(0, 1) for _ in range(count)]
    return [value + rng.choice((0.0, 0.1, 1.0)) * rng.gauss(0, 1) for value in before], before, [rng.gauss(0.5, 1) for _ in range(count)]


def tensors(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64) for row in rows]


@pytest.mark.parametrize("clip", [0.0, 0.05, 0.5, 100.0])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_the_loss_equals_its_formula_and_its_gradient_finite_differences(clip: float, count: int):
    rows = drawn(count)
    values, before, returns = tensors(*rows)
    values.requires_grad_(True)
    told = value_loss(values, before, returns, clip=clip)
    assert told.loss.tolist() == pytest.approx([by_loops(*row, clip) for row in zip(*rows, strict=True)], abs=1e-12)
    told.loss.sum().backward()
    assert values.grad is not None
    step = 1e-6
    for (value, old, target), gradient, clipped in zip(zip(*rows, strict=True), values.grad.tolist(), told.clipped.tolist(), strict=True):
        slope = (by_loops(value + step, old, target, clip) - by_loops(value - step, old, target, clip)) / (2 * step)
        assert gradient == pytest.approx(slope, abs=1e-5)
        assert clipped == (slope == 0)


def test_clipping_holds_a_value_that_came_nearer_and_not_one_that_went_away():
    before, returns = tensors([0.0, 0.0], [1.0, 1.0])
    values = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
    told = value_loss(values, before, returns, clip=0.2)
    told.loss.sum().backward()
    assert told.clipped.tolist() == [True, False]
    assert values.grad is not None
    assert values.grad.tolist() == [0.0, -1.5]


def test_figures_are_those_of_all_tokens_whatever_the_cut():
    rows = drawn(100)
    values, before, returns = tensors(*rows)
    sums = nothing(torch.device("cpu"))
    for at in (slice(0, 0), slice(0, 1), slice(1, 60), slice(60, 100)):
        sums = sums + measure(values[at], returns[at], value_loss(values[at], before[at], returns[at], clip=0.3))
    found = Sums(sums)
    errors = [target - value for value, _, target in zip(*rows, strict=True)]
    assert found.tokens == 100
    assert found.figures() == pytest.approx(
        {
            "value_loss": statistics.fmean(by_loops(*row, 0.3) for row in zip(*rows, strict=True)),
            "value_mean": statistics.fmean(rows[0]),
            "return_mean": statistics.fmean(rows[2]),
            "value_explained_variance": 1 - statistics.pvariance(errors) / statistics.pvariance(rows[2]),
        }
    )


def test_nothing_is_told_of_no_tokens_and_no_variance_explained_where_there_is_none():
    assert Sums(nothing(torch.device("cpu"))).figures() == {}
    values, returns = tensors([0.1, 0.7], [0.3, 0.3])
    told = Sums(measure(values, returns, value_loss(values, values, returns, clip=0.0))).figures()
    assert "value_explained_variance" not in told
    assert told["value_mean"] == pytest.approx(0.4)
