"""The [critic] section. No torch here: what is wrong with it is said before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from consumer.losses.config import LossConfig
from protocol.config import Section
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from consumer.config import TrainerConfig

_NO_ADVANTAGE = frozenset({"sft", "distillation"})
GAE = "gae"
"""The advantage that needs a critic."""


class CriticConfig(Section):
    """Read with `trainer.advantage` gae alone. What is not here is as in [trainer]: arithmetic, micro-batches, recomputing, betas."""

    model_path: str = Field(
        "", description="Folder of the model whose transformer the critic starts from; a head of its own is put on top. Default: that of model.path."
    )
    device: str = Field(
        "", pattern=r"^(|cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N: a device of its own, for a trainer of one rank. Default: the policy's."
    )
    lr: float = Field(1e-5, gt=0, description="Learning rate after warm-up; a critic usually wants about ten times the policy's.")
    lr_warmup_steps: int = Field(10, ge=0, description="Steps over which it rises linearly to lr.")
    warmup_steps: int = Field(
        0, ge=0, description="Steps at the start in which the critic alone is trained: versions advance, weights stay. The policy's own warm-up follows."
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount of a token's successors.")
    lam: float = Field(1.0, ge=0, le=1, description="Decay of the advantage over tokens. 1: unbiased; lower: less noise, as far as the critic is right.")
    lam_policy: float = Field(0.0, ge=0, le=1, description="Another one for the policy's advantages, and lam for the critic's returns alone; 0: lam for both.")
    value_clip: float = Field(
        0.0, ge=0, description="A value may move so far within a step before it counts as wrong as if it had not moved; 0: as it likes. Needs epochs above 1."
    )
    epochs: int = Field(1, ge=1, description="Passes of the critic over a step's tokens, an optimizer step each. Above 1, they are kept until the step's end.")
    whiten: bool = Field(
        False, description="Bring the advantages of a step's tokens to mean 0 and deviation 1. The policy then trains when the last chunk has come."
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW: decoupled weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Upper bound of the norm of the critic's gradient.")


def check_critic(critic: CriticConfig, trainer: TrainerConfig, loss: LossConfig) -> None:
    """What [critic] and [trainer] ask of each other. A section without any key is as none. Raises: `ConfigError`."""
    if trainer.advantage != GAE:
        return
    if not critic.model_fields_set:
        raise ConfigError(
            "trainer.advantage gae trains a critic beside the policy, a second model of its size, and nothing is said of it in [critic]: set critic.lr (1e-5 "
            "is a start), or use an advantage without a critic, such as group_std"
        )
    if trainer.backend != "torch":
        raise ConfigError(
            f"trainer.advantage gae with trainer.backend {trainer.backend}: a critic runs beside the torch backend alone; set trainer.backend = torch, or use "
            "an advantage without a critic, such as group_std"
        )
    if loss.kind in _NO_ADVANTAGE:
        raise ConfigError(
            f"trainer.advantage gae with loss.kind {loss.kind}: it reads no advantage, so a critic would be trained for nothing; set trainer.advantage = none"
        )
    if critic.value_clip and critic.epochs == 1:
        raise ConfigError(
            f"critic.value_clip {critic.value_clip:g} with critic.epochs 1: in its first pass over a step no value has moved yet, so nothing would ever be "
            "clipped; set critic.epochs above 1, or critic.value_clip = 0"
        )
    if critic.device and trainer.ranks > 1:
        raise ConfigError(
            f"critic.device {critic.device} with trainer.ranks {trainer.ranks}: each has its shard of the critic on its own device; leave critic.device out"
        )
