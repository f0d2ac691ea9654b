"""Which versions are staged, who uses them, and which one makes room for the next.

Invariant: a version that somebody holds is never given up or written over; at most `places` versions are on the device.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.errors import TransportFailed, VersionGone
from protocol.versions import Version
from weightsync.buckets import Bucket

if TYPE_CHECKING:
    import torch

PLACES = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A whole version on the device, checked."""

    version: Version
    digest: str
    """Of its manifest."""
    buckets: tuple[Bucket, ...]
    memory: tuple[torch.Tensor, ...]
    """One flat buffer of bytes for each bucket."""


class Shelf:
    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._staged: dict[Version, Staged] = {}
        self._holds: Counter[Version] = Counter()
        self._target: Version | None = None
        self._failed: tuple[Version, Exception] | None = None
        self._changed = asyncio.Event()

    @property
    def newest(self) -> Version | None:
        return max(self._staged, default=None)

    async def change(self) -> None:
        """Return at the next change."""
        await self._changed.wait()

    async def room(self) -> tuple[torch.Tensor, ...]:
        """Wait for a place; the memory of what was given up for it: the oldest that nobody holds."""
        while len(self._staged) >= self._places:
            free = [one for one in sorted(self._staged) if not self._holds[one]]
            if free:
                memory = self._staged.pop(free[0]).memory
                self._ring()
                return memory
            await self._changed.wait()
        return ()

    def aim(self, version: Version) -> None:
        """`version` is staged next: who waits for an older one that is not here waits in vain."""
        self._target, self._failed = version, None
        self._ring()

    def put(self, staged: Staged) -> None:
        self._staged[staged.version] = staged
        self._ring()

    def fail(self, version: Version, problem: Exception) -> None:
        """`version` cannot be staged; those who wait for it are told why."""
        self._failed = (version, problem)
        self._ring()

    async def wait(self, version: Version, *, deadline_s: float) -> Staged:
        """The version, once it is staged.

        Raises: `VersionGone` when a newer one has taken its place; what staging it met; `TransportFailed` at the deadline.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while version not in self._staged:
                    if self._failed is not None and self._failed[0] == version:
                        raise type(self._failed[1])(*self._failed[1].args)
                    if self._target is not None and version < self._target:
                        raise VersionGone(f"version {version}: the weight server went on to {self._target}")
                    await self._changed.wait()
        except TimeoutError as problem:
            raise TransportFailed(f"version {version} was not staged within {deadline_s:.1f} s; the server has {self.newest or 'none'}") from problem
        return self._staged[version]

    def get(self, version: Version) -> Staged:
        """One that the caller holds."""
        return self._staged[version]

    def hold(self, version: Version) -> None:
        """From now on its bytes stay as they are, until `release`. Raises: `VersionGone` if it is not staged."""
        if version not in self._staged:
            raise VersionGone(f"version {version} is not staged any more")
        self._holds[version] += 1

    def release(self, version: Version) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]
            self._ring()

    def _ring(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
