"""An adapter on several ranks."""

from __future__ import annotations

from consumer.lora_backend import LoraBackend
from consumer.ranks.sharded import ShardedBackend


class ShardedLoraBackend(ShardedBackend, LoraBackend):
    """A `LoraBackend` cut over the ranks as `ShardedBackend` cuts a model: the frozen weights too, which have no gradients to reduce and no moments."""
