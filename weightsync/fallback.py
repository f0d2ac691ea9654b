"""Which way a version takes into an engine: the fast one until it breaks, then the store, then the fast one again after a while.

    PRIMARY ──failed──► STORE for 5 s, 10 s, … 300 s ──► PRIMARY ──worked──► PRIMARY (failures forgotten)

`Choice` is pure: events in, a way out; no clock, no socket. `Transports` is the edge around it, and is what the reconciler has.

>>> choice = Choice()
>>> choice.way(now=0.0), choice.prepare_failed(now=0.0), choice.way(now=4.9), choice.way(now=5.1)
(<Way.PRIMARY: 'primary'>, None, <Way.STORE: 'store'>, <Way.PRIMARY: 'primary'>)
>>> choice.apply_failed(now=6.0); choice.way(now=900.0)  # what the engine holds is unknown: the store has it first
<Way.STORE: 'store'>
>>> choice.worked(Way.STORE); choice.way(now=900.0)
<Way.PRIMARY: 'primary'>
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable, ManifestError, VersionGone
from protocol.messages import Manifest
from weightsync.finish import left
from weightsync.transports.contract import Transport

_LOG = logging.getLogger(__name__)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
_BROKEN = (ApplyFailed, EngineUnavailable, DecodeError, OSError)
PRIMARY_S = 60.0
"""Of a deadline for preparing, at most half: what the primary may take before the store begins."""
_GRACE_S = 0.5
"""A way that has not ended so long after its deadline is ended."""


class Way(StrEnum):
    PRIMARY = "primary"
    STORE = "store"


class Choice:
    """Between the two ways of one engine.

    Invariant: after a failed apply the store brings one version whole before the primary is used again.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._not_before = 0.0
        self._owes_store = False

    def way(self, now: float) -> Way:
        return Way.STORE if self._owes_store or now < self._not_before else Way.PRIMARY

    def prepare_failed(self, now: float) -> None:
        """The primary broke before the engine was touched."""
        self._not_before = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures, 16))
        self._failures += 1

    def apply_failed(self, now: float) -> None:
        """The primary broke, or the engine under it: nobody knows what the engine holds."""
        self.prepare_failed(now)
        self._owes_store = True

    def worked(self, way: Way) -> None:
        """A version arrived and was verified."""
        self._owes_store = False
        if way is Way.PRIMARY:
            self._failures = 0


class Transports:
    """The ways of one engine, as one. Not a failure of the primary but only one of the store reaches the reconciler before the engine is touched."""

    def __init__(self, primary: Transport | None, store: Transport, *, fixed: bool = False) -> None:
        """`primary` None: there is only the store. `fixed`: the engine stays with the version it is asked for, so no newer one will do."""
        self._primary, self._store, self._fixed = primary, store, fixed
        self._choice = Choice()
        self._prepared = Way.STORE
        self.problem = ""
        """Why the primary was left last; empty when it never was, or brought a version since."""

    @property
    def name(self) -> str:
        """Of what prepared last."""
        return self._transport(self._prepared).name

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Return once `apply` can run. A primary that breaks, or is not done within `PRIMARY_S`, leaves the same version to the store at once.

        Raises: `ManifestError`, `OSError`: the version cannot be had by any way; `VersionGone`. `ApplyFailed`, `EngineUnavailable`, `TimeoutError`: not now.
        """
        end = time.monotonic() + deadline_s
        if self._primary is not None and self._choice.way(time.monotonic()) is Way.PRIMARY:
            self._prepared, primary_s = Way.PRIMARY, min(PRIMARY_S, deadline_s / 2)
            try:
                async with asyncio.timeout(primary_s + _GRACE_S):
                    await self._primary.prepare(manifest, deadline_s=primary_s)
            except VersionGone as problem:  # no fault of the way
                if not self._fixed:
                    raise  # a newer one is there, or will be
                self._leave(problem)
            except (*_BROKEN, ManifestError) as problem:  # it reads the files by a way of its own: whether they are damaged, the store says
                self._choice.prepare_failed(time.monotonic())
                self._leave(problem, manifest)
            else:
                return
        self._prepared = Way.STORE
        async with asyncio.timeout(left(end) + _GRACE_S):
            await self._store.prepare(manifest, deadline_s=left(end))

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The paused engine takes what was prepared. Raises: as `Transport.apply` does; nothing else is tried now."""
        try:
            async with asyncio.timeout(deadline_s + _GRACE_S):
                await self._transport(self._prepared).apply(manifest, deadline_s=deadline_s)
        except TimeoutError as problem:
            raise ApplyFailed(f"{self.name}: {manifest.version} was not there after {deadline_s:.1f} s") from problem

    def verified(self) -> None:
        """The engine serves what was applied."""
        self._choice.worked(self._prepared)
        if self._prepared is Way.PRIMARY:
            self.problem = ""

    def failed(self, problem: Exception) -> None:
        """The engine did not take, or does not serve, what was applied."""
        if self._prepared is Way.PRIMARY and not isinstance(problem, VersionGone):
            self._choice.apply_failed(time.monotonic())
            self._leave(problem)

    async def aclose(self) -> None:
        """Give back what is held for the engine."""
        if self._primary is not None:
            await self._primary.aclose()
        await self._store.aclose()

    def _transport(self, way: Way) -> Transport:
        return self._primary if way is Way.PRIMARY and self._primary is not None else self._store

    def _leave(self, problem: Exception, manifest: Manifest | None = None) -> None:
        about = "" if manifest is None else f" for {manifest.version}"
        text = f"{self.name}{about}: {str(problem) or type(problem).__name__}"
        if text != self.problem:
            _LOG.warning("%s; taking the store", text)
        self.problem = text
