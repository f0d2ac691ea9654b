"""The penalty of `consumer.kl_reward`, asked of the policy's backend chunk by chunk."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.batch import ChunkBatch
from consumer.kl_reward import divergence_figures, divergence_sums
from consumer.token_advantages import rollouts_of, token_count
from consumer.torch_backend import TorchBackend


class KlPenalty:
    """OPEN: `of(chunk)` any number of times → `finish_step` or `abandon_step` → OPEN; every rank calls all of them in the same order."""

    def __init__(self, policy: TorchBackend, coef: float) -> None:
        """`coef` 0: no penalty, and no reference model."""
        self._policy, self._coef = policy, coef
        self.abandon_step()

    def of(self, batch: ChunkBatch) -> NDArray[np.float64]:
        """[N]: what is taken off the reward of each of the chunk's tokens in the loss. The weights must be those before the step."""
        if not self._coef:
            return np.zeros(token_count(batch))
        away = self._policy.against_reference(batch)
        self._sums += divergence_sums(away, rollouts_of(batch)[1])
        return self._coef * away

    def finish_step(self) -> dict[str, float]:
        """The step's figures, of all ranks."""
        if not self._coef:
            return {}
        sums = self._policy.total(torch.from_numpy(self._sums)).numpy()
        self.abandon_step()
        return divergence_figures(sums, self._coef)

    def abandon_step(self) -> None:
        self._sums = np.zeros(4)
