"""What the reconciler asks of a way to move weights.

    prepare(manifest) while the engine serves ──► apply(manifest) between pause and continue

Invariant: `prepare` never touches what the engine serves; `apply` of what was prepared reads nothing that is not checked. The version string reaches the
engine with the last byte only.

One exception to an engine that serves while it prepares: where it enters a process group, it stands still from the call until the group has met, at most
`weights.group_deadline_s`. That is once for each group, and one engine of a weight server at a time (rule W6).
"""

from __future__ import annotations

from typing import Protocol

from protocol.messages import Manifest


class Transport(Protocol):
    """Belongs to one engine. Calls come one at a time; every one ends by its deadline."""

    @property
    def name(self) -> str:
        """As `weights.transport` spells it."""

    async def prepare(self, manifest: Manifest, *, deadline_s: float) -> None:
        """Return once `apply` needs nothing more from a file or a network that could have been had before.

        Raises: `ManifestError` (naming the tensor; `VersionGone` if the files were collected) or `OSError`: this version cannot be had from its files;
        `TransportFailed`: this way is broken, and the version may be had by another.
        """

    async def apply(self, manifest: Manifest, *, deadline_s: float) -> None:
        """The engine, which is paused, holds the version and goes by its name.

        Raises: `VersionGone` before anything was touched; `ApplyFailed`, `TransportFailed`, `EngineUnavailable`: nobody knows what the engine holds.
        """

    async def aclose(self) -> None:
        """Give back what is held for the engine, within a second or two; never raises."""
