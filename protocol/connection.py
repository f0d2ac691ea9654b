"""Connections to Redis: one way to make them, the checks a server must pass, and Lua scripts as objects.

Every operation we send is idempotent (by request id, slot token or step), so a reply that is lost with its connection is asked for again with backoff and
jitter until the deadline of the connection. Past it the caller gets `RedisUnavailable`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import BusyLoadingError, NoScriptError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import ConfigError, RedisUnavailable, UnsafeRedis

Client: TypeAlias = "redis.Redis"
MIN_REDIS = (7, 0)
_CONNECTION_FAULTS = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OSError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server at the other end is and how durable its writes are."""

    version: str
    maxmemory_policy: str
    maxmemory_bytes: int
    """0: no limit."""
    appendonly: bool
    appendfsync: str
    cluster: bool

    @property
    def durability(self) -> str:
        """For people: what a kill of the server costs."""
        if not self.appendonly:
            return "memory only: everything is lost with the server"
        return {"always": "every acknowledged write survives", "everysec": "up to a second of acknowledged writes may be lost"}.get(
            self.appendfsync, "as durable as the operating system decides"
        )


def connect(url: str, *, deadline_s: float = 30.0, max_connections: int = 64) -> Client:
    """A client for `url` (`redis://`, `rediss://` or `unix://`). Opens no socket yet. Close it with `aclose()`.

    `deadline_s` bounds the retries of one command (not a blocking read, which adds its own timeout).
    """
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"redis.url {url!r}: expected redis://host:port, rediss://host:port or unix:///path/to/socket")
    base_s, cap_s = 0.05, 1.0
    retries = 5 + max(0, int(deadline_s / cap_s))
    return redis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=5.0,
        socket_timeout=max(5.0, deadline_s),
        max_connections=max_connections,
        retry=Retry(ExponentialWithJitterBackoff(base=base_s, cap=cap_s), retries, supported_errors=_CONNECTION_FAULTS),
    )


async def check_server(client: Client, *, url: str) -> ServerFacts:
    """Facts of the server, once it is known to be safe for a run.

    Raises: `RedisUnavailable` if it does not answer; `UnsafeRedis` if it is too old or its `maxmemory-policy` can evict.
    """
    try:
        info: dict[str, Any] = await client.info()
        config: dict[str, str] = {}
        for pattern in ("maxmemory-policy", "maxmemory", "appendonly", "appendfsync"):
            config |= await client.config_get(pattern)
    except _CONNECTION_FAULTS as problem:
        raise RedisUnavailable(f"redis.url {url}: no answer ({problem}); start Redis there (`rollstream redis`) or correct redis.url") from problem
    except RedisError as problem:
        raise UnsafeRedis(f"redis.url {url}: INFO or CONFIG GET was refused ({problem}); allow both for this user") from problem
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        raise UnsafeRedis(f"redis.url {url}: server {version} is older than {MIN_REDIS[0]}.{MIN_REDIS[1]}; upgrade it")
    policy = config["maxmemory-policy"]
    if policy != "noeviction":
        raise UnsafeRedis(
            f"redis.url {url}: maxmemory-policy is {policy}, which deletes groups without a word; "
            "run `CONFIG SET maxmemory-policy noeviction` and write it into the server's configuration"
        )
    return ServerFacts(
        version=version,
        maxmemory_policy=policy,
        maxmemory_bytes=int(config["maxmemory"]),
        appendonly=config["appendonly"] == "yes",
        appendfsync=config["appendfsync"],
        cluster=bool(info.get("cluster_enabled", 0)),
    )


class Script:
    """A Lua script: `await script(client, keys=[…], args=[…])`.

    Loaded by digest, sent whole when the server does not know it. The source is a file of a package, after the files of `prelude`.
    Raises: `RedisUnavailable` once the client's retries are spent. Replies of the script itself are the caller's to read.
    """

    def __init__(self, package: str, name: str, *, prelude: Sequence[str] = ()) -> None:
        folder = resources.files(package)
        self.name = name
        self.source = "\n".join((folder / part).read_text("utf-8") for part in (*prelude, name))
        self._sha: str | None = None

    async def __call__(self, client: Client, *, keys: Sequence[str], args: Sequence[str | int | float | bytes] = ()) -> Any:

        if self._sha is None:
            self._sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        try:
            try:
                return await client.evalsha(self._sha, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
            except NoScriptError:
                return await client.eval(self.source, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
        except _CONNECTION_FAULTS as problem:
            raise RedisUnavailable(f"{self.name}: Redis did not answer in time ({problem})") from problem
