"""Whole copies of versions in the memory of one machine, for all of its engines: made from deltas where that is possible, fetched whole where it is not.

    here and right? ──yes──► its folder
         │no
    the folder's lock (one process of the machine) ──► newest copy here that the deltas lead from ──► apply ──► check ──► rename
         │held by another: look again                  └─ none, or not what it should be: the full version of the chain, from the store

A copy loads like any Hugging Face model folder, and lies in the folder as in a `DirectoryStore`. The lock is the kernel's, so a holder that is killed frees it;
what it left under a temporary name goes when the next holder begins. One that is stopped and keeps the lock is waited for `PATIENCE_S`, then the copy is made
beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from protocol.durable import make_folder, sync_folder, write_file
from protocol.errors import ManifestError, Unavailable, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync import delta
from weightsync.channel import Channel
from weightsync.manifests import check_manifest
from weightsync.safetensors_file import index_of, new_file
from weightsync.store import DirectoryStore, VersionStore
from weightsync.version_files import INDEX_FILE, MANIFEST_FILE, by_file, made_whole, manifest_bytes

_LOG = logging.getLogger(__name__)
_LOCK_FILE = ".lock"
PATIENCE_S = 30.0
"""A holder of the lock that has not made the version in so long may be stopped: the version is made beside it."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.1
"""Between two looks at work of another process: a file lock has no deadline and wakes nobody who could have one."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a disk without room says: copies that are only kept, and that no engine has, make room."""
_MOST_RIGHT = 16
"""Of how many versions it is known that they were right; of others it is found out again when they are asked for."""
Stopped: TypeAlias = Callable[[], bool]


@dataclass(slots=True)
class Totals:
    """Counters since this mirror was made."""

    deltas: int = 0
    """Versions made from a delta."""
    fulls: int = 0
    """Versions fetched whole."""
    fetched_bytes: int = 0
    """What their files in the store hold."""


