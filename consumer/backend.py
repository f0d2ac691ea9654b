"""What the trainer asks of a backend, whatever holds the model. Every call comes from one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from consumer.batch import ChunkBatch
from weightsync.snapshot import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step, averaged over the tokens that entered the loss; all 0 for a step without any."""

    loss: float
    grad_norm: float
    """Before clipping."""
    lr: float
    entropy: float
    """nats"""
    clip_fraction: float
    """Share of tokens that clipping or the trust region took out."""
    ratio_dev: float
    """Mean of |r - 1|, r the ratio to the behaviour policy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingState:
    """Everything that the next step depends on, copied: training goes on while it is written."""

    weights: Mapping[str, TensorBytes]
    optimizer: Mapping[str, TensorBytes]
    """`exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, `step.<parameter>`."""
    rng: Mapping[str, bytes]


class Backend(Protocol):
    """OPEN: `accumulate(chunk)` any number of times → `finish_step` → OPEN.

    Invariant: chunks of one step, in order, give the gradient of the whole step; where the step is cut changes it by rounding only, and the same chunks
    give the same weights bit by bit (CPU, same number of threads).
    """

    def accumulate(self, batch: ChunkBatch) -> None:
        """Add the gradient of the chunk's summed token losses."""

    def finish_step(self, step: int, tokens: int) -> StepReport:
        """Divide by `tokens`, the whole step's tokens in the loss, clip, and step the optimizer. No tokens: the weights stay."""

    def abandon_step(self) -> None:
        """Forget what was accumulated."""

    def snapshot(self) -> Mapping[str, TensorBytes]:
        """A consistent copy of the weights by Hugging Face name, tied weights once."""

    def capture(self) -> TrainingState:
        """A copy of everything. Only between steps."""

    def restore(self, state: TrainingState) -> None:
        """Continue from `state`. Raises: `RollstreamError` if it belongs to another model."""
