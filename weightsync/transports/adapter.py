"""The way of an adapter: the engine loads a small folder beside the adapters it has, and drops the oldest.

    prepare: check every byte ─► apply: [first: drop what others left] load ─► (verified, acked) … beside: drop all but the newest `keep`

An engine drops an adapter once no request is on it, and takes no other meanwhile (measured: one lock for both in SGLang). A request that is still on one that
is `keep` versions old after `_PATIENCE_S` is therefore ended with what it has; its producer goes on with it under the newest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable
from protocol.messages import Manifest
from weightsync.adapter_control import AdapterControl
from weightsync.adapter_store import AdapterStore
from weightsync.control import CALL_S, EngineControl
from weightsync.finish import left
from weightsync.lora import OURS, name_of, version_of

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""For requests that are on an adapter which is to be dropped. Loading the next waits as long."""
_REFUSALS = (ApplyFailed, EngineUnavailable, DecodeError)
_REQUIRED = "set lora.rank and lora.target_modules as the trainer has them, or start the server with "


class AdapterTransport:
    """Belongs to one engine."""

    name = "adapter"

    def __init__(self, store: AdapterStore, control: AdapterControl, *, keep: int, flags: str, patience_s: float = _PATIENCE_S) -> None:
        """`keep`: versions that stay loaded. `flags`: what a server must be started with, for people."""
        self._store, self._control, self._keep, self._flags, self._patience_s = store, control, keep, flags, patience_s
        self._joined = False
        self._dropping: asyncio.Task[None] | None = None

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Check every byte. The thread that reads ends by itself when the deadline does not wait for it."""
        async with asyncio.timeout(deadline_s):
            self._store.locate(manifest)
            await asyncio.to_thread(self._store.verify, manifest)

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        path, control, name = self._store.locate(manifest), self._control, name_of(self._control.prefix, manifest.version)
        await control.check_base(deadline_s=left(end))
        if not self._joined:
            await self._drop_left_over(end)
            self._joined = True
        if self._dropping is not None:
            await asyncio.wait({self._dropping}, timeout=left(end))
        if name not in await control.adapters(deadline_s=left(end)):
            await self._load(name, str(path), end)
        control.serving = manifest.version
        self._dropping = asyncio.create_task(self._drop_old(), name="reconciler:adapters")

    async def _load(self, name: str, path: str, end: float) -> None:
        """Raises: `ApplyFailed` saying what to set."""
        try:
            await self._control.load_adapter(name, path, deadline_s=left(end))
        except ApplyFailed as problem:
            raise ApplyFailed(f"{problem}; {_REQUIRED}{self._flags}") from problem

    async def aclose(self) -> None:
        """What is loaded stays for requests that are on it; whoever takes the engine over drops it."""
        dropping, self._dropping, self._joined = self._dropping, None, False
        if dropping is not None:
            dropping.cancel()
            await asyncio.gather(dropping, return_exceptions=True)

    async def _drop_left_over(self, end: float) -> None:
        """Adapters of other runs, and of this one by a reconciler before this: nobody vouches for them. Requests that are on them end, as at every take-over.

        Raises: `ApplyFailed` where the engine keeps one.
        """
        if not (found := await self._ours(end)):
            return
        _LOG.info("%s has %d adapters of others: %s", self._control.url, len(found), ", ".join(found))
        aside = self._control.aside()
        await aside.abort_all(deadline_s=min(CALL_S, left(end)))
        for name in found:
            await aside.unload_adapter(name, deadline_s=left(end))
        if kept := set(found).intersection(await self._ours(end)):
            raise ApplyFailed(f"{self._control.url} keeps adapters that were left there: {', '.join(sorted(kept))}")

    async def _ours(self, end: float) -> list[str]:
        return [name for name in await self._control.adapters(deadline_s=left(end)) if name.startswith(OURS)]

    async def _drop_old(self) -> None:
        """In the background: what cannot be dropped now is tried again after the next version."""
        aside = self._control.aside()
        with contextlib.suppress(*_REFUSALS):
            versions = {version_of(self._control.prefix, name): name for name in await aside.adapters()}
            for version in sorted(version for version in versions if version is not None)[: -self._keep]:
                await self._drop(aside, versions[version])

    async def _drop(self, aside: EngineControl, name: str) -> None:
        try:
            await aside.unload_adapter(name, deadline_s=self._patience_s)
        except EngineUnavailable:
            _LOG.warning("%s: requests are still on %s, %d versions old: all that run there are ended and go on with the newest", aside.url, name, self._keep)
            await aside.abort_all()
            await aside.unload_adapter(name, deadline_s=CALL_S)