class Mirror:
    """Copies in `folder` of what is in `store`. Any number of processes of one machine may have one on the same folder."""

    def __init__(
        self, folder: str | os.PathLike[str], store: VersionStore, channel: Channel | None = None, *, keep: int = 2, bucket_bytes: int = 256 << 20
    ) -> None:
        """`channel`: knows which versions engines hold and which is newest; without it only the newest `keep` copies stay. With it, a disk without room is
        made to hold what engines have and the version asked for, and nothing else.
        """
        self._local = DirectoryStore(folder, bucket_bytes=bucket_bytes)
        self._store = store
        self._channel = channel
        self._keep = max(1, keep)
        self._bucket_bytes = bucket_bytes
        self._right: dict[Version, tuple[object, ...]] = {}
        """Of the versions checked last: what their files were like then."""
        self.totals = Totals()
        self.newest: Version | None = None
        """The newest version that `ensure` has answered."""

    @property
    def folder(self) -> Path:
        return self._local.folder

    @property
    def store(self) -> VersionStore:
        """What is copied."""
        return self._store

    async def ensure(self, manifest: Manifest, *, deadline_s: float) -> Path:
        """The folder of this machine that holds `manifest.version` whole, every tensor checked. A full version in this machine's memory is where it is.

        Raises: `ManifestError` naming the tensor, if the version cannot be had from the store by any way; `VersionGone` if its files, or those of a version
        that it is made from, were collected. `OSError`: this machine has no room, or the store does not answer. `TimeoutError`.
        """
        check_manifest(manifest)
        stop = threading.Event()
        try:
            async with asyncio.timeout(deadline_s):
                try:
                    path, made = await self._attempts(manifest, stop.is_set)
                except OSError as problem:
                    if problem.errno not in _FULL or self._channel is None or not await self._collect(manifest.version, keep=0):
                        raise
                    path, made = await self._attempts(manifest, stop.is_set)
        finally:
            stop.set()  # a thread cannot be cancelled: it ends at the next file or slab, and frees the lock
        self.newest = max(self.newest or manifest.version, manifest.version)
        if made:
            await self._collect(manifest.version, keep=self._keep)
        return path

    async def _attempts(self, manifest: Manifest, stopped: Stopped) -> tuple[Path, bool]:
        pause, alone_at = _FIRST_LOOK_S, time.monotonic() + PATIENCE_S
        while (found := await asyncio.to_thread(self._attempt, manifest, stopped, alone=time.monotonic() > alone_at)) is None:
            await asyncio.sleep(pause)
            pause = min(_LAST_LOOK_S, pause * 1.5)
        return found

    async def _collect(self, needed: Version, *, keep: int) -> int:
        """Delete copies that nobody needs: all but the newest `keep`, `needed`, what engines hold, and what is newer than the newest (of a run before this).

        How many went. Only what was here before the newest version was read is judged by it: a copy of one published since is newer, and right.
        """
        here = await asyncio.to_thread(self._here)
        pinned: frozenset[Version] = frozenset()
        newest: Version | None = None
        if self._channel is not None:
            try:
                newest, pinned = await self._channel.newest_version(), await self._channel.pinned()
            except Unavailable:  # not knowing what is held: the next version's turn
                return 0
        return await asyncio.to_thread(self._drop, here, {needed, *pinned}, newest, keep)

    def _attempt(self, manifest: Manifest, stopped: Stopped, *, alone: bool) -> tuple[Path, bool] | None:
        """The copy, and whether it was made now; None while another process is at work, unless it is not waited for any more (`alone`)."""
        if (path := self._find(manifest)) is not None:
            return path, False
        make_folder(self.folder, mode=0o700)
        with self._lock() as mine:
            if not mine and not alone:
                return None
            if (path := self._find(manifest)) is not None:
                return path, False
            # What others left. One who works without the lock may lose its own to this, and begins again: an `OSError` of its attempt.
            for left in () if not mine else self.folder.glob(".tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
            self._local.delete(manifest.version)
            return (self._fetch(manifest, stopped) if manifest.kind == "full" else self._derive(manifest, stopped)), True

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        handle = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)

    def _find(self, manifest: Manifest) -> Path | None:
        """Where the version is whole and right; None where it is to be made."""
        if manifest.kind == "full" and isinstance(self._store, DirectoryStore) and not self._store.durable:
            self._check(self._store, manifest)
            return self._store.locate(manifest)
        try:
            here = self._local.manifest(manifest.version)
            if _weights(here) != _weights(manifest):
                return None
            self._check(self._local, here)
        except ManifestError as problem:
            if not isinstance(problem, VersionGone):
                _LOG.warning("the copy of %s in %s is made anew: %s", manifest.version, self.folder, problem)
            return None
        return self._local.path(manifest.version)

    def _check(self, where: DirectoryStore, manifest: Manifest) -> None:
        """Every byte is right; looked at again only where a file is another than it was, or the manifest."""
        try:
            seen = (manifest.digest, *((file, *_stamp(Path(manifest.location) / file)) for file in by_file(manifest)))
        except OSError:
            seen = ()
        if not seen or self._right.get(manifest.version) != seen:
            where.verify(manifest)
            self._right.pop(manifest.version, None)
            self._right[manifest.version] = seen
            for old in list(self._right)[:-_MOST_RIGHT]:
                self._right.pop(old, None)

    def _fetch(self, manifest: Manifest, stopped: Stopped) -> Path:
        """A full version as the store has it."""
        failpoint(Failpoint.RELAY_READ)
        with self._local.building() as temporary:
            self._store.copy(manifest, temporary, stopped=stopped)
            self._local.verify(dataclasses.replace(manifest, location=str(temporary)))
            if self._local.durable:
                for path in temporary.iterdir():
                    _sync_file(path)
            path = self._finish(dataclasses.replace(manifest, location=str(self._local.path(manifest.version))), temporary)
        self.totals.fulls += 1
        self.totals.fetched_bytes += manifest.total_bytes
        return path

    def _derive(self, manifest: Manifest, stopped: Stopped) -> Path:
        """A version from its deltas: on a copy that is here, or, where that does not give it, on the full version in the store."""
        base, chain = self._chain(manifest, here=True)
        if base.location.startswith(f"{self.folder}/"):
            try:
                return self._apply(base, self._local, chain, stopped)
            except ManifestError as problem:
                _LOG.warning("%s cannot be made from the copy of %s here, and is made from the store: %s", manifest.version, base.version, problem)
                self._drop_if_damaged(base)
            base, chain = self._chain(manifest, here=False)
        return self._apply(base, self._store, chain, stopped)

    def _drop_if_damaged(self, base: Manifest) -> None:
        try:
            self._local.verify(base)
        except ManifestError:
            self._local.delete(base.version)

    def _chain(self, manifest: Manifest, *, here: bool) -> tuple[Manifest, list[Manifest]]:
        """What to begin from (with `here`, preferably a copy of this machine), and the deltas from there to `manifest`, oldest first (rule W7).

        Raises: `VersionGone` where a link is missing, `ManifestError` where one does not fit.
        """
        chain = [manifest]
        while True:
            link = chain[0]
            parent = link.parent_version
            if link.kind != "delta" or parent is None or parent >= link.version:
                raise ManifestError(f"version {link.version} is {link.kind} on {parent}: expected a delta on an earlier version")
            if here:
                with contextlib.suppress(ManifestError):
                    copy = self._local.manifest(parent)
                    if copy.digest == link.parent:
                        return copy, chain
            before = self._store.manifest(parent)
            if before.digest != link.parent:
                name = next((one.name for one, old in zip(link.tensors, before.tensors, strict=False) if not one.file and one.checksum != old.checksum), "")
                raise ManifestError(
                    f"version {link.version} is a delta on {parent} with digest {link.parent}, and the store's {parent} has {before.digest}"
                    f"{f', with another tensor {name}' if name else ''}: it is of another parent"
                )
            if before.kind == "full":
                return before, chain
            chain.insert(0, before)

    def _apply(self, base: Manifest, where: VersionStore, chain: list[Manifest], stopped: Stopped) -> Path:
        manifest = chain[-1]
        whole, files = made_whole(manifest, str(self._local.path(manifest.version)), self._bucket_bytes)
        with contextlib.ExitStack() as opened:
            tensors = opened.enter_context(where.open(base))
            steps = [delta.Step(link, opened.enter_context(self._store.open(link))) for link in chain]
            failpoint(Failpoint.RELAY_READ)
            temporary = opened.enter_context(self._local.building())
            with contextlib.ExitStack() as made:
                into: dict[str, memoryview] = {}
                for file, forms in files.items():
                    into |= made.enter_context(new_file(temporary / file, forms, durable=self._local.durable))
                delta.apply(base, tensors, steps, into, stopped=stopped)
            self._store.assets(manifest, temporary)
            path = self._finish(whole, temporary)
        self.totals.deltas += 1
        self.totals.fetched_bytes += sum(link.total_bytes for link in chain) + (0 if where is self._local else base.total_bytes)
        return path

    def _finish(self, whole: Manifest, temporary: Path) -> Path:
        """Weights and assets are there and right: what else belongs to a model folder, and its name."""
        if len(files := by_file(whole)) > 1:
            (temporary / INDEX_FILE).write_bytes(index_of({file: [one.name for one in those] for file, those in files.items()}, whole.total_bytes))
        failpoint(Failpoint.RELAY_WRITTEN)
        write_file(temporary / MANIFEST_FILE, manifest_bytes(whole))
        if self._local.durable:
            sync_folder(temporary)
        target = self._local.path(whole.version)
        self._right.pop(whole.version, None)
        temporary.rename(target)
        failpoint(Failpoint.RELAY_RENAMED)
        return target

    def _here(self) -> dict[Version, int]:
        """The copies of this machine, and which folder each is: one made anew is another."""
        found: dict[Version, int] = {}
        for version in self._local.versions():
            with contextlib.suppress(FileNotFoundError):
                found[version] = self._local.path(version).stat().st_ino
        return found

    def _drop(self, listed: Mapping[Version, int], needed: Collection[Version], newest: Version | None, keep: int) -> int:
        with self._lock() as mine:
            if not mine:  # whoever holds it will do it
                return 0
            here = sorted(listed.items() & self._here().items())
            newer = [version for version, _ in here if newest is None or version <= newest]
            kept = {*needed, *newer[max(0, len(newer) - keep) :]}
            gone = [version for version, _ in here if version not in kept]
            for version in gone:
                self._local.delete(version)
                self._right.pop(version, None)
            return len(gone)


def _weights(manifest: Manifest) -> tuple[object, ...]:
    """Equal for manifests of the same weights, wherever they lie."""
    return manifest.digest, *((one.name, one.dtype, one.shape, one.checksum) for one in sorted(manifest.tensors, key=lambda one: one.name))


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
