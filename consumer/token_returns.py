"""REINFORCE++ over tokens, around the backend of a policy: what the training loop, ranks and checkpoints see of `trainer.advantage` reinforce_pp_tokens.

    accumulate   chunk ─► return of each token, kept
    finish_step  mean and deviation over the tokens of all ranks ─► chunks with their advantages ─► policy: gradient, optimizer

`A_t = (G_t - mean) / (std + 1e-4)`, `G_t = R - sum over i >= t of the penalty`, both over all tokens of the step that are in the loss.
Source: Hu et al., "REINFORCE++" (arXiv 2501.03262), equations 8 to 10. Without a penalty that is the form which popular code calls REINFORCE++: a rollout
counts in mean and deviation as often as it has tokens, while `reinforce_pp` counts every rollout once. verl discounts the sum by `algorithm.gamma`, by default
1 as in the paper and here.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from consumer.advantages import moments, whiten
from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch
from consumer.kl_penalty import KlPenalty
from consumer.kl_reward import TOKEN_RETURNS
from consumer.token_advantages import returns_to_go, with_advantages
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError
from weightsync.snapshot import HeldWeights


class TokenReturns:
    """See `consumer.backend.Backend`, `SharesDevice` and `KnowsDigest`. Advantages are made anew in each step: no state but the policy's."""

    def __init__(self, policy: TorchBackend, penalty: KlPenalty) -> None:
        self._policy, self._penalty = policy, penalty
        self._held: list[tuple[ChunkBatch, NDArray[np.float64]]] = []
        """Chunks of the step, and the return of each token."""
        self.reads_its_part: bool = getattr(policy, "reads_its_part", False)
        """See `consumer.backend.ReadsItsPart`."""

    def accumulate(self, batch: ChunkBatch) -> None:
        self._held.append((batch, returns_to_go(batch, self._penalty.of(batch))))

    def finish_step(self, step: int, divisor: float) -> StepReport:
        own = moments(np.concatenate([np.zeros(0), *(returns for _, returns in self._held)]))
        sums = self._policy.total(torch.from_numpy(own)).numpy()
        for batch, returns in self._held:
            self._policy.accumulate(with_advantages(batch, whiten(returns, sums)))
        self._held.clear()
        figures = self._penalty.finish_step()
        report = self._policy.finish_step(step, divisor)
        return dataclasses.replace(report, diagnostics={**report.diagnostics, **figures})

    def abandon_step(self) -> None:
        self._held.clear()
        self._penalty.abandon_step()
        self._policy.abandon_step()

    # -- weights, state, device: the policy's ------------------------------------------------------------------------------------------------

    def snapshot(self) -> HeldWeights:
        return self._policy.snapshot()

    def digest(self) -> str:
        return self._policy.digest()

    def capture(self) -> TrainingState:
        return self._policy.capture()

    def restore(self, state: TrainingState) -> None:
        self.abandon_step()
        self._policy.restore(state)

    def offload(self) -> None:
        self._policy.offload()

    def onload(self) -> None:
        self._policy.onload()


def with_token_returns(policy: object, kl_reward_coef: float) -> TokenReturns:
    """`policy` with advantages by token. Raises: `ConfigError` for a backend that cannot tell its tokens' logprobs."""
    if not isinstance(policy, TorchBackend):
        raise ConfigError(
            f"trainer.advantage {TOKEN_RETURNS} with a {type(policy).__name__}: advantages by token are made beside the torch backend alone; set "
            "trainer.backend = torch"
        )
    return TokenReturns(policy, KlPenalty(policy, kl_reward_coef))
