"""What a run may ask of other backends, and not of this one. Imports neither torch nor megatron-core."""

from __future__ import annotations

from consumer.config import TrainerConfig
from protocol.errors import ConfigError


def check_options(config: TrainerConfig, *, shared: bool) -> None:
    """Raises: `ConfigError`: an option that would be passed over in silence."""
    if shared:
        raise ConfigError("placement.layout colocated: trainer.backend megatron does not give its device away; use trainer.backend torch, or another layout")
    if config.head_float32:
        raise ConfigError("trainer.head_float32: trainer.backend megatron computes its last projection in trainer.dtype; set it to false")
    if config.activation_checkpointing:
        raise ConfigError('trainer.activation_checkpointing: for trainer.backend megatron set megatron.recompute = "full" instead')
    if config.packing == "off":
        raise ConfigError("trainer.packing off: trainer.backend megatron trains on packed rows alone; leave it at auto")
    if config.cpu_offload:
        raise ConfigError(
            "trainer.cpu_offload: trainer.backend megatron keeps weights and optimizer on the device; set it to false, or raise megatron.tp or pp"
        )
