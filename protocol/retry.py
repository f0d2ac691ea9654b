"""How a command to Redis is asked again, and until when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

CONNECTION_FAULTS = (RedisConnectionError, RedisTimeoutError, OSError)
ATTEMPT_S = 5.0
"""An attempt to connect costs at most this, one to get a reply at least this or the deadline."""
_REFUSED = (AuthenticationError, AuthorizationError)
"""Connection errors of redis-py that no retry mends."""
_BASE_S, _CAP_S = 0.05, 1.0
T = TypeVar("T")


def refused(problem: BaseException) -> bool:
    """Whether the server answered and said no to this user, which no retry mends. redis-py wraps that answer while it connects."""
    return isinstance(problem, _REFUSED) or isinstance(problem.__cause__, _REFUSED)


def backoff_s(failures: int) -> float:
    """Full jitter after so many failures."""
    return random.uniform(0, min(_CAP_S, _BASE_S * 2 ** min(failures, 10)))


class DeadlineRetry(Retry):
    """Tries again with full jitter until a deadline, whatever an attempt costs: a refused socket in microseconds, a silent host in seconds.

    It also bounds each attempt, in place of redis-py's `socket_timeout`: that one sends through `asyncio.wait_for`, which before Python 3.12 swallows a
    cancellation that arrives as the send completes, and the command then waits for its reply for ever.
    """

    def __init__(self, deadline_s: float, *, attempt_s: float = 0.0) -> None:
        super().__init__(NoBackoff(), -1, supported_errors=(RedisConnectionError, RedisTimeoutError))
        self._deadline_s = deadline_s
        self._attempt_s = attempt_s or max(ATTEMPT_S, deadline_s)

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
                if left_s <= 0 or refused(error) or (is_retryable is not None and not is_retryable(error)):
                    raise
                await asyncio.sleep(min(left_s, backoff_s(failures)))

    async def _attempt(self, do: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._attempt_s):
                return await do()
        except TimeoutError as problem:
            raise RedisTimeoutError(f"no reply within {self._attempt_s:g} s") from problem
