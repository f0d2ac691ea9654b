"""Work that is cut short by an event."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, object], *, name: str) -> None:
    """Run `work` to its end, or cancel it when `event` is set, and wait until it has cleaned up."""
    task = asyncio.create_task(work, name=name)
    stopped = asyncio.create_task(event.wait(), name=f"{name}-stop")
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.wait((task, stopped))
    if not task.cancelled():
        task.result()
