"""The [trainer], [checkpoint] and [stop] sections, and the tree that `rl-trainer` reads. Other sections lie beside what they configure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import Field, model_validator

from buffer.config import BufferConfig
from consumer.advantages import ADVANTAGES
from consumer.critic.config import CriticConfig, check_critic
from consumer.kl_reward import check_kl_reward
from consumer.lora_rank import check_rank
from consumer.losses.config import LossConfig
from consumer.megatron.config import MegatronConfig
from consumer.trackers.config import TrackersConfig
from protocol.config import DataConfig, ModelConfig, PlacementConfig, RedisConfig, RolloutConfig, RunConfig, Section, Tree
from protocol.errors import ConfigError
from protocol.groups import TEACHER_BYTES, payload_bound
from protocol.messages import JsonValue
from weightsync.adapter_config import check_adapters
from weightsync.config import WeightsConfig
from weightsync.lora import LoraConfig
from weightsync.registry import ACK_ROUNDS

PUBLISH_S = 60.0
"""The first and the last version of a life may take so long to be visible."""
_OTHER_STOP_S = 120.0
"""Of a stop: the chunk under way, the checkpoint in flight and the last one, closing."""
_PLAIN_LOSS = LossConfig()
_OURS = ("torch", "megatron")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class TrainerConfig(Section):
    moved = MappingProxyType({"loss": "loss.kind", **{key: f"loss.{key}" for key in ("clip_low", "clip_high", "tv_threshold", "ratio_cap", "trust_pull")}})
    backend: str = Field(
        "torch", description="torch: transformers models; megatron: megatron-core, see [megatron]; or package.module:Class, a backend of your own."
    )
    ranks: int = Field(1, ge=1, description="Processes that train together, each on its share of every step. Under torchrun: as many as it starts.")
    advantage: str = Field(
        "group_std",
        description=f"{', '.join(ADVANTAGES)}; or package.module:function, one of your own. docs/advantages.md explains each.",
    )
    lr: float = Field(1e-6, gt=0, description="Learning rate after warm-up. Lower ends better, higher learns faster and forgets more under staleness.")
    warmup_steps: int = Field(10, ge=0, description="Steps, from the optimizer's first, over which the learning rate rises linearly to lr.")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="AdamW: decay of the first and second moment.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW: decoupled weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Upper bound of the gradient's norm.")
    micro_batch_tokens: int = Field(8192, ge=1, description="Tokens, padding included, of one forward and backward. Lower it when memory runs out.")
    packing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether the rollouts of a micro-batch lie end to end in one row, without padding. auto: on a GPU in bfloat16, if the model gives the same "
        "logprobs so, which is tried at the start; on: anywhere; off: rows padded to the longest, or shared by short siblings.",
    )
    cpu_offload: bool = Field(
        False,
        description="Weights and optimizer lie in host memory, where AdamW steps them, and only the layer at work on the device: less memory there, slower.",
    )
    torch_threads: int = Field(1, ge=1, description="Threads of one CPU operation. Replays are bitwise equal only at the same number.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the arithmetic; weights and optimizer stay float32.")
    head_float32: bool = Field(
        False, description="With dtype bfloat16: the last projection and the softmax in float32, nearer to the engine's logprobs, for some speed and memory."
    )
    activation_checkpointing: bool = Field(
        False, description="Keep only each layer's input for the backward pass and compute the rest again: less memory, about a third more arithmetic."
    )
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="cpu, cuda or cuda:N. For publishing, two more copies of the weights must fit there, with several ranks or cpu_offload into host memory.",
    )

    @model_validator(mode="after")
    def _backend_is_here(self) -> TrainerConfig:
        if self.backend not in _OURS and not _DOTTED.fullmatch(self.backend):
            raise ValueError(f"backend {self.backend!r}: expected torch, megatron, or package.module:Class for a backend of your own")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)}: each must be at least 0 and below 1")
        if self.advantage not in ADVANTAGES and not _DOTTED.fullmatch(self.advantage):
            raise ValueError(f"advantage {self.advantage!r}: expected {', '.join(ADVANTAGES)}, or package.module:function for one of your own")
        return self


class CheckpointConfig(Section):
    every_seconds: float = Field(600.0, ge=0, description="Seconds between two checkpoints; 0: not by time.")
    every_steps: int = Field(0, ge=0, description="Steps between two checkpoints; 0: not by steps.")
    keep: int = Field(2, ge=2, description="Newest checkpoints kept. Payloads stay until the oldest kept one covers them.")
    dir: str = Field("", description="Folder with a folder of checkpoints for each run, by its name. Default: checkpoint in run.dir.")

    def folder(self, run: RunConfig) -> Path:
        """This run's own: what the ledger does not keep is deleted there."""
        return Path(self.dir).absolute() / run.name if self.dir else run.folder / "checkpoint"


