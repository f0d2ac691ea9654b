"""The critic on several ranks."""

from __future__ import annotations

from consumer.critic.value_backend import ValueBackend
from consumer.ranks.sharded import ShardedBackend


class ShardedValueBackend(ShardedBackend, ValueBackend):
    """A `ValueBackend` cut over the ranks as `ShardedBackend` cuts the policy: the same values, returns and steps but for rounding."""
