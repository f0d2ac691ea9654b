"""Living through a Redis that is away for a while, or comes back with less than it acknowledged."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocol.errors import LedgerRegressed, RedisUnavailable

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
_PAUSE_S = 0.5


async def through_outage(call: Callable[[], Awaitable[T]], *, deadline_s: float, forgotten: tuple[type[Exception], ...] = ()) -> T:
    """The result of `call`, which is asked again while Redis is away, and at once where it lost writes (rule R1), which a slot's owner is told only once: what
    that cost, the calls that follow tell, slot by slot. Only for calls that may be repeated, as all of the ledger's may, and that wait for nothing but Redis:
    the time counts from the first. `forgotten`: what a ledger also answers between its loss and the moment its trainer has told it again.

    Raises: `RedisUnavailable`, `LedgerRegressed`, or one of `forgotten`, once that has gone on for `deadline_s` seconds; with the first two the process then
    ends and is started again.
    """
    began, told = time.monotonic(), False
    mends: tuple[type[Exception], ...] = (RedisUnavailable, LedgerRegressed, *forgotten)
    while True:
        try:
            return await call()
        except mends as problem:
            away_s = time.monotonic() - began
            if away_s >= deadline_s:
                raise
            _LOG.warning("%s; asking again for %.0f s", problem, deadline_s - away_s)
            if isinstance(problem, LedgerRegressed) and not told:
                told = True
                continue
            await asyncio.sleep(_PAUSE_S * (0.5 + random.random()))
