"""The transport of engines whose machine keeps whole copies: the mirror prepares, the engine loads from this machine's memory.

the machine's folder ──no room, not writable──► a whole version: where it lies in the store
                                            └─► a delta: a copy beside the store ──no room either──► not now, and the engine says why
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from protocol.errors import TransportFailed, VersionGone
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.control import EngineControl
from weightsync.finish import left
from weightsync.mirror import Mirror
from weightsync.store import DirectoryStore

_LOG = logging.getLogger(__name__)


class RelayTransport:
    """Of one engine. Copies are shared by all engines of the machine: whichever process is first makes one, a relay where one runs."""

    def __init__(self, mirror: Mirror, control: EngineControl, *, name: str = "delta", spare: Mirror | None = None) -> None:
        """`spare`: copies beside the store, for as long as none can be made in the mirror's own folder."""
        self._mirror = mirror
        self._control = control
        self._name = name
        self._spare = spare
        self._prepared: tuple[Version, str, Path] | None = None
        self._from_store = False
        self._told = ""

    @property
    def name(self) -> str:
        """It says "store" where what was prepared last does not lie in this machine's folder of copies, because none could be made there."""
        return "store" if self._from_store else self._name

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Return once a whole copy, every tensor checked, is on this machine.

        Raises: `ManifestError` naming the tensor; `TransportFailed` if this machine cannot hold it or the store does not give it in time.
        """
        end = time.monotonic() + deadline_s
        try:
            path = await self._mirror.ensure(manifest, deadline_s=deadline_s)
        except OSError as problem:
            path = await self._elsewhere(manifest, problem, deadline_s, end)
            self._from_store = True
        else:
            self._from_store, self._told = False, ""
        self._prepared = (manifest.version, manifest.digest, path)

    async def _elsewhere(self, manifest: Manifest, problem: OSError, deadline_s: float, end: float) -> Path:
        """Where the version is whole although this machine's folder cannot hold it. Raises: `TransportFailed`, `ManifestError`."""
        said = f"not within {deadline_s:.1f} s" if isinstance(problem, TimeoutError) else str(problem)
        why = f"version {manifest.version} cannot be copied to {self._mirror.folder}: {said}"
        if manifest.kind == "full" and isinstance(store := self._mirror.store, DirectoryStore):  # there it can be loaded from where it is
            await asyncio.to_thread(store.verify, manifest)
            path = store.locate(manifest)
        elif self._spare is None or isinstance(problem, TimeoutError):  # what takes too long is not begun again elsewhere
            raise TransportFailed(why) from problem
        else:
            try:
                path = await self._spare.ensure(manifest, deadline_s=left(end))
            except OSError as second:
                raise TransportFailed(f"{why}; nor to {self._spare.folder}: {str(second) or 'not in time'}") from second
        if self._told != (told := str(problem.strerror or problem)):
            self._told = told
            _LOG.warning("%s; until that is mended it comes from the store (%s)", why, path.parent)
        return path

    def folder(self, manifest: Manifest) -> Path:
        """The copy that was prepared, which the engine loads. Raises: `VersionGone`."""
        path = self._prepared[2] if self._prepared is not None and self._prepared[:2] == (manifest.version, manifest.digest) else None
        if path is None or not path.is_dir():
            raise VersionGone(f"version {manifest.version}: its copy on this machine is gone")
        return path

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The engine loads the copy. Raises: `VersionGone` before the engine is touched; `ApplyFailed`, `EngineUnavailable` after that."""
        path = self.folder(manifest)
        await self._control.update_from_disk(str(path), str(manifest.version), deadline_s=deadline_s)

    async def aclose(self) -> None:
        """There is nothing to give back."""
        self._prepared = None