class StopConfig(Section):
    """The run ends at the first of these; a value of 0 never ends it. Counted over resumes."""

    steps: int = Field(0, ge=0, description="Optimizer steps.")
    tokens: int = Field(0, ge=0, description="Tokens that entered the loss.")
    reward: float = Field(0.0, description="Mean sampled reward of the last 20 steps; 0: not by reward.")
    seconds: float = Field(0.0, ge=0, description="Seconds of training.")


class TrainerDaemonConfig(Tree):
    """What `rl-trainer` reads. `check()` before anything is opened."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    weights: WeightsConfig = WeightsConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    critic: CriticConfig = CriticConfig()
    lora: LoraConfig = LoraConfig()
    megatron: MegatronConfig = MegatronConfig()
    trackers: TrackersConfig = TrackersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stop: StopConfig = StopConfig()
    placement: PlacementConfig = PlacementConfig()

    def check(self) -> None:
        """What no section can see alone; touches no socket and writes nothing.

        Raises: `ConfigError` naming the keys and what to do.
        """
        check_sections(buffer=self.buffer, weights=self.weights, rollout=self.rollout, checkpoint=self.checkpoint, loss=self.loss)
        self._check_training()
        check_layout(self.megatron, self.trainer)
        check_adapters(self.lora, self.weights, self.placement)
        check_turns(self.placement, self.buffer)
        check_ranks(self.placement, self.trainer.ranks)

    def check_alone(self) -> None:
        """As `check`, for what trains in this process without a run of its own: shadow, replay, recorded stream."""
        self._check_training()
        if self.trainer.backend == "megatron" and (needed := self.megatron.tp * self.megatron.pp) > 1:
            raise ConfigError(
                f"megatron.tp {self.megatron.tp} with megatron.pp {self.megatron.pp}: --shadow, --recorded and rollstream replay train in one process, and a "
                f"replica of the model needs {needed} ranks; set both to 1, or trainer.backend = torch, if the model fits"
            )

    def _check_training(self) -> None:
        check_loss(self.loss, self.rollout)
        check_critic(self.critic, self.trainer, self.loss)
        check_kl_reward(self.loss, self.trainer)
        check_trains(self.lora, self.trainer)
        self.trackers.check()
        check_model_folder(self.model_folder)
        check_rank(self.lora, self.model_folder)
        if self.critic.model_path:
            check_model_folder(Path(self.critic.model_path).absolute(), key="critic.model_path")

    def told(self) -> dict[str, JsonValue]:
        """What trackers say of the run beside its figures. Nothing that may hold a secret."""
        return {name: getattr(self, name).model_dump(mode="json") for name in ("rollout", "trainer", "loss", "critic", "lora")}

    @property
    def model_folder(self) -> Path:
        return Path(self.model.path).absolute()

    @property
    def checkpoint_folder(self) -> Path:
        return self.checkpoint.folder(self.run)


def check_sections(
    *, buffer: BufferConfig, weights: WeightsConfig, rollout: RolloutConfig, checkpoint: CheckpointConfig, loss: LossConfig = _PLAIN_LOSS
) -> None:
    """Cross-field rules S3 (what may be generated needs a version that is published) and P3 (the budget holds what must be kept). Raises: `ConfigError`."""
    if buffer.pipeline_depth == 0 and weights.publish_every > 1:
        raise ConfigError(
            f"buffer.pipeline_depth 0 with weights.publish_every {weights.publish_every}: on-policy groups need the weights of every step; "
            "set weights.publish_every = 1 or buffer.pipeline_depth above 0"
        )
    if weights.publish_every - 1 > buffer.max_staleness:
        raise ConfigError(
            f"weights.publish_every {weights.publish_every} with buffer.max_staleness {buffer.max_staleness}: between two versions everything that engines "
            "could generate is too old to train on, so the run would stand still; set weights.publish_every to at most buffer.max_staleness + 1"
        )
    needed = byte_budget_needed(buffer=buffer, rollout=rollout, checkpoint=checkpoint, loss=loss)
    if buffer.byte_budget < needed:
        steps, lower = "D + 1 + checkpoint.keep * interval + buffer.retention", "set buffer.spill, or lower checkpoint.every_steps"
        if buffer.spill:
            steps, lower = "D + 2", "or lower buffer.pipeline_depth"
        raise ConfigError(
            f"buffer.byte_budget {buffer.byte_budget} is too small: ({steps}) * B groups of up to {group_bytes(rollout, loss)} bytes need {needed}; "
            f"raise it, {lower}, buffer.groups_per_step or the limits of [rollout]"
        )


def check_loss(loss: LossConfig, rollout: RolloutConfig) -> None:
    """What [loss] asks of what is sampled. Raises: `ConfigError`."""
    if rollout.temperature == 0:
        raise ConfigError("rollout.temperature 0: greedy rollouts of a prompt are all alike and have no ratio to train on; use a temperature above 0")
    if loss.needs_teacher and rollout.temperature != 1:
        raise ConfigError(
            f"loss.kind {loss.kind} with rollout.temperature {rollout.temperature:g}: the policy is compared at that temperature with a teacher at 1; set "
            "rollout.temperature = 1, or use another kind"
        )


def check_layout(megatron: MegatronConfig, trainer: TrainerConfig) -> None:
    """Whether the ranks that are asked for fill the layout; torchrun starts as many as it likes. Raises: `ConfigError`."""
    if trainer.ranks > 1:
        replicas(megatron, trainer, trainer.ranks)


def replicas(megatron: MegatronConfig, trainer: TrainerConfig, ranks: int) -> int | None:
    """Of the model on so many ranks: how many shares of a chunk there are. None: only that backend knows. Raises: `ConfigError`."""
    if trainer.backend == "torch":
        return ranks
    if trainer.backend != "megatron":
        return None
    try:
        return megatron.data_parallel(ranks)
    except ValueError as problem:
        raise ConfigError(f"trainer.ranks: {problem}") from problem


def check_trains(lora: LoraConfig, trainer: TrainerConfig) -> None:
    """Whether this trainer can train an adapter. Raises: `ConfigError`."""
    if lora.rank and trainer.backend != "torch":
        raise ConfigError(
            f'lora.rank {lora.rank} with trainer.backend {trainer.backend}: adapters are trained by "torch" alone; set lora.rank = 0, or that backend'
        )


def check_turns(placement: PlacementConfig, buffer: BufferConfig) -> None:
    """While the trainer has the device nothing is generated, so there is nothing to run ahead with. Raises: `ConfigError`."""
    if placement.layout == "colocated" and buffer.pipeline_depth:
        raise ConfigError(
            f"placement.layout colocated with buffer.pipeline_depth {buffer.pipeline_depth:g}: trainer and engines take turns, so a step is generated, then "
            "trained; set buffer.pipeline_depth = 0, or another layout"
        )


def check_ranks(placement: PlacementConfig, ranks: int) -> None:
    """Whether several ranks can share a device with engines by turns: they cannot. Raises: `ConfigError`."""
    if placement.layout == "colocated" and ranks > 1:
        raise ConfigError("placement.layout colocated with several ranks of the trainer: none of them gives its device away; use another layout, or one rank")


def group_bytes(rollout: RolloutConfig, loss: LossConfig = _PLAIN_LOSS) -> int:
    """Upper bound of a group's payload by the token limits; what a producer reserves is never more."""
    extra = TEACHER_BYTES if loss.needs_teacher else 0
    return payload_bound(group_size=rollout.group_size, prompt_tokens=rollout.max_prompt_tokens, new_tokens=rollout.max_new_tokens, extra_bytes=extra)


