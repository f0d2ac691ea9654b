"""Losses per token, pure functions; the [loss] section chooses one. A step's loss is the weighted sum over its tokens by its divisor (`loss.normaliser`).

Importing this package imports no torch; making a loss does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from consumer.losses.config import LossConfig

if TYPE_CHECKING:
    from consumer.losses.terms import Loss

__all__ = ["LossConfig", "make_loss"]


def make_loss(config: LossConfig) -> Loss:
    """The policy loss of `config.kind`, with the divergence from the reference and the entropy bonus where their weights are above 0.

    The result needs what `config.needs_*` say, and depends on nothing outside one rollout.
    """
    from consumer.losses.compose import compose

    return compose(config)
