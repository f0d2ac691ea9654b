"""A backend without a model, whose ranks wait for each other in a collective; one of them may raise before it gets there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch
from consumer.config import TrainerConfig
from consumer.losses import LossConfig
from weightsync.snapshot import TensorBytes

RAISES = "TEST_RANK_RAISES"
"""Set in the environment of the rank that raises at its fifth chunk, in step 3."""


class ReducingBackend:
    """Satisfies `consumer.backend.Backend`. Its weights are how many tokens it has seen, on all ranks."""

    def __init__(self, model_path: Path, config: TrainerConfig, *, loss: LossConfig, temperature: float, seed: int) -> None:
        self._seen, self._open, self._chunks = 0, 0, 0

    def accumulate(self, batch: ChunkBatch) -> None:
        self._chunks += 1
        if self._chunks == 5 and os.environ.get(RAISES):
            raise ValueError("no such luck here")
        tokens = torch.tensor(batch.tokens)
        dist.all_reduce(tokens)
        self._open += int(tokens)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        assert self._open == divisor, "every rank knows the whole step's divisor"
        self._seen += self._open
        self.abandon_step()
        return StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)

    def abandon_step(self) -> None:
        self._open = 0

    def snapshot(self) -> Mapping[str, TensorBytes]:
        return {"seen": TensorBytes(dtype="I64", shape=(1,), data=self._seen.to_bytes(8, "little"))}

    def capture(self) -> TrainingState:
        return TrainingState(weights=self.snapshot(), optimizer={}, rng={})

    def restore(self, state: TrainingState) -> None:
        self._seen = int.from_bytes(state.weights["seen"].data, "little")
