"""What [lora] asks of other sections."""

from __future__ import annotations

from protocol.config import PlacementConfig
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig, is_url
from weightsync.lora import LoraConfig


def check_adapters(lora: LoraConfig, weights: WeightsConfig, placement: PlacementConfig) -> None:
    """Whether versions can be adapters. Raises: `ConfigError` naming the keys."""
    if not lora.adapters:
        return
    if weights.transport != "store" or is_url(weights.store):
        where = f"weights.store {weights.store}" if is_url(weights.store) else f'weights.transport "{weights.transport}"'
        raise ConfigError(
            f'lora.publish "adapter" with {where}: engines load adapters from a folder that they and the trainer see; set weights.transport = "store" and a '
            'folder, or lora.publish = "merged"'
        )
    if placement.layout == "colocated":
        raise ConfigError(
            'lora.publish "adapter" with placement.layout colocated: an engine that freed its memory has lost the weights under the adapter; set '
            'lora.publish = "merged", or another layout'
        )
