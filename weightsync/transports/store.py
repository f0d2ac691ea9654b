"""The `store` way: the engine loads the files of a version from a folder that it sees, by one disk update."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protocol.messages import Manifest
from weightsync.control import EngineControl
from weightsync.store import DirectoryStore


class StoreTransport:
    """Every byte is checked while the engine serves; the update itself is one call."""

    name = "store"

    def __init__(self, store: DirectoryStore, control: EngineControl) -> None:
        self._store = store
        self._control = control

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Check every byte. The thread that reads ends by itself when the deadline does not wait for it."""
        async with asyncio.timeout(deadline_s):
            await asyncio.to_thread(self._store.verify, manifest)

    def folder(self, manifest: Manifest) -> Path:
        """What the engine loads."""
        return self._store.locate(manifest)

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        await self._control.update_from_disk(str(self.folder(manifest)), str(manifest.version), deadline_s=deadline_s)

    async def aclose(self) -> None:
        """Nothing is held."""
