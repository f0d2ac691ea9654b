"""Living through a Redis that is away for a while."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol.errors import RedisUnavailable

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.5


async def through_outage(call: Callable[[], Awaitable[T]], *, deadline_s: float) -> T:
    """The result of `call`, which is asked again while Redis is away. Only for calls that may be repeated, as all of the ledger's may.

    Raises: `RedisUnavailable` once Redis has been away for `deadline_s` seconds; the process then ends and is started again.
    """
    began = time.monotonic()
    while True:
        try:
            return await call()
        except RedisUnavailable as problem:
            away_s = time.monotonic() - began
            if away_s >= deadline_s:
                raise
            _LOG.warning("redis is away (%s); asking again for %.0f s", problem, deadline_s - away_s)
            await asyncio.sleep(_PAUSE_S * (0.5 + random.random()))