def byte_budget_needed(*, buffer: BufferConfig, rollout: RolloutConfig, checkpoint: CheckpointConfig, loss: LossConfig = _PLAIN_LOSS) -> int:
    """The smallest budget that cannot stall the run (rule P3). Without an interval in steps the ledger asks for checkpoints as it fills up."""
    return buffer.least_byte_budget(group_bytes=group_bytes(rollout, loss), checkpoints_kept=checkpoint.keep, checkpoint_steps=checkpoint.every_steps or 1)


def stop_seconds(weights: WeightsConfig) -> float:
    """What a trainer may take from SIGTERM to its exit: publishing, the acks of all engines, checkpoints. Who stops it must not kill it sooner."""
    return PUBLISH_S + ACK_ROUNDS * weights.apply_deadline_s + _OTHER_STOP_S


def check_model_folder(folder: Path, *, key: str = "model.path") -> None:
    """What can be told of a model without loading it. Raises: `ConfigError` naming `key`."""
    if not folder.is_dir():
        raise ConfigError(f"{key} {folder}: no such folder; give a folder with config.json, tokenizer.json and safetensors weights")
    try:
        described = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{key} {folder}: config.json cannot be read ({problem}); give the folder of a Hugging Face causal LM") from problem
    if not isinstance(described, dict) or "model_type" not in described:
        raise ConfigError(f"{key} {folder}: config.json names no model_type; give the folder of a Hugging Face causal LM")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key} {folder}: has no *.safetensors file; save the starting weights there with save_pretrained")
