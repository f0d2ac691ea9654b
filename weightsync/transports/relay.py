"""The transport of engines whose machine keeps whole copies: the mirror prepares, the engine loads from this machine's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protocol.errors import TransportFailed, VersionGone
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.control import EngineControl
from weightsync.mirror import Mirror
from weightsync.store import DirectoryStore


class RelayTransport:
    """Of one engine. Copies are shared by all engines of the machine: whichever process is first makes one, a relay where one runs."""

    def __init__(self, mirror: Mirror, control: EngineControl, *, name: str = "delta") -> None:
        self._mirror = mirror
        self._control = control
        self._name = name
        self._prepared: tuple[Version, str, Path] | None = None

    @property
    def name(self) -> str:
        return self._name

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Return once a whole copy, every tensor checked, is on this machine.

        Raises: `ManifestError` naming the tensor; `TransportFailed` if this machine cannot hold it or the store does not give it in time.
        """
        try:
            path = await self._mirror.ensure(manifest, deadline_s=deadline_s)
        except OSError as problem:
            if manifest.kind == "full" and isinstance(store := self._mirror.store, DirectoryStore):  # there it can be loaded from where it is
                await asyncio.to_thread(store.verify, manifest)
                self._prepared = (manifest.version, manifest.digest, store.locate(manifest))
                return
            why = f"not within {deadline_s:.1f} s" if isinstance(problem, TimeoutError) else str(problem)
            raise TransportFailed(f"version {manifest.version} cannot be copied to {self._mirror.folder}: {why}") from problem
        self._prepared = (manifest.version, manifest.digest, path)

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The engine loads the copy. Raises: `VersionGone` before the engine is touched; `ApplyFailed`, `EngineUnavailable` after that."""
        path = self._prepared[2] if self._prepared is not None and self._prepared[:2] == (manifest.version, manifest.digest) else None
        if path is None or not path.is_dir():
            raise VersionGone(f"version {manifest.version}: its copy on this machine is gone")
        await self._control.update_from_disk(str(path), str(manifest.version), deadline_s=deadline_s)

    async def aclose(self) -> None:
        """There is nothing to give back."""
        self._prepared = None
