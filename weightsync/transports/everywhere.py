"""Versions for an engine over several machines: none is loaded before each of them sees its files."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from protocol.messages import Manifest
from weightsync.finish import left
from weightsync.transports.contract import Transport


class FromFolder(Transport, Protocol):
    """A way by which an engine loads a folder itself."""

    def folder(self, manifest: Manifest) -> Path:
        """What `apply` will have it load. Raises: `VersionGone`, `ManifestError`."""


class Seen(Protocol):
    """Returns once every machine of the engine sees the folder. Raises: `TransportFailed`."""

    def __call__(self, folder: Path, /, *, deadline_s: float) -> Awaitable[None]: ...


class EverywhereTransport:
    """As the way it is made of. `prepare` waits for all machines, while the engine serves: an engine that answers for all of its ranks may not know of one that
    loaded nothing.
    """

    def __init__(self, inner: FromFolder, seen: Seen) -> None:
        self._inner, self._seen = inner, seen

    @property
    def name(self) -> str:
        return self._inner.name

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        await self._inner.prepare(manifest, deadline_s=deadline_s)
        await self._seen(self._inner.folder(manifest), deadline_s=left(end))

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        await self._inner.apply(manifest, deadline_s=deadline_s)

    async def aclose(self) -> None:
        await self._inner.aclose()
