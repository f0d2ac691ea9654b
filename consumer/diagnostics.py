"""How far a step's tokens are from the policy that sampled them, as sums that add up over micro-batches, chunks and ranks.

    micro-batch ─ measure ─► Measured ──┐
    micro-batch ─ measure ─► Measured ──┴─ add ─► (summed over ranks) ─► Totals ─► the step's figures

Notation: `pi` the policy being trained, at the start of the step; `mu` the one that sampled, as its engine told; `r = pi / mu`, its log held within ±20.
Invariant: each figure is the same however tokens are cut into micro-batches, chunks and ranks, up to the rounding of float64 sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from consumer.backend import StepReport
from consumer.losses.ess import ess, lr_scale, weight_sums
from consumer.losses.terms import LOG_RATIO_BOUND, Terms, TokenLoss, log_ratio
from consumer.metric_names import AGE_BUCKETS, by_age

_BINS = 128
_FINEST = 1e-6
"""Smaller differences of logprobs are not told apart."""
_NARROW, _WIDE = 0.5, 2.0
"""A ratio outside is counted."""
_P99 = 0.99

_COLUMNS = ("tokens", "k1", "k3", "ratio", "ratio_squared", "outside", "difference", "deviation", "clipped", "idle", "lost", "entropy", "reference")
_TAIL = ("loss", "weight", "weight_squared", "rollouts")
_AGES = len(AGE_BUCKETS)
_TABLE = _AGES * len(_COLUMNS)
_HISTOGRAM = _AGES * _BINS
SUMS = _TABLE + _HISTOGRAM + len(_TAIL)
"""Length of `Measured.sums`."""


class Measured(NamedTuple):
    """Of some tokens. float64, on their device."""

    sums: Tensor
    """[SUMS]: adds up."""
    greatest: Tensor
    """[buckets of age]: greatest r; the greater one counts."""

    def add(self, other: Measured) -> Measured:
        return Measured(self.sums + other.sums, torch.maximum(self.greatest, other.greatest))


def nothing(device: torch.device) -> Measured:
    """Of no tokens."""
    return Measured(torch.zeros(SUMS, dtype=torch.float64, device=device), torch.zeros(_AGES, dtype=torch.float64, device=device))


@torch.no_grad()
def measure(terms: Terms, told: TokenLoss, *, loss: Tensor, entropy: Tensor) -> Measured:
    """Of one micro-batch; waits for nothing on its device.

    Shapes: loss [], the weighted sum; entropy [N], nats.
    """
    log_r = log_ratio(terms.target.double(), terms.behaviour.double())
    ratio, off = log_r.exp(), log_r.abs()
    idle = terms.advantage == 0
    columns = {
        "tokens": torch.ones_like(log_r),
        "k1": -log_r,
        "k3": torch.expm1(log_r) - log_r,
        "ratio": ratio,
        "ratio_squared": ratio.square(),
        "outside": (ratio < _NARROW) | (ratio > _WIDE),
        "difference": off,
        "deviation": (ratio - 1).abs(),
        "clipped": told.clipped,
        "idle": idle,
        "lost": told.clipped & ~idle,
        "entropy": entropy,
        "reference": torch.zeros_like(log_r) if terms.reference is None else _k3(terms.reference, terms.target),
    }
    bucket = torch.bucketize(terms.age, _ages(log_r.device), right=True) - 1
    member = (bucket == torch.arange(_AGES, device=bucket.device)[:, None]).to(torch.float64)
    table = member @ torch.stack([columns[name].to(torch.float64) for name in _COLUMNS], 1)
    histogram = torch.zeros(_HISTOGRAM, dtype=torch.float64, device=log_r.device)
    histogram.index_add_(0, bucket * _BINS + torch.bucketize(off, _edges(log_r.device)), columns["tokens"])
    tail = torch.cat([loss.to(torch.float64)[None], weight_sums(terms)])
    greatest = torch.zeros(_AGES, dtype=torch.float64, device=log_r.device).scatter_reduce_(0, bucket, ratio, "amax")
    return Measured(torch.cat([table.flatten(), histogram, tail]), greatest)


class Totals:
    """A step's figures: means over the tokens that entered the loss, unless a name says otherwise; see docs/metrics.md."""

    def __init__(self, measured: Measured) -> None:
        values: list[float] = measured.sums.tolist()
        self._table = [dict(zip(_COLUMNS, values[at : at + len(_COLUMNS)], strict=True)) for at in range(0, _TABLE, len(_COLUMNS))]
        self._histograms = [values[at : at + _BINS] for at in range(_TABLE, _TABLE + _HISTOGRAM, _BINS)]
        self._tail = dict(zip(_TAIL, values[_TABLE + _HISTOGRAM :], strict=True))
        self._greatest: list[float] = measured.greatest.tolist()
        self._all = {name: math.fsum(row[name] for row in self._table) for name in _COLUMNS}

    @property
    def loss(self) -> float:
        """Weighted sum."""
        return self._tail["loss"]

    @property
    def tokens(self) -> int:
        return round(self._all["tokens"])

    def mean(self, name: str) -> float:
        return self._all[name] / max(1, self.tokens)

    @property
    def lr_scale(self) -> float:
        """What the learning rate is multiplied by under `loss.lr_by_ess`."""
        return lr_scale(self._tail["weight"], self._tail["weight_squared"], self._tail["rollouts"])

    def report(self, divisor: float, *, grad_norm: float, lr: float, reference: bool) -> StepReport:
        """Of the step that was made with them."""
        return StepReport(
            loss=self.loss / divisor,
            grad_norm=grad_norm,
            lr=lr,
            entropy=self.mean("entropy"),
            clip_fraction=self.mean("clipped"),
            ratio_dev=self.mean("deviation"),
            diagnostics=self.figures(reference=reference),
        )

    def figures(self, *, reference: bool) -> dict[str, float]:
        """By name, see `consumer.metric_names`. `reference`: there is a reference model."""
        if not self.tokens:
            return {}
        figures = self._scope(self._all, [sum(counts) for counts in zip(*self._histograms, strict=True)], max(self._greatest))
        for bucket, row, histogram, greatest in zip(AGE_BUCKETS, self._table, self._histograms, self._greatest, strict=True):
            if row["tokens"]:
                figures |= {by_age(name, bucket): value for name, value in self._scope(row, histogram, greatest).items()}
        figures["ess"] = ess(self._tail["weight"], self._tail["weight_squared"]) / self._tail["rollouts"]
        figures["tokens_idle"] = self._all["idle"]
        figures["tokens_clipped"] = self._all["lost"]
        figures["tokens_effective"] = self._all["tokens"] - self._all["idle"] - self._all["lost"]
        if reference:
            figures["reference_kl"] = self.mean("reference")
        return figures

    def _scope(self, row: Mapping[str, float], histogram: list[float], greatest: float) -> dict[str, float]:
        tokens = row["tokens"]
        return {
            "mismatch_kl_k1": row["k1"] / tokens,
            "mismatch_kl_k3": row["k3"] / tokens,
            "ratio_mean": row["ratio"] / tokens,
            "ratio_max": greatest,
            "ratio_outside": row["outside"] / tokens,
            "ess_tokens": ess(row["ratio"], row["ratio_squared"]) / tokens,
            "logprob_diff_mean": row["difference"] / tokens,
            "logprob_diff_p99": _quantile(histogram, _P99),
        }


def _k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """[N]: k3 of `KL(q || p)` at tokens of q, `p/q - 1 - log(p/q)`. Source: Schulman, "Approximating KL divergence" (2020)."""
    log_r = log_ratio(log_p.double(), log_q.double())
    return torch.expm1(log_r) - log_r


def _quantile(histogram: list[float], share: float) -> float:
    """Upper edge of the bin that holds it: at most 14 % too great."""
    wanted, seen = share * sum(histogram), 0.0
    for place, count in enumerate(histogram):
        seen += count
        if seen >= wanted:
            return _upper_edge(place)
    return LOG_RATIO_BOUND


def _upper_edge(place: int) -> float:
    return _FINEST * math.pow(LOG_RATIO_BOUND / _FINEST, place / (_BINS - 1))


@functools.cache
def _edges(device: torch.device) -> Tensor:
    """Upper edges of all bins but the last."""
    return torch.tensor([_upper_edge(place) for place in range(_BINS - 1)], dtype=torch.float64, device=device)


@functools.cache
def _ages(device: torch.device) -> Tensor:
    return torch.tensor([bucket.least for bucket in AGE_BUCKETS], dtype=torch.int64, device=device)
