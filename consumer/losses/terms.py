"""What a loss is given and what it says: flat tensors of the N tokens of one micro-batch that enter the loss, masking already done.

Notation of the whole package: `pi` the policy being optimised (its log is `target`, which carries the gradient), `mu` the policy that sampled (`behaviour`),
`prox` the policy at the start of the step (`proximal`), `r = pi / mu`, `A` the advantage, `sg` stop-gradient.
Invariant: no loss depends on anything outside one rollout, so where a step is cut into chunks, micro-batches and ranks changes its sum by rounding only.
Invariant: values and gradients are finite for every logprob that is not NaN. The log of any ratio is held within ±20, and beyond it passes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: far outside any trust region, and far inside float32."""
LOGPROB_FLOOR = -1e4
"""Logprobs below count as this, so that the difference of two that are -inf is a number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """The tokens of whole rollouts; a rollout's tokens are adjacent and in order. N may be 0. A rollout is what the staleness guard left in of it."""

    target: Tensor
    """[N] log pi, float32, carries the gradient."""
    behaviour: Tensor
    """[N] log mu, of the engine."""
    proximal: Tensor
    """[N] log prox, without gradient. With one optimizer step per batch: `target.detach()`."""
    advantage: Tensor
    """[N]"""
    rollout: Tensor
    """[N] int64, ascending from 0: which rollout of the micro-batch."""
    age: Tensor
    """[N] int64, staleness in steps."""
    reference: Tensor | None = None
    """[N] log of the reference model, without gradient."""
    teacher: Tensor | None = None
    """[N] log of the teacher at the sampled token, without gradient."""
    entropy: Tensor | None = None
    """[N] nats; carries the gradient where an entropy bonus is wanted."""


class TokenLoss(NamedTuple):
    """What a loss says of each token."""

    loss: Tensor
    """[N], carries the gradient."""
    clipped: Tensor
    """[N] bool: clipping, truncation or masking changed this token's policy gradient."""
    ratio: Tensor
    """[N], r without gradient, whatever the loss weighs by."""


Loss: TypeAlias = Callable[[Terms], TokenLoss]


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`log(numerator / denominator)` of two logs, held within ±20; [N] to [N]."""
    return (_floor(numerator) - _floor(denominator)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def negative_log(target: Tensor) -> Tensor:
    """`-log pi`, finite; [N] to [N]."""
    return -_floor(target)


def rollout_sum(values: Tensor, rollout: Tensor) -> Tensor:
    """At every token the sum over its rollout, without gradient; [N] to [N] float64, so that the order of a device's additions hardly matters."""
    wide = values.detach().double()
    return torch.zeros_like(wide).index_add_(0, rollout, wide)[rollout]  # a micro-batch has at most N rollouts; counting them would wait for the device


def rollout_mean(values: Tensor, rollout: Tensor) -> Tensor:
    """At every token the mean over its rollout, without gradient; [N] to [N] float64."""
    return rollout_sum(values, rollout) / rollout_sum(torch.ones_like(values), rollout)


def _floor(logprob: Tensor) -> Tensor:
    return logprob.clamp(min=LOGPROB_FLOOR)
