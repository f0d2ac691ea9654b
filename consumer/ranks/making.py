"""The backend of a process as its configuration says, alone or as one rank of several. Imports torch when it is called."""

from __future__ import annotations

from typing import Any, cast

from buffer.shares import Share
from consumer.backend import Backend, BackendFactory, find_backend
from consumer.config import TrainerDaemonConfig, check_loss, check_trains
from consumer.critic.config import GAE, check_critic
from consumer.kl_reward import TOKEN_RETURNS, check_kl_reward
from consumer.ranks.place import Place


def make_backend(config: TrainerDaemonConfig, place: Place | None = None) -> Backend:
    """In the thread that will train; of several ranks, once their process group is there. Takes seconds. Raises: `ConfigError`."""
    trainer, options = config.trainer, dict[str, Any]()
    check_critic(config.critic, trainer, config.loss)
    check_kl_reward(config.loss, trainer)
    check_loss(config.loss, config.rollout)
    if config.placement.layout == "colocated":
        options["shared"] = True
    if trainer.backend == "megatron":
        options["megatron"] = config.megatron
    factory = find_backend(trainer.backend)
    if config.lora.rank:
        from consumer.lora_backend import LoraBackend

        check_trains(config.lora, trainer)
        factory, options["lora"] = cast("BackendFactory", LoraBackend), config.lora
    if place is not None:
        from consumer.ranks.process_group import device_of

        trainer = trainer.model_copy(update={"device": str(device_of(place, trainer.device))})
    if trainer.backend == "torch" and (place is not None or trainer.cpu_offload):
        from consumer.ranks.process_group import join_alone
        from consumer.ranks.sharded import ShardedBackend
        from consumer.ranks.sharded_lora import ShardedLoraBackend

        factory = cast("BackendFactory", ShardedLoraBackend if config.lora.rank else ShardedBackend)
        if place is None:
            join_alone(trainer.device)
    backend = factory(config.model_folder, trainer, loss=config.loss, temperature=config.rollout.temperature, seed=config.run.seed, **options)
    if trainer.advantage == TOKEN_RETURNS:
        from consumer.token_returns import with_token_returns

        return with_token_returns(backend, config.loss.kl_reward_coef)
    if trainer.advantage != GAE:
        return backend
    from consumer.critic.actor_critic import with_critic

    shared, sharded = config.placement.layout == "colocated", place is not None or trainer.cpu_offload
    penalty = config.loss.kl_reward_coef
    return with_critic(backend, config.model_folder, config.critic, trainer, seed=config.run.seed, sharded=sharded, shared=shared, kl_reward_coef=penalty)


def share_of(backend: Backend, place: Place) -> Share:
    """The rank's part of every chunk: its own, or that of the replica of the model that it holds a piece of."""
    replica = getattr(backend, "replica", None)
    return place.share if replica is None else Share(*replica)
