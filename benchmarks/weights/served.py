"""A weight server in a process of its own, there before anybody asks for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from benchmarks.weights.child import Child, Failed
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import WeightServerStatus
from protocol.presence import Presence

SERVED = ("nccl", "gloo", "ipc")
_START_S = 90.0


@contextlib.asynccontextmanager
async def weight_server(
    run: str, redis: str, weights: Mapping[str, Any], *, client: Client, log: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """While the context is open, for a transport that needs one; for others nothing. Raises: `Failed` if it does not announce itself."""
    if weights["transport"] not in SERVED:
        yield
        return
    about = {"run": {"name": run}, "redis": {"url": redis}, "weights": dict(weights)}
    child = await Child.start("weight server", ["benchmarks.weights.weight_server", orjson.dumps(about).decode()], log=log, env=env)
    try:
        members = Presence(client, Keys(run), "weight-server", WeightServerStatus)
        try:
            async with asyncio.timeout(_START_S):
                while not await members.members():  # noqa: ASYNC110 - announced in Redis, which says nothing by itself
                    await asyncio.sleep(0.1)
        except TimeoutError as problem:
            raise Failed(f"the weight server is not there after {_START_S:.0f} s: see {log}") from problem
        yield
    finally:
        await child.close(grace_s=5.0)
