"""What a run on several machines needs besides one on a single machine: everything it names must be the same thing from each of them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from deploy.config import UpConfig
from producer.ray_actor import LOOPBACK
from protocol.errors import ConfigError


def check_reach(config: UpConfig, addresses: Collection[str]) -> None:
    """`addresses`: of the cluster's nodes. What only looks shared (a path) cannot be told from here, and is for `docs/ray.md` to say.

    Raises: `ConfigError` naming the key.
    """
    if not config.redis.url:
        raise ConfigError("redis.url is empty: on Ray every node must reach the run's Redis; start one that they reach, and give its URL")
    if len(set(addresses)) < 2:
        return
    url = urlsplit(config.redis.url)
    if url.scheme == "unix" or url.hostname in LOOPBACK:
        raise ConfigError(f"redis.url {config.redis.url}: only one of the cluster's {len(set(addresses))} machines reaches it; give an address that all reach")
    if not config.weights.store:
        raise ConfigError(
            f"weights.store is empty, which is the memory of one machine, and the cluster has {len(set(addresses))}: give a folder that all of them share, or "
            "the URL of a store"
        )
