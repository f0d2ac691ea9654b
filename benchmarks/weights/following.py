"""An engine with its registration, heartbeat and reconciler, as an engine host has them, for an engine that runs elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from protocol.audit import event
from protocol.config import RunConfig
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.control import EngineControl
from weightsync.reconciler import Reconciler
from weightsync.registry import BEAT_S, Registry
from weightsync.store import open_store
from weightsync.transports.choose import make_transports


class Following:
    """Keeps the engine at the newest version while the context is open."""

    def __init__(
        self,
        run: str,
        name: str,
        boot_nonce: str,
        url: str,
        *,
        client: Client,
        waker: Wakeups,
        session: aiohttp.ClientSession,
        config: WeightsConfig,
        kind: str,
        ranks: int = 1,
    ) -> None:
        keys, about, self.id = Keys(run), RunConfig(name=run), EngineId(name)
        self._client, self._keys, self._waker = client, keys, waker
        self._registry = Registry(client, keys)
        self._status = EngineStatus(
            engine_id=self.id, boot_nonce=boot_nonce, url=url, kind=kind, state=EngineState.STARTING, host=socket.gethostname(), pid=os.getpid()
        )
        control = EngineControl(session, url)
        self._transports = make_transports(
            config,
            store=open_store(config, about),
            control=control,
            session=session,
            client=client,
            keys=keys,
            engine_id=self.id,
            boot_nonce=boot_nonce,
            folder=relay_folder(config, about),
            ranks=ranks,
        )
        self._reconciler = Reconciler(
            self.id,
            boot_nonce,
            control=control,
            channel=Channel(client, keys),
            registry=self._registry,
            transports=self._transports,
            config=config,
            wakeups=waker,
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._registry.beat(self._status)
        self._tasks = [
            asyncio.create_task(self._beat(), name=f"{self.id}:beat"),
            asyncio.create_task(self._reconciler.run(), name=f"{self.id}:reconciler"),
        ]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        with contextlib.suppress(Exception):  # the next row has a run of its own
            await self._registry.leave(self.id, self._status.boot_nonce)

    @property
    def problem(self) -> str:
        """Why its fast way was left; empty while that works."""
        return self._transports.problem

    async def serves(self, version: Version, *, deadline_s: float) -> float:
        """`time.monotonic()` of when the registry first says that this engine serves `version` or a newer one.

        Raises: `TimeoutError` with what it is waiting for; what ended its reconciler.
        """
        end = time.monotonic() + deadline_s
        while True:
            mark = self._waker.mark(Topic.ENGINES)
            for task in self._tasks:
                if task.done():
                    task.result()
            found = next((one for one in await self._registry.engines() if one.engine_id == self.id), None)
            if found is not None and found.state is EngineState.ROUTABLE and found.version is not None and found.version >= version:
                return time.monotonic()
            if time.monotonic() > end:
                trouble = self._reconciler.totals.trouble or (found.reason if found else "it is not registered")
                raise TimeoutError(f"{self.id} does not serve {version} after {deadline_s:.0f} s: {trouble}; {self.problem}")
            await self._waker.wait(Topic.ENGINES, since=mark)

    async def applied(self, version: Version) -> Mapping[str, Any]:
        """What the audit says of this engine's update to `version`."""
        entries: Any = await self._client.xrange(self._keys.audit)
        lines = [event(entry, fields) for entry, fields in entries]
        found = [line.fields for line in lines if line.op == "applied" and line.fields["engine_id"] == self.id and line.fields["version"] == str(version)]
        return found[-1]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._registry.beat(self._status)
