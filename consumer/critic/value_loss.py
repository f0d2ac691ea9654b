"""What a critic is trained by, and how well it does: pure functions on the N tokens of a micro-batch, and sums that add up over micro-batches and ranks.

Notation: `V` the value being trained, which carries the gradient; `V_0` the same before the step; `R` the return, what V is to become.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_COLUMNS = ("tokens", "value", "return", "return_squared", "error", "error_squared", "loss", "clipped")
_NOISE = 2.0**-44
"""A variance below this share of the mean square is what rounding leaves of equal numbers."""


class ValueLoss(NamedTuple):
    """What the loss says of each token."""

    loss: Tensor
    """[N], carries the gradient."""
    clipped: Tensor
    """[N] bool: clipping took this token's gradient."""


def value_loss(values: Tensor, before: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """`max((V - R)^2, (V_0 + clamp(V - V_0, -clip, clip) - R)^2) / 2`; without `clip` (0) `(V - R)^2 / 2`.

    A value that has come more than `clip` nearer to its return than it was has no gradient any more; one that went away from it keeps its own.
    Shapes: all [N] float; `before` and `returns` without gradient. Sums of it by the step's tokens do not depend on where the step is cut.
    Source: Schulman et al., PPO (arXiv 1707.06347) as in OpenAI's baselines (`ppo2`); the paper itself has the plain square. Popular code takes this maximum
    too; some of it leaves out the half, which only moves the bound of the gradient's norm.
    """
    plain = (values - returns).square()
    if not clip:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    held = (before + (values - before).clamp(-clip, clip) - returns).square()
    return ValueLoss(torch.maximum(plain, held) / 2, ((values - before).abs() > clip) & (held > plain))


@torch.no_grad()
def measure(values: Tensor, returns: Tensor, told: ValueLoss) -> Tensor:
    """Sums over the N tokens, [8] float64, on their device; waits for nothing there."""
    wide, target = values.double(), returns.double()
    error = target - wide
    rows = (torch.ones_like(wide), wide, target, target.square(), error, error.square(), told.loss.double(), told.clipped.double())
    return torch.stack([row.sum() for row in rows])


def nothing(device: torch.device) -> Tensor:
    """The sums of no tokens."""
    return torch.zeros(len(_COLUMNS), dtype=torch.float64, device=device)


class Sums:
    """Of all tokens of a step."""

    def __init__(self, sums: Tensor) -> None:
        self._sums: dict[str, float] = dict(zip(_COLUMNS, sums.tolist(), strict=True))

    @property
    def tokens(self) -> int:
        return round(self._sums["tokens"])

    def mean(self, name: str) -> float:
        return self._sums[name] / max(1, self.tokens)

    def figures(self) -> dict[str, float]:
        """By name, see `consumer.metric_names`; none of no tokens."""
        if not self.tokens:
            return {}
        figures = {"value_loss": self.mean("loss"), "value_mean": self.mean("value"), "return_mean": self.mean("return")}
        spread = self.mean("return_squared") - self.mean("return") ** 2
        if spread > _NOISE * self.mean("return_squared"):
            figures["value_explained_variance"] = 1 - (self.mean("error_squared") - self.mean("error") ** 2) / spread
        return figures
