"""The weight channel of a run: which versions exist, which is newest, and which may be deleted.

    publish ──► newest pointer (forward only) ──► pin (atomic with the read) ──► … ──► dying ──► deleted

Invariants: the pointer moves only for the attached incarnation, only to trained steps, only forward (rules V3, T4); a version that any engine serves, applies
or targets is not collected, nor is one that a delta which is kept is made from (rules W5, W7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from protocol.codec import decode, encode
from protocol.connection import Client, Script
from protocol.errors import Fenced, LedgerRegressed, ManifestError, StepOrder, WeightError
from protocol.failpoints import Failpoint, failpoint
from protocol.keys import Keys
from protocol.messages import EngineId, Manifest
from protocol.versions import Version
from weightsync.claim import FLAGS, Claim
from weightsync.store import VersionStore

_PRELUDE = ("lua/common.lua",)
_PUBLISH = Script("weightsync", "lua/publish.lua", prelude=_PRELUDE, flags=FLAGS)
_COLLECT = Script("weightsync", "lua/collect.lua", prelude=_PRELUDE, flags=FLAGS)
_READ = Script("weightsync", "lua/read.lua", prelude=_PRELUDE, flags="no-writes")


class Channel:
    """Pointer, manifests and pins of one run. Needs no store: it never touches a file but in `collect`."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._parents: dict[Version, Version] = {}
        """Of the deltas published here since the last full version: told with each, for a Redis that lost some of them."""

    async def publish(self, manifest: Manifest, incarnation: int, *, seconds: float = 0.0) -> None:
        """Make a version, whose bytes are durable and readable already, the newest. Publishing it again changes nothing.

        `seconds`: what writing it took, for the audit.
        Raises: `Fenced` (a newer trainer is attached), `LedgerRegressed` (Redis lost the attachment of this one), `StepOrder` (not trained yet),
        `ManifestError` (already published with other weights), `WeightError` (older than the newest).
        """
        if manifest.version.incarnation != incarnation:
            raise Fenced(f"version {manifest.version} is not of incarnation {incarnation}")
        keys, version = self._keys, manifest.version
        changed = manifest.changed_elements / manifest.elements if manifest.elements else 1.0
        measured = (manifest.total_bytes, f"{seconds:.6f}", manifest.kind, f"{changed:.6f}")
        parents = {} if manifest.parent_version is None else {**self._parents, version: manifest.parent_version}
        chain = [str(one) for pair in parents.items() for one in pair]
        arguments: tuple[str | int | bytes, ...] = (incarnation, version.n, encode(manifest), manifest.digest, *measured, *chain)
        answer = await _PUBLISH(self._client, keys=[keys.state, keys.weights, keys.audit, keys.wakeups], args=arguments)
        verdict, seen = answer[0].decode(), answer[1].decode()
        if verdict == "FENCED":
            raise Fenced(f"publish of {version}: incarnation {seen} is attached now; this trainer must stop")
        if verdict == "REGRESSED":
            raise LedgerRegressed(f"publish of {version}: only incarnation {seen} is attached: Redis lost the attachment; its trainer re-asserts it")
        if verdict == "UNTRAINED":
            raise StepOrder(f"publish of {version}: the run has trained {seen} steps; call trained({version.n}) first")
        if verdict == "CONFLICT":
            raise ManifestError(f"publish of {version}: it is published already with other weights")
        if verdict == "BACKWARD":
            raise WeightError(f"publish of {version}: the newest version is {seen}, and the pointer moves forward only")
        self._parents = parents

    async def newest(self) -> Manifest | None:
        """The newest version; None before the first. Nothing holds its files: a reconciler's `Claim.look` pins what it may take."""
        raw = await self._read("newest")
        return None if raw is None else decode(Manifest, raw)

    async def newest_version(self) -> Version | None:
        raw = await self._read("newest-version")
        return None if raw is None else Version.parse(raw.decode())

    async def versions(self) -> tuple[Version, ...]:
        """Versions kept, oldest first."""
        names = (field.decode().partition("manifest:") for field in await self._read("fields"))
        return tuple(sorted(Version.parse(version) for before, found, version in names if found and not before))

    async def pinned(self) -> frozenset[Version]:
        """Versions that an engine serves or takes (rule W5)."""
        return frozenset(Version.parse(version.decode()) for version in await self._read("pinned"))

    def claim(self, engine_id: EngineId, boot_nonce: str) -> Claim:
        """The standing of a new reconciler of this engine."""
        return Claim(self._client, self._keys, engine_id, boot_nonce)

    async def collect(self, store: VersionStore, *, keep: int) -> tuple[Version, ...]:
        """Delete every version but the newest `keep`, those pinned, and what these are made from.

        They are marked dying first, so that a crash here is finished by the next call.
        """
        deleted: list[Version] = []
        dying: tuple[Version, ...] = ()
        while dying := await self._dying(keep, dying):  # what came free while files were being deleted was marked by the call that took them off the list
            await asyncio.to_thread(_delete_all, store, dying)
            failpoint(Failpoint.VERSION_DELETED)
            deleted += dying
        return tuple(deleted)

    async def _read(self, what: str) -> Any:
        return await _READ(self._client, keys=[self._keys.weights, self._keys.weight_pins], args=[what])

    async def _dying(self, keep: int, deleted: Sequence[Version]) -> tuple[Version, ...]:
        keys = [self._keys.weights, self._keys.weight_pins]
        raw = await _COLLECT(self._client, keys=keys, args=[max(1, keep), *(str(version) for version in deleted)])
        return tuple(Version.parse(version.decode()) for version in raw)


def _delete_all(store: VersionStore, versions: Sequence[Version]) -> None:
    for version in versions:
        store.delete(version)
