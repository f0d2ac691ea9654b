"""Where versions lie: the contract of every store, and the store that is a directory or shared memory. Immutable, durable before visible.

    <folder>/v2-7/model.safetensors, manifest.json, config.json, tokenizer.json → ../assets-…/…
    <folder>/v2-8/delta.safetensors, manifest.json, …       what differs from its parent (`weightsync.delta`)
    <folder>/assets-1f2e3d4c/        files of the starting model other than its weights, copied once
    <folder>/.tmp-host-pid-…/        a version being written; renamed when whole, swept when its writer is gone

A full version's folder loads like any Hugging Face model folder; a large one is in several files, which are written side by side. A version appears by one
rename, after its bytes are on disk (shared memory has no disk to wait for).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import psutil

from protocol.config import RunConfig
from protocol.durable import make_folder, sync_folder, write_file
from protocol.errors import ManifestError, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.config import WeightsConfig, is_url, store_folder
from weightsync.lora import LoraConfig
from weightsync.safetensors_file import index_of, open_tensors, write_tensors
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.spread import spread
from weightsync.version_files import (
    INDEX_FILE,
    MANIFEST_FILE,
    Draft,
    asset_files,
    assets_mark,
    by_file,
    check_tensors,
    draft_delta,
    draft_full,
    drop,
    held,
    is_weights,
    manifest_bytes,
    parse_name,
    read_manifest,
)

_NO_LORA = LoraConfig()
_STRANGER_S = 24 * 3600.0
"""A temporary folder of another host is swept when it has not changed for so long."""


class VersionStore(Protocol):
    """Where the trainer puts versions and every reader finds them: a folder or a URL. All methods block: call them in a thread."""

    @property
    def location(self) -> str:
        """Folder or URL, for messages; without a password."""

    def write(self, snapshot: Snapshot) -> Manifest:
        """Make `snapshot` a version that anybody may read, whole. Written again with equal weights, it is the version that is there.

        Raises: `ManifestError` if the version is there with other weights; `OSError` (disk full); either way nothing becomes visible.
        """

    def write_delta(self, snapshot: Snapshot, parent: Manifest, base: Mapping[str, TensorBytes]) -> Manifest:
        """Make `snapshot` a version that holds only what differs from `parent`, whose bytes are `base`; a full one where that saves little (see `kind`).

        Raises: as `write`; `ManifestError` naming the tensor if names, types, shapes or the bytes of `base` are not the parent's, or if the parent is not an
        earlier version of the same incarnation (rule W7).
        """

    def verify(self, manifest: Manifest) -> None:
        """Return once every byte the manifest names is known to be there and right; of a delta, its own bytes: the result is checked as it is applied.

        Raises: `ManifestError` naming the tensor; `VersionGone` if the files were collected.
        """

    def open(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, TensorBytes]]:
        """The tensors of a full version, or the blobs of a delta (`weightsync.delta`) by tensor name; views that must not be used after the context. Bytes are
        not checked: call `verify` first, or check what you take.

        Raises: `ManifestError` naming the tensor; `VersionGone`.
        """

    def manifest(self, version: Version) -> Manifest:
        """What the store itself says of a version, to follow a delta to its parents. Raises: `VersionGone`; `ManifestError` if it cannot be read."""

    def copy(self, manifest: Manifest, folder: Path, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Put the files of a version, and what goes beside weights, into `folder`, which is there and empty. Nothing is checked.

        Raises: `VersionGone`; `ManifestError`; `OSError`; `InterruptedError` soon after `stopped()` is true.
        """

    def assets(self, manifest: Manifest, folder: Path) -> None:
        """Put what goes beside weights (configuration, tokenizer) into `folder`. Raises: as `copy`."""

    def delete(self, version: Version) -> None:
        """Remove a version; it is gone for readers at once. Removing what is not there is fine."""

    def versions(self) -> tuple[Version, ...]:
        """Versions that are there, oldest first."""

    def sweep(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove what no writer is writing and what is neither known nor a parent of what is. The publisher of `incarnation` may call it, before it writes.

        What a later incarnation wrote stays: a trainer that was replaced, and does not know it yet, must not delete what its successor is about to publish.
        Returns the versions removed.
        """

    def drop_unlisted(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove versions of `incarnation` that are neither known nor parents of what is: Redis lost the list that they were on."""


def open_store(config: WeightsConfig, run: RunConfig, model_path: str | os.PathLike[str] | None = None, *, lora: LoraConfig = _NO_LORA) -> VersionStore:
    """The store of this run: `DirectoryStore` for a folder or file:// URL, `ObjectVersions` for any other URL, `AdapterStore` where versions are adapters;
    nothing is touched yet.

    `model_path`: the starting model, for a writer. Raises: `ConfigError` for a scheme nobody knows or a driver that is not installed.
    """
    if lora.adapters:
        from weightsync.adapter_store import AdapterStore  # it imports this module

        return AdapterStore(store_folder(config, run), lora.settings(str(model_path or "")))
    if is_url(config.store):
        from weightsync.object_versions import ObjectVersions  # it imports this module

        return ObjectVersions(f"{config.store.rstrip('/')}/{run.name}", model_path, bucket_bytes=config.bucket_mb << 20)
    return DirectoryStore(store_folder(config, run), model_path, bucket_bytes=config.bucket_mb << 20)


class DirectoryStore:
    """Versions of one run in `folder`. All methods block: call them in a thread."""

    def __init__(self, folder: str | os.PathLike[str], model_path: str | os.PathLike[str] | None = None, *, bucket_bytes: int = 256 << 20) -> None:
        """`model_path`: the starting model, whose configuration and tokenizer go beside every version; a reader needs none."""
        self.folder = Path(folder).absolute()
        self._model = Path(model_path).absolute() if model_path is not None else None
        self._bucket_bytes = bucket_bytes
        self._assets: Path | None = None

    @property
    def location(self) -> str:
        return str(self.folder)

    @property
    def durable(self) -> bool:
        """Whether the folder is on something that outlives the machine's memory."""
        return not self.folder.is_relative_to("/dev/shm")  # noqa: S108 - compared, not written to

    def path(self, version: Version) -> Path:
        return self.folder / f"v{version.incarnation}-{version.n}"

    def write(self, snapshot: Snapshot) -> Manifest:
        """Make `snapshot` a version that anybody may read. Written again with equal weights, it is the version that is there.

        Raises: `ManifestError` if the version is there with other weights; `OSError` (disk full); either way nothing becomes visible.
        """
        return self._put(draft_full(snapshot, str(self.path(snapshot.version)), self._bucket_bytes))

    def write_delta(self, snapshot: Snapshot, parent: Manifest, base: Mapping[str, TensorBytes]) -> Manifest:
        """Make `snapshot` a version that holds what differs from `parent`, or a full one where that is hardly more; see `VersionStore.write_delta`."""
        return self._put(draft_delta(snapshot, parent, base, str(self.path(snapshot.version)), self._bucket_bytes))

    def _put(self, draft: Draft) -> Manifest:
        manifest, target = draft.manifest, self.path(draft.manifest.version)
        with self.building() as temporary:

            def write(file: str) -> None:
                write_tensors(temporary / file, draft.files[file], durable=self.durable)
                failpoint(Failpoint.VERSION_PART_WRITTEN)

            spread(write, draft.files)
            if len(draft.files) > 1:
                self._write_file(temporary / INDEX_FILE, index_of({file: list(those) for file, those in draft.files.items()}, manifest.total_bytes))
            self._link_assets(temporary)
            self._write_file(temporary / MANIFEST_FILE, manifest_bytes(manifest))
            self._sync(temporary)
            failpoint(Failpoint.VERSION_WRITTEN)
            try:
                temporary.rename(target)
            except OSError as problem:
                if not target.is_dir():
                    raise
                return self._adopt(manifest, problem)
            self._sync(self.folder)
            failpoint(Failpoint.VERSION_RENAMED)
        return manifest

    @contextlib.contextmanager
    def building(self) -> Iterator[Path]:
        """A new folder that no reader sees; gone after the context unless it was renamed."""
        make_folder(self.folder, mode=0o700)
        temporary = self._unseen()
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _adopt(self, manifest: Manifest, problem: OSError) -> Manifest:
        """The version is there already: fine if it holds the same weights and they are whole."""
        try:
            there = self.manifest(manifest.version)
        except ManifestError:
            there = None
        if there is None or there.digest != manifest.digest:
            raise ManifestError(f"version {manifest.version} is there with other weights in {manifest.location}: a version is written once") from problem
        self.verify(there)
        return there

    def verify(self, manifest: Manifest) -> None:
        """Return once every byte the manifest names is known to be there and right; of a delta, its own bytes.

        Raises: `ManifestError` naming the tensor; `VersionGone` if the files were collected.
        """
        with self.open(manifest) as tensors:
            check_tensors(manifest, tensors)
        files = by_file(manifest)
        try:
            found = list(Path(manifest.location).iterdir())
        except FileNotFoundError as problem:
            raise VersionGone(f"version {manifest.version}: {manifest.location} is gone") from problem
        for path in found:
            if is_weights(path) and path.name not in files:
                raise ManifestError(f"version {manifest.version}: {path} is not in the manifest, and an engine would load it")

    @contextlib.contextmanager
    def open(self, manifest: Manifest) -> Iterator[Mapping[str, TensorBytes]]:
        """The tensors of a full version, or the blobs of a delta, as views of memory maps; see `VersionStore.open`."""
        folder, files = self._place(manifest), by_file(manifest)
        paths = {file: self._inside(manifest, folder, file) for file in files}
        found: dict[str, TensorBytes] = {}
        with contextlib.ExitStack() as opened:
            for file, entries in files.items():
                try:
                    tensors = opened.enter_context(open_tensors(paths[file]))
                except FileNotFoundError as problem:
                    raise VersionGone(f"version {manifest.version}: {paths[file]} is gone, with tensor {entries[0].name}") from problem
                found.update(held(manifest, file, entries, tensors))
            yield found

    def locate(self, manifest: Manifest) -> Path:
        """The folder to load, known to lie in this store.

        Raises: `ManifestError` for another transport or a place outside the store; `VersionGone` if it is not there.
        """
        if manifest.kind != "full" or manifest.transport != "store":
            raise ManifestError(f"version {manifest.version} is {manifest.kind} by {manifest.transport}: this process takes full versions by store")
        return self._place(manifest)

    def _place(self, manifest: Manifest) -> Path:
        folder, root = _followed(manifest, Path(manifest.location)), self.folder.resolve()
        if folder == root or not folder.is_relative_to(root):
            raise ManifestError(f"version {manifest.version} lies in {manifest.location}, outside the store {self.folder}: set weights.store to the trainer's")
        if not folder.is_dir():
            raise VersionGone(f"version {manifest.version}: {folder} is gone")
        return folder

    @staticmethod
    def _inside(manifest: Manifest, folder: Path, file: str) -> Path:
        """The file of a version, known to lie in its folder, whatever links there are."""
        path = _followed(manifest, folder / file)
        if Path(file).name != file or not path.is_relative_to(folder):
            name = next((entry.name for entry in manifest.tensors if entry.file == file), "")
            raise ManifestError(f"version {manifest.version}: tensor {name} is said to lie in {file}, outside the version's folder")
        return path

    def manifest(self, version: Version) -> Manifest:
        """What the store itself says of a version. Raises: `VersionGone`; `ManifestError` if it cannot be read."""
        path = self.path(version) / MANIFEST_FILE
        try:
            found = read_manifest(str(path), path.read_bytes())
        except FileNotFoundError as problem:
            raise VersionGone(f"version {version}: {path} is gone") from problem
        if found.version != version:
            raise ManifestError(f"{path} is of version {found.version}")
        return dataclasses.replace(found, location=str(self.path(version)))

    def copy(self, manifest: Manifest, folder: Path, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Put the files of a version, and what goes beside weights, into `folder`; see `VersionStore.copy`."""
        source = self._place(manifest)

        def fetch(file: str) -> None:
            if stopped():
                raise InterruptedError(f"version {manifest.version}: told to stop")
            path = self._inside(manifest, source, file)
            try:
                shutil.copyfile(path, folder / file)
            except FileNotFoundError as problem:
                raise VersionGone(f"version {manifest.version}: {path} is gone") from problem

        spread(fetch, by_file(manifest))
        self.assets(manifest, folder)

    def assets(self, manifest: Manifest, folder: Path) -> None:
        """Put what goes beside weights into `folder`."""
        source = self._place(manifest)
        try:
            for path in source.iterdir():
                if path.is_symlink() and path.resolve().is_relative_to(self.folder.resolve()):
                    shutil.copyfile(path, folder / path.name)
        except FileNotFoundError as problem:
            raise VersionGone(f"version {manifest.version}: {source} is gone") from problem

    def delete(self, version: Version) -> None:
        """Remove a version; it is gone for readers at once. Removing what is not there is fine."""
        doomed = self._unseen()
        try:
            self.path(version).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def versions(self) -> tuple[Version, ...]:
        """Versions that are there, oldest first."""
        return tuple(sorted(version for path in self.folder.glob("v*-*") if (version := parse_name(path.name)) is not None))

    def sweep(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove what no writer is writing and no manifest names: leftovers of a crash between writing and publishing, or of an earlier run.

        See `VersionStore.sweep`. What is known keeps its chain of parents.
        """
        for temporary in self.folder.glob(".tmp-*"):
            host, _, pid = temporary.name.removeprefix(".tmp-").rpartition("-")[0].rpartition("-")
            try:
                age_s = time.time() - temporary.stat().st_mtime
            except FileNotFoundError:
                continue
            here = host == socket.gethostname() and pid.isdigit()
            # This process has written nothing yet: what carries its number is of one before it, as in a container where every life has the same.
            gone = int(pid) == os.getpid() or not psutil.pid_exists(int(pid)) if here else age_s > _STRANGER_S
            if gone:
                shutil.rmtree(temporary, ignore_errors=True)
        return drop(self, (version for version in self.versions() if version.incarnation <= incarnation), known)

    def drop_unlisted(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove versions of `incarnation` that no manifest names any more: Redis lost the list that they were on. Parents of what is known stay.

        Its publisher may call it between two writes; what others write is not looked at.
        """
        return drop(self, (version for version in self.versions() if version.incarnation == incarnation), known)

    def _unseen(self) -> Path:
        return self.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"

    def _link_assets(self, folder: Path) -> None:
        """Configuration and tokenizer beside the weights, as relative links to one copy in the store."""
        if self._model is None:
            return
        if self._assets is None or not self._assets.is_dir():
            self._assets = self._copy_assets(self._model)
        for asset in self._assets.iterdir():
            (folder / asset.name).symlink_to(Path("..") / self._assets.name / asset.name)

    def _copy_assets(self, model: Path) -> Path:
        sources = asset_files(model)
        target = self.folder / f"assets-{assets_mark(sources)}"
        if target.is_dir():
            return target
        with self.building() as temporary:
            for path in sources:
                self._write_file(temporary / path.name, path.read_bytes())
            self._sync(temporary)
            try:
                temporary.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
        return target

    def _write_file(self, path: Path, content: bytes) -> None:
        if self.durable:
            write_file(path, content)
        else:
            path.write_bytes(content)

    def _sync(self, folder: Path) -> None:
        if self.durable:
            sync_folder(folder)


def _followed(manifest: Manifest, path: Path) -> Path:
    """Where it leads. Raises: `ManifestError` for links that lead nowhere."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as problem:
        raise ManifestError(f"version {manifest.version}: {path} leads nowhere ({problem})") from problem
