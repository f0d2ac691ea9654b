"""Figures of a step against plain Python over its tokens, and that they add up however the tokens are cut."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from consumer.diagnostics import Measured, Totals, measure, nothing
from consumer.losses.terms import Terms, TokenLoss
from consumer.metric_names import metric_of


@dataclass(frozen=True)
class Token:
    log_pi: float
    log_mu: float
    log_reference: float
    advantage: float
    age: int
    clipped: bool
    entropy: float
    loss: float


def rollouts(seed: int, count: int = 12) -> list[list[Token]]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        advantage = rng.choice([-1.0, 0.0, 0.7])
        tokens = []
        for _ in range(rng.randint(1, 9)):
            log_mu = -rng.expovariate(1.0)
            log_pi = min(0.0, log_mu + rng.gauss(0, 0.4))
            tokens.append(Token(log_pi, log_mu, log_pi + rng.gauss(0, 0.1), advantage, rng.randint(0, 11), rng.random() < 0.2, rng.random(), rng.gauss(0, 1)))
        found.append(tokens)
    return found


def measured(chosen: Sequence[Sequence[Token]], *, reference: bool = True) -> Measured:
    tokens = [token for rollout in chosen for token in rollout]

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    terms = Terms(
        target=column("log_pi"),
        behaviour=column("log_mu"),
        proximal=column("log_pi"),
        advantage=column("advantage"),
        rollout=torch.tensor([i for i, rollout in enumerate(chosen) for _ in rollout], dtype=torch.int64),
        age=column("age", torch.int64),
        reference=column("log_reference") if reference else None,
    )
    told = TokenLoss(column("loss"), column("clipped", torch.bool), (terms.target - terms.behaviour).exp())
    return measure(terms, told, loss=told.loss.sum(), entropy=column("entropy"))


def by_hand(tokens: Sequence[Token]) -> dict[str, float]:
    logs = [token.log_pi - token.log_mu for token in tokens]
    ratios = [math.exp(log) for log in logs]
    count = len(tokens)
    return {
        "mismatch_kl_k1": -sum(logs) / count,
        "mismatch_kl_k3": sum(ratio - 1 - log for ratio, log in zip(ratios, logs, strict=True)) / count,
        "ratio_mean": sum(ratios) / count,
        "ratio_max": max(ratios),
        "ratio_outside": sum(ratio < 0.5 or ratio > 2 for ratio in ratios) / count,
        "ess_tokens": sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios) / count,
        "logprob_diff_mean": sum(map(abs, logs)) / count,
    }


AGES = {"0": range(1), "1": range(1, 2), "2_3": range(2, 4), "4_7": range(4, 8), "8_up": range(8, 99)}


@pytest.mark.parametrize("seed", range(4))
def test_figures_are_those_of_the_tokens_counted_by_hand(seed: int):
    chosen = rollouts(seed, 40)
    tokens = [token for rollout in chosen for token in rollout]
    totals = Totals(measured(chosen))
    figures = totals.figures(reference=True)
    expected = by_hand(tokens)
    for name, ages in AGES.items():
        if aged := [token for token in tokens if token.age in ages]:
            expected |= {f"{key}/age_{name}": value for key, value in by_hand(aged).items()}
    weights = [math.exp(sum(token.log_pi - token.log_mu for token in rollout)) for rollout in chosen]
    expected["ess"] = sum(weights) ** 2 / sum(weight**2 for weight in weights) / len(weights)
    gaps = [token.log_reference - token.log_pi for token in tokens]
    expected["reference_kl"] = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(tokens)
    expected["tokens_idle"] = sum(token.advantage == 0 for token in tokens)
    expected["tokens_clipped"] = sum(token.clipped and token.advantage != 0 for token in tokens)
    expected["tokens_effective"] = sum(not token.clipped and token.advantage != 0 for token in tokens)
    seen = {name: value for name, value in figures.items() if "p99" not in name}
    assert seen == pytest.approx(expected, rel=1e-9)
    assert totals.tokens == len(tokens)
    assert totals.loss == pytest.approx(sum(token.loss for token in tokens))
    assert totals.mean("entropy") == pytest.approx(sum(token.entropy for token in tokens) / len(tokens))
    assert totals.mean("clipped") == pytest.approx(sum(token.clipped for token in tokens) / len(tokens))
    assert totals.lr_scale == pytest.approx(math.sqrt(expected["ess"]))
    assert all(metric_of(name) is not None for name in figures), "every figure has a meaning"


def test_the_99th_percentile_is_at_most_a_bin_above_the_true_one():
    chosen = rollouts(7, 300)
    differences = sorted(abs(token.log_pi - token.log_mu) for rollout in chosen for token in rollout)
    true = differences[math.ceil(0.99 * len(differences)) - 1]
    seen = Totals(measured(chosen)).figures(reference=True)["logprob_diff_p99"]
    assert true <= seen <= 1.15 * true


@pytest.mark.parametrize("cuts", [[5], [1, 2, 11], [0, 6, 12]])
def test_parts_add_up_to_the_whole_in_any_order(cuts: list[int]):
    chosen = rollouts(3)
    parts = [measured(chosen[start:end]) for start, end in zip([0, *cuts], [*cuts, len(chosen)], strict=True)]
    total = nothing(torch.device("cpu"))
    for part in reversed(parts):
        total = total.add(part)
    whole, added = Totals(measured(chosen)), Totals(total)
    assert added.figures(reference=True) == pytest.approx(whole.figures(reference=True), rel=1e-9)
    assert (added.loss, added.lr_scale) == pytest.approx((whole.loss, whole.lr_scale))


def test_a_step_without_tokens_tells_nothing_and_asks_for_the_whole_learning_rate():
    totals = Totals(measured([]))
    assert totals.figures(reference=True) == {}
    assert (totals.tokens, totals.loss, totals.lr_scale, totals.mean("entropy")) == (0, 0.0, 1.0, 0.0)


def test_extreme_logprobs_stay_finite():
    tokens = [Token(-math.inf, -0.1, -1.0, 1.0, 0, False, 0.0, 0.0), Token(0.0, -200.0, -math.inf, -1.0, 3, True, 0.0, 0.0)]
    figures = Totals(measured([tokens])).figures(reference=True)
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["ratio_max"] == pytest.approx(math.exp(20))
    assert figures["logprob_diff_p99"] == pytest.approx(20)


def test_only_ages_that_occur_are_told_of():
    young = [[Token(-1.0, -1.1, -1.0, 1.0, 0, False, 0.0, 0.0)]]
    figures = Totals(measured(young, reference=False)).figures(reference=False)
    assert {name.partition("/")[2] for name in figures} == {"", "age_0"}
    assert "reference_kl" not in figures
