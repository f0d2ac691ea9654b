"""Connections to Redis: one way to make them, the checks a server must pass, and Lua scripts as objects.

Every operation we send is idempotent (by request id, slot token or step), so a reply that is lost with its connection is asked for again with backoff and
jitter until the deadline of the connection. Past it the caller gets `RedisUnavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis.asyncio as redis
from redis.asyncio.connection import Connection, UnixDomainSocketConnection, parse_url
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from protocol.cluster import Client
from protocol.errors import ConfigError, RedisUnavailable, RedisUnreachable, UnsafeRedis
from protocol.retry import ATTEMPT_S, CONNECTION_FAULTS, DeadlineRetry, refused
from protocol.slots import Address

__all__ = ["MIN_REDIS", "START_S", "Client", "Script", "ServerFacts", "asking", "check_server", "connect"]

MIN_REDIS = (7, 0)
START_S = 10.0
"""How long a starting process waits for its server: one that is being restarted is back by then, a wrong address is told soon."""
_NO_WRITES = ("MISCONF", "NOREPLICAS")
"""A server's words for: its disk or its replicas are in trouble, so it takes no writes now."""
_READ_BYTES = 1 << 18
"""Taken from a socket at a time: as much as uvloop reads at most. The 64 KiB of redis-py cost a payload of half a megabyte about a tenth more."""
_FSYNC = {"no": 0, "everysec": 1, "always": 2}


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
    """A client for `url` (`redis://`, `rediss://` or `unix://`): of that server, or of the cluster it is a node of. Opens no socket yet. Close it with
    `aclose()`.

    `deadline_s` bounds one command with all its retries, give or take one attempt; a blocking read must ask for less than it, or than 5 s. A command
    waits for a free connection where `max_connections`, a node's in a cluster, are busy.
    """
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"redis.url {url!r}: expected redis://host:port, rediss://host:port or unix:///path/to/socket")
    common: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": min(ATTEMPT_S, deadline_s),
        "socket_timeout": None,
        "max_connections": max_connections,
        "socket_read_size": _READ_BYTES,
    }
    try:
        of_url = dict(parse_url(url))
        pool = redis.BlockingConnectionPool(**(common | {"timeout": deadline_s, "retry": DeadlineRetry(deadline_s)} | of_url))
    except ValueError as problem:
        raise ConfigError(f"redis.url {url!r}: {problem}") from problem
    # A node is another server of the same kind. Its connections do not try again: the client does, perhaps at another node.
    attempt_s = max(ATTEMPT_S, deadline_s / 3)
    of_node = {name: value for name, value in of_url.items() if name not in ("host", "port", "path", "db")}
    if of_node.get("connection_class") is UnixDomainSocketConnection:
        of_node["connection_class"] = Connection

    def node_pool(address: Address) -> redis.ConnectionPool:
        own = {"host": address[0], "port": address[1], "timeout": None, "retry": DeadlineRetry(0.0, attempt_s=attempt_s)}
        return redis.BlockingConnectionPool(**(common | of_node | own))

    return Client(pool, node_pool=node_pool, host=str(of_url.get("host", "localhost")), deadline_s=deadline_s, attempt_s=attempt_s)


async def check_server(client: Client, *, url: str) -> ServerFacts:
    """Facts of the server, once it is known to be safe for a run; of a cluster, the worst of all its nodes.

    Raises: `RedisUnreachable` if it does not answer within `START_S`, or a master of its cluster does not; `UnsafeRedis` if it is too old or its
    `maxmemory-policy` can evict.
    """
    try:
        async with asyncio.timeout(START_S):
            masters, replicas = await client.members()
            told = [await _facts(node, url=url) for node in masters]
            for node in replicas:
                with contextlib.suppress(*CONNECTION_FAULTS):  # a replica that is away is for who runs the cluster to see
                    told.append(await _facts(node, url=url))
    except (TimeoutError, *CONNECTION_FAULTS) as problem:
        if refused(problem):
            raise ConfigError(f"redis.url {url}: {problem}; correct the user and password in redis.url") from problem
        seen = str(problem) or f"within {START_S:.0f} s"
        raise RedisUnreachable(f"redis.url {url}: no answer ({seen}); start Redis there (`rollstream redis`) or correct redis.url") from problem
    except RedisError as problem:
        raise UnsafeRedis(f"redis.url {url}: INFO or CONFIG GET was refused ({problem}); allow both for this user") from problem
    return min(told, key=lambda facts: (facts.appendonly, _FSYNC.get(facts.appendfsync, 0)))


