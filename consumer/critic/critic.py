"""The critic of a step: chunks go in with each rollout's reward, and come out with an advantage for each token; meanwhile it learns from them.

    chunk ─► micro-batches ─► values ─► returns, advantages ─► value loss ─► gradients add up │ … │ finish_step: AdamW, further passes
                                                 └───────────► chunk for the policy

One forward serves both: the values that advantages are made of are those before the step, and nothing moves before its end.
Invariant: a token's advantage depends on nothing outside its rollout, and the loss is a sum over tokens by the step's tokens: where the step is cut into
chunks, micro-batches and ranks changes either by rounding only.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from consumer.advantages import gae
from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch, MicroBatch
from consumer.critic.config import CriticConfig
from consumer.critic.value_backend import ValueBackend
from consumer.critic.value_loss import Sums, measure, nothing, value_loss
from consumer.packing import PackedBatch
from consumer.token_advantages import numbered, with_advantages

_GROUPS = {"weights": "critic", "optimizer": "critic_optimizer"}
"""Of its tensors in a checkpoint, beside the policy's."""


class _Lesson(NamedTuple):
    """A micro-batch, and what it teaches."""

    part: MicroBatch | PackedBatch
    before: Tensor
    """[N], values before the step."""
    returns: Tensor
    """[N]"""


class Critic:
    """OPEN: `accumulate(chunk)` any number of times → `finish_step` → OPEN; every rank calls both in the same order."""

    def __init__(self, backend: ValueBackend, config: CriticConfig) -> None:
        self.backend, self._config = backend, config
        self._sums = nothing(backend.device)
        self._lessons: list[_Lesson] = []
        """Of the step, where there are further passes."""
        self._alone: bool | None = None

    @property
    def alone(self) -> bool:
        """Whether the step under way is one in which the policy rests."""
        if self._alone is None:
            self._alone = self.backend.taken < self._config.warmup_steps * self._config.epochs
        return self._alone

    def accumulate(self, batch: ChunkBatch, penalties: NDArray[np.float64]) -> ChunkBatch:
        """Add the gradient of the chunk; `batch` with the advantages of its tokens, where it had the reward of their rollout.

        Shapes: penalties [N], what is taken off the reward of each of its tokens in the loss.
        """
        found = np.zeros(len(penalties))
        for part in self.backend.cut(numbered(batch)):
            values = self.backend.values(part)
            before = values.detach()
            found[part.age], returns = self._judged(part, before.double().cpu().numpy(), penalties[part.age])
            lesson = _Lesson(part, before, self.backend.tensor(returns.astype(np.float32)))
            self._sums = self._sums.to(self.backend.device) + self._learn(values, lesson)
            if self._config.epochs > 1:
                self._lessons.append(lesson)
        return with_advantages(batch, found)

    def finish_step(self, step: int) -> dict[str, float]:
        """Step the optimizer, once a pass; the figures of the step, by name. Without tokens the weights stay.

        Raises: `RollstreamError` for a gradient that is not finite.
        """
        alone, lessons = self.alone, list(self._lessons)
        sums = last = Sums(self.backend.total(self._sums))
        report = self.backend.finish_step(step, sums.tokens)
        for _ in range(1, self._config.epochs if sums.tokens else 1):
            again = nothing(self.backend.device)
            for lesson in lessons:
                again += self._learn(self.backend.values(lesson.part), lesson)
            last = Sums(self.backend.total(again))
            report = self.backend.finish_step(step, sums.tokens)
        self.abandon_step()
        return sums.figures() | _told(report, clipped=last.mean("clipped"), alone=alone)

    def abandon_step(self) -> None:
        """Forget what was accumulated."""
        self.backend.abandon_step()
        self._sums, self._alone = nothing(self.backend.device), None
        self._lessons.clear()

    # -- state -------------------------------------------------------------------------------------------------------------------------------

    def capture(self, policy: TrainingState) -> TrainingState:
        """The policy's, with everything that the critic's next step depends on."""
        own = self.backend.capture()
        others = {theirs: own.groups[ours] for ours, theirs in _GROUPS.items()}
        places = {theirs: own.places.get(ours, {}) for ours, theirs in _GROUPS.items()}
        return dataclasses.replace(policy, others={**policy.others, **others}, places={**policy.places, **places})

    def restore(self, state: TrainingState) -> None:
        """Raises: `RollstreamError` if it has no critic, or that of another model."""
        weights, optimizer = (state.others.get(name, {}) for name in _GROUPS.values())
        self.backend.restore(TrainingState(weights=weights, optimizer=optimizer, rng=state.rng))
        self.abandon_step()

    # -- parts -------------------------------------------------------------------------------------------------------------------------------

    def _judged(
        self, part: MicroBatch | PackedBatch, values: NDArray[np.float64], penalties: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Advantages for the policy and returns for the critic, [N] and [N] of the micro-batch's tokens."""
        rollouts = int(part.rollout[-1]) + 1 if len(part.rollout) else 0
        starts = np.searchsorted(part.rollout, np.arange(rollouts + 1))
        rewards = part.advantage[starts[:-1]].astype(np.float64)
        advantages, returns = gae(rewards, values, starts, gamma=self._config.gamma, lam=self._config.lam, penalties=penalties)
        if self._config.lam_policy:
            advantages, _ = gae(rewards, values, starts, gamma=self._config.gamma, lam=self._config.lam_policy, penalties=penalties)
        return advantages, returns

    def _learn(self, values: Tensor, lesson: _Lesson) -> Tensor:
        """Add the gradient; the sums of it."""
        told = value_loss(values, lesson.before, lesson.returns, clip=self._config.value_clip)
        told.loss.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
        return measure(values, lesson.returns, told)


def _told(report: StepReport, *, clipped: float, alone: bool) -> dict[str, float]:
    return {"value_clip_fraction": clipped, "critic_grad_norm": report.grad_norm, "critic_lr": report.lr, "critic_only": float(alone)}
