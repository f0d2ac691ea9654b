"""Which version an evaluation is of, and who serves it.

    shared engines     the newest that one of them serves when it begins, or newer: they go on with the run, and the record tells what they did meanwhile
    a fleet of its own the newest that is published when it begins, and nothing else: its engines are asked for it and stay there (`weightsync.aim`)

An exact pin on shared engines would mean to hold them back, that is, to let training wait; so there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from buffer.contract import Ledger
from producer.held_out import Demand
from producer.outage import through_outage
from producer.pool import EnginePool
from protocol.connection import Client
from protocol.errors import DecodeError
from protocol.keys import Keys
from protocol.versions import Lineage, Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups
from weightsync.aim import EVAL_FLEET, Aim
from weightsync.channel import Channel
from weightsync.pointer import Pointer
from weightsync.registry import Registry


class Pinning:
    """One process's way to a version of a run. `separate`: the run has engines that only evaluate."""

    def __init__(
        self, client: Client, keys: Keys, *, holder: str, ledger: Ledger, pool: EnginePool, wakeups: Wakeups, separate: bool, redis_deadline_s: float
    ) -> None:
        self.separate = separate
        self._registry, self._channel, self._aim = Registry(client, keys), Channel(client, keys), Aim(client, keys)
        self._pointer = Pointer(client, keys, f"eval/{holder}")
        self._ledger, self._pool, self._wakeups, self._deadline_s = ledger, pool, wakeups, redis_deadline_s

    async def shared(self, version: Version | None = None) -> Demand:
        """A demand on the engines of the run once one of them can meet it: `version` or newer; None: the newest that one serves now."""
        self._pool.release(await self._pool.acquire(version), answered=False)
        return Demand(version=version or await through_outage(self._served, deadline_s=self._deadline_s))

    async def _served(self) -> Version | None:
        engines, status = await self._registry.routable(), await self._ledger.status()
        return max((one.version for one in engines if one.version and one.fleet != EVAL_FLEET and _on_line(status.lineage, one.version)), default=None)

    async def newest(self) -> Version:
        """The newest published version on the line of the run; waits for the first."""
        while True:
            mark = self._wakeups.mark(Topic.WEIGHTS)
            version = await through_outage(self._channel.newest_version, deadline_s=self._deadline_s)
            if version is not None:
                return version
            await self._wakeups.wait(Topic.WEIGHTS, since=mark, timeout_s=RECHECK_S)

    @contextlib.asynccontextmanager
    async def pinned(self, version: Version, *, within_s: float) -> AsyncIterator[Demand]:
        """A demand that engines of the evaluation's own meet: from when the first of them serves `version` to the end of the context they serve nothing else.
        Its files stay meanwhile, so that an engine that starts again comes back to it.

        Raises: `VersionGone` if it is not kept any more; `TimeoutError` if no engine serves it `within_s`.
        """
        async with self._pointer.holding(version):
            await through_outage(lambda: self._aim.ask(version), deadline_s=self._deadline_s)
            async with asyncio.timeout(within_s):
                await self._arrived(version)
            yield Demand(version=version, pinned=True, fleet=EVAL_FLEET)

    async def _arrived(self, version: Version) -> None:
        """Return once an engine of the evaluation's own serves `version`, as the pool knows it."""
        while True:
            mark = self._wakeups.mark(Topic.ENGINES)
            seat = await self._pool.acquire(None, exact=version, fleet=EVAL_FLEET)
            self._pool.release(seat, answered=False)
            if seat.engine.fleet == EVAL_FLEET:
                return
            await self._wakeups.wait(Topic.ENGINES, since=mark, timeout_s=RECHECK_S)

    async def starting(self, newest: Version) -> Version:
        """Version 0 of the incarnation of `newest`, if it is kept; else `newest`."""
        start = Version(newest.incarnation, 0)
        versions = await through_outage(self._channel.versions, deadline_s=self._deadline_s)
        return start if start in versions else newest


def _on_line(lineage: Lineage, version: Version) -> bool:
    try:
        return lineage.contains(version)
    except DecodeError:  # an engine that knows of a newer attachment than the ledger told us
        return False
