"""Deadlines handed down, and cleanup that ends before we do, also while we are being cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from protocol.errors import RollstreamError

_LOG = logging.getLogger(__name__)


async def finish(work: Coroutine[Any, Any, None] | asyncio.Task[None], *, limit_s: float) -> None:
    """`work` runs to its end, or for `limit_s` and is cancelled then; a cancellation of the caller is raised only after that, and never lost.

    A failure that belongs to the error tree is logged: there is nobody left to act on it. Any other is a bug.

    Raises: `CancelledError` if the caller was cancelled meanwhile; otherwise a failure of `work` outside the error tree.
    """
    task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work, name="finish:cleanup")
    end, interrupted = time.monotonic() + limit_s, False
    while not task.done() and (left_s := left(end)) > 0:
        try:
            await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError:
            interrupted = True
    if not task.done():
        _LOG.warning("%s was not done within %.1f s: given up", task.get_name(), limit_s)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, RollstreamError):
        _LOG.warning("%s: %s", task.get_name(), outcome)
    elif isinstance(outcome, Exception):
        if not interrupted:
            raise outcome
        _LOG.error("%s failed", task.get_name(), exc_info=outcome)
    if interrupted:
        raise asyncio.CancelledError


def left(end: float) -> float:
    """Seconds until `end`, a moment of the monotonic clock; below zero past it."""
    return end - time.monotonic()