async def _facts(node: redis.Redis, *, url: str) -> ServerFacts:
    info: dict[str, Any] = await node.info()
    config: dict[str | None, str | None] = {}
    for pattern in ("maxmemory-policy", "maxmemory", "appendonly", "appendfsync"):
        config |= await node.config_get(pattern)
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        raise UnsafeRedis(f"redis.url {url}: server {version} is older than {MIN_REDIS[0]}.{MIN_REDIS[1]}; upgrade it")
    policy = config.get("maxmemory-policy")
    if policy != "noeviction":
        raise UnsafeRedis(
            f"redis.url {url}: maxmemory-policy is {policy or 'not told'}, which may delete groups without a word; "
            "run `CONFIG SET maxmemory-policy noeviction` and write it into the server's configuration"
        )
    return ServerFacts(
        version=version,
        maxmemory_policy=policy,
        maxmemory_bytes=int(config.get("maxmemory") or 0),
        appendonly=config.get("appendonly") == "yes",
        appendfsync=config.get("appendfsync") or "",
        cluster=bool(info.get("cluster_enabled", 0)),
    )


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Around a command to Redis: whatever mends itself or is mended at the server comes out as `RedisUnavailable`.

    That is a connection that stays lost and a server that takes no writes now: at maxmemory, a replica after a failover, or in trouble with its disk.
    """
    try:
        yield
    except CONNECTION_FAULTS as problem:
        if refused(problem):
            raise ConfigError(f"{what}: {problem}; correct the user and password in redis.url") from problem
        raise RedisUnavailable(f"{what}: Redis did not answer in time ({problem})") from problem
    except OutOfMemoryError as problem:
        raise RedisUnavailable(f"{what}: Redis is at maxmemory; raise it, or lower buffer.byte_budget") from problem
    except ResponseError as problem:
        if isinstance(problem, ReadOnlyError) or str(problem).startswith(_NO_WRITES):
            raise RedisUnavailable(f"{what}: Redis takes no writes now ({problem})") from problem
        raise


class Script:
    """A Lua script: `await script(client, keys=[…], args=[…])`.

    Loaded by digest, sent whole when the server does not know it. The source is a file of a package, after the files of `prelude`. With an `epilogue` the
    file becomes the function `body()`, and the epilogue decides what to make of it.
    `flags` are the server's: "allow-oom" lets a script work at maxmemory, which is for those that free memory or add little and keep a daemon alive to free
    it (rule L1).
    Raises: `RedisUnavailable` once the client's retries are spent, or if the server takes no writes. Replies of the script itself are the caller's to read.
    """

    def __init__(self, package: str, name: str, *, prelude: Sequence[str] = (), epilogue: str = "", flags: str = "") -> None:
        folder = resources.files(package)
        self.name = name
        head = [f"#!lua flags={flags}"] if flags else []
        *before, own = ((folder / part).read_text("utf-8") for part in (*prelude, name))
        whole = [own] if not epilogue else ["local function body()", own, "end", (folder / epilogue).read_text("utf-8")]
        self.source = "\n".join((*head, *before, *whole))
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, client: Client, *, keys: Sequence[str], args: Sequence[str | int | float | bytes] = ()) -> Any:
        with asking(self.name):
            try:
                return await client.evalsha(self.sha, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
            except NoScriptError:
                return await client.eval(self.source, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
