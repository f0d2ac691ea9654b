"""The weight pointer as a process that is no engine follows it: what it reads is pinned in the same step (rule W5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from protocol.codec import decode
from protocol.connection import Client, Script, asking
from protocol.errors import RedisUnavailable, VersionGone
from protocol.keys import Keys
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.claim import FLAGS, PIN_S

_HOLD = Script("weightsync", "lua/hold.lua", prelude=("lua/common.lua",), flags=FLAGS)
_KEEP = Script("weightsync", "lua/keep.lua", prelude=("lua/common.lua",), flags=FLAGS)


class Pointer:
    """`holder`: names the pin; one a process."""

    def __init__(self, client: Client, keys: Keys, holder: str) -> None:
        self._client = client
        self._keys = keys
        self._holder = holder

    async def look(self, at_hand: Version | None) -> Manifest | None:
        """The newest manifest, pinned for `PIN_S`; None if it is that of `at_hand`, or there is none."""
        raw = await _HOLD(self._client, keys=self._where, args=[self._holder, int(PIN_S * 1000), str(at_hand or "")])
        return decode(Manifest, raw[1]) if raw[1] else None

    @contextlib.asynccontextmanager
    async def holding(self, version: Version) -> AsyncIterator[None]:
        """Its files stay while the context is open, however long. Raises: `VersionGone` if they are given up already."""
        await self._keep(version)
        task = asyncio.create_task(self._renew(version), name="pointer:pin")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(RedisUnavailable), asking("weight pins"):
                await self._client.hdel(self._keys.weight_pins, f"{self._holder}/{version}")
        if not task.cancelled():
            task.result()

    async def release(self) -> None:
        with asking("weight pins"):
            await self._client.hdel(self._keys.weight_pins, self._holder)

    @property
    def _where(self) -> list[str]:
        return [self._keys.weights, self._keys.weight_pins]

    async def _renew(self, version: Version) -> None:
        while True:
            await asyncio.sleep(PIN_S / 3)
            await self._keep(version)

    async def _keep(self, version: Version) -> None:
        if await _KEEP(self._client, keys=self._where, args=[self._holder, int(PIN_S * 1000), str(version)]) == b"GONE":
            raise VersionGone(f"version {version} is collected")
