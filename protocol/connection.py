"""Connections to Redis: one way to make them, the checks a server must pass, and Lua scripts as objects.

Every operation we send is idempotent (by request id, slot token or step), so a reply that is lost with its connection is asked for again with backoff and
jitter until the deadline of the connection. Past it the caller gets `RedisUnavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias, TypeVar

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import ConfigError, RedisUnavailable, RedisUnreachable, UnsafeRedis

Client: TypeAlias = "redis.Redis"
MIN_REDIS = (7, 0)
START_S = 10.0
"""How long a starting process waits for its server: one that is being restarted is back by then, a wrong address is told soon."""
_REFUSED = (AuthenticationError, AuthorizationError)
"""Connection errors of redis-py that no retry mends."""
_CONNECTION_FAULTS = (RedisConnectionError, RedisTimeoutError, OSError)
_NO_WRITES = ("MISCONF", "NOREPLICAS")
"""A server's words for: its disk or its replicas are in trouble, so it takes no writes now."""
_BASE_S, _CAP_S = 0.05, 1.0
_ATTEMPT_S = 5.0
"""An attempt to connect costs at most this, one to get a reply at least this or the deadline."""
T = TypeVar("T")


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


def _refused(problem: BaseException) -> bool:
    """Whether the server answered and said no to this user, which no retry mends. redis-py wraps that answer while it connects."""
    return isinstance(problem, _REFUSED) or isinstance(problem.__cause__, _REFUSED)


class DeadlineRetry(Retry):
    """Tries again with full jitter until a deadline, whatever an attempt costs: a refused socket in microseconds, a silent host in seconds.

    It also bounds each attempt, in place of redis-py's `socket_timeout`: that one sends through `asyncio.wait_for`, which before Python 3.12 swallows a
    cancellation that arrives as the send completes, and the command then waits for its reply for ever.
    """

    def __init__(self, deadline_s: float) -> None:
        super().__init__(NoBackoff(), -1, supported_errors=(RedisConnectionError, RedisTimeoutError))
        self._deadline_s = deadline_s
        self._attempt_s = max(_ATTEMPT_S, deadline_s)

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """`do()` until it succeeds; `fail(error)` after each failure, as redis-py wants it."""
        clock = asyncio.get_running_loop().time
        until, failures = clock() + self._deadline_s, 0
        while True:
            try:
                return await self._attempt(do)
            except self._supported_errors as error:
                failures += 1
                await (fail(error, failures) if with_failure_count else fail(error))
                left_s = until - clock()
                if left_s <= 0 or _refused(error) or (is_retryable is not None and not is_retryable(error)):
                    raise
                await asyncio.sleep(min(left_s, random.uniform(0, min(_CAP_S, _BASE_S * 2**failures))))

    async def _attempt(self, do: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._attempt_s):
                return await do()
        except TimeoutError as problem:
            raise RedisTimeoutError(f"no reply within {self._attempt_s:g} s") from problem


def connect(url: str, *, deadline_s: float = 30.0, max_connections: int = 64) -> Client:
    """A client for `url` (`redis://`, `rediss://` or `unix://`). Opens no socket yet. Close it with `aclose()`.

    `deadline_s` bounds one command with all its retries, give or take one attempt; a blocking read must ask for less than it, or than 5 s. A command
    waits for a free connection where `max_connections` are busy.
    """
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"redis.url {url!r}: expected redis://host:port, rediss://host:port or unix:///path/to/socket")
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            protocol=2,
            decode_responses=False,
            socket_connect_timeout=min(_ATTEMPT_S, deadline_s),
            socket_timeout=None,
            max_connections=max_connections,
            timeout=deadline_s,
            retry=DeadlineRetry(deadline_s),
        )
    except ValueError as problem:
        raise ConfigError(f"redis.url {url!r}: {problem}") from problem
    return redis.Redis.from_pool(pool)


async def check_server(client: Client, *, url: str) -> ServerFacts:
    """Facts of the server, once it is known to be safe for a run.

    Raises: `RedisUnreachable` if it does not answer within `START_S`; `UnsafeRedis` if it is too old or its `maxmemory-policy` can evict.
    """
    try:
        async with asyncio.timeout(START_S):
            info: dict[str, Any] = await client.info()
            config: dict[str | None, str | None] = {}
            for pattern in ("maxmemory-policy", "maxmemory", "appendonly", "appendfsync"):
                config |= await client.config_get(pattern)
    except (TimeoutError, *_CONNECTION_FAULTS) as problem:
        if _refused(problem):
            raise ConfigError(f"redis.url {url}: {problem}; correct the user and password in redis.url") from problem
        seen = str(problem) or f"within {START_S:.0f} s"
        raise RedisUnreachable(f"redis.url {url}: no answer ({seen}); start Redis there (`rollstream redis`) or correct redis.url") from problem
    except RedisError as problem:
        raise UnsafeRedis(f"redis.url {url}: INFO or CONFIG GET was refused ({problem}); allow both for this user") from problem
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
    except _CONNECTION_FAULTS as problem:
        if _refused(problem):
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

    Loaded by digest, sent whole when the server does not know it. The source is a file of a package, after the files of `prelude`.
    `flags` are the server's: "allow-oom" lets a script work at maxmemory, which is for those that free memory or add little and keep a daemon alive to free
    it (rule L1).
    Raises: `RedisUnavailable` once the client's retries are spent, or if the server takes no writes. Replies of the script itself are the caller's to read.
    """

    def __init__(self, package: str, name: str, *, prelude: Sequence[str] = (), flags: str = "") -> None:
        folder = resources.files(package)
        self.name = name
        head = [f"#!lua flags={flags}"] if flags else []
        self.source = "\n".join((*head, *((folder / part).read_text("utf-8") for part in (*prelude, name))))
        self._sha: str | None = None

    async def __call__(self, client: Client, *, keys: Sequence[str], args: Sequence[str | int | float | bytes] = ()) -> Any:
        if self._sha is None:
            self._sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        with asking(self.name):
            try:
                return await client.evalsha(self._sha, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
            except NoScriptError:
                return await client.eval(self.source, len(keys), *keys, *args)  # type: ignore[no-untyped-call, unused-ignore]
