"""A policy and its critic as one backend: what the training loop, ranks and checkpoints see of `trainer.advantage` gae.

    accumulate   chunk ─► critic: advantages by token, its own gradient ─► policy: gradient
    finish_step  critic's optimizer, policy's optimizer

In the first `critic.warmup_steps` steps the policy is not asked for a gradient, and its step is that of a batch without tokens: it stays as it is, bit by bit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from consumer.advantages import moments, whiten
from consumer.backend import StepReport, TrainingState
from consumer.batch import ChunkBatch
from consumer.critic.config import CriticConfig
from consumer.critic.critic import Critic
from consumer.critic.value_backend import ValueBackend
from consumer.kl_penalty import KlPenalty
from consumer.losses import LossConfig
from consumer.token_advantages import flat_advantages, with_advantages
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError
from weightsync.snapshot import HeldWeights

if TYPE_CHECKING:
    from consumer.config import TrainerConfig


class ActorCritic:
    """See `consumer.backend.Backend`, `SharesDevice` and `KnowsDigest`. What is published and what the weights are known by is the policy's alone."""

    def __init__(self, policy: TorchBackend, critic: Critic, config: CriticConfig, penalty: KlPenalty) -> None:
        self._policy, self._critic, self._config, self._penalty = policy, critic, config, penalty
        critic.backend.passes = config.epochs
        self._held: list[ChunkBatch] = []
        """Of the step, where its advantages are compared with each other."""
        self.reads_its_part: bool = getattr(policy, "reads_its_part", False)
        """See `consumer.backend.ReadsItsPart`."""

    def accumulate(self, batch: ChunkBatch) -> None:
        judged = self._critic.accumulate(batch, self._penalty.of(batch))
        if self._critic.alone:
            return
        if self._config.whiten:
            self._held.append(judged)
        else:
            self._policy.accumulate(judged)

    def finish_step(self, step: int, divisor: float) -> StepReport:
        alone = self._critic.alone
        for batch in self._whitened():
            self._policy.accumulate(batch)
        figures = self._critic.finish_step(step) | self._penalty.finish_step()
        report = self._policy.finish_step(step, 0.0 if alone else divisor)
        self._held.clear()
        return dataclasses.replace(report, diagnostics={**report.diagnostics, **figures})

    def abandon_step(self) -> None:
        self._held.clear()
        self._penalty.abandon_step()
        self._critic.abandon_step()
        self._policy.abandon_step()

    def _whitened(self) -> list[ChunkBatch]:
        """What is held, with advantages of mean 0 and deviation 1 over the tokens of the step, of all ranks."""
        if not self._config.whiten or self._critic.alone:
            return []
        own = torch.from_numpy(moments(flat_advantages(self._held)))
        sums = self._critic.backend.total(own).numpy()
        return [with_advantages(batch, whiten(flat_advantages([batch]), sums)) for batch in self._held]

    # -- weights and state -------------------------------------------------------------------------------------------------------------------

    def snapshot(self) -> HeldWeights:
        return self._policy.snapshot()

    def digest(self) -> str:
        return self._policy.digest()

    def capture(self) -> TrainingState:
        return self._critic.capture(self._policy.capture())

    def restore(self, state: TrainingState) -> None:
        self._held.clear()
        self._penalty.abandon_step()
        self._critic.restore(state)
        self._policy.restore(dataclasses.replace(state, others={}))

    # -- turns on a device of several --------------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        self._critic.backend.offload()
        self._policy.offload()

    def onload(self) -> None:
        self._policy.onload()
        self._critic.backend.onload()


def with_critic(
    policy: object,
    model_path: Path,
    config: CriticConfig,
    trainer: TrainerConfig,
    *,
    seed: int,
    sharded: bool,
    shared: bool,
    kl_reward_coef: float = 0.0,
) -> ActorCritic:
    """`policy` beside a critic of its own. `trainer`: with the device of this rank; `sharded`, `shared`: as the policy; `kl_reward_coef`: as the policy's loss.

    Raises: `ConfigError` for a backend that cannot have one, a folder without a transformer, and a device that is not there.
    """
    if not isinstance(policy, TorchBackend):
        raise ConfigError(f"trainer.advantage gae with a {type(policy).__name__}: a critic runs beside the torch backend alone; set trainer.backend = torch")
    if config.device and sharded:
        raise ConfigError(
            f"critic.device {config.device} with several ranks or trainer.cpu_offload: the critic is sharded as the policy is; leave critic.device out"
        )
    device = torch.device(config.device or trainer.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"critic.device {device}: this host has {torch.cuda.device_count()} devices; name one that is there, or leave it out for the policy's"
        )
    changed = {
        "device": str(device),
        "lr": config.lr,
        "warmup_steps": config.lr_warmup_steps,
        "weight_decay": config.weight_decay,
        "grad_clip": config.grad_clip,
        "head_float32": True,
    }
    kind: type[ValueBackend] = ValueBackend
    if sharded:
        from consumer.critic.sharded import ShardedValueBackend  # DTensor: not every build of torch has it

        kind = ShardedValueBackend
    folder = Path(config.model_path).absolute() if config.model_path else model_path
    values = kind(folder, trainer.model_copy(update=changed), loss=LossConfig(), temperature=1.0, seed=seed, shared=shared and not config.device)
    return ActorCritic(policy, Critic(values, config), config, KlPenalty(policy, kl_reward_coef))
