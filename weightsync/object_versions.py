"""Versions behind an fsspec URL, as objects: no engine loads from there, every machine's mirror fetches (`weightsync.mirror`).

<url>/v2-7/model-00001-of-00003.safetensors, …   written side by side
<url>/v2-7/assets.json                          which assets go beside the weights
<url>/v2-7/manifest.json                        written last: the version is there once this is, and gone once this is
<url>/assets-1f2e3d4c/config.json, …            files of the starting model other than its weights, copied once
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import orjson

from protocol.errors import DecodeError, ManifestError, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest
from protocol.objects import ObjectStore, check_name, object_store
from protocol.versions import Version
from weightsync.safetensors_file import parts_of, read_tensors, size_of
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.spread import spread
from weightsync.version_files import (
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
    manifest_bytes,
    parse_name,
    read_manifest,
)

_ASSETS_FILE = "assets.json"
_PIECE_BYTES = 64 << 20
"""Read at a time while a file is copied, by each of a few threads."""


class ObjectVersions:
    """Versions of one run below `url`. All methods block: call them in a thread."""

    def __init__(self, url: str, model_path: str | os.PathLike[str] | None = None, *, bucket_bytes: int = 256 << 20) -> None:
        """`model_path`: the starting model, for a writer. Raises: `ConfigError` for a scheme nobody knows or a driver that is not installed."""
        self._objects: ObjectStore = object_store(url, key="weights.store")
        self._model = Path(model_path).absolute() if model_path is not None else None
        self._bucket_bytes = bucket_bytes
        self._assets = b""

    @property
    def location(self) -> str:
        return self._objects.url

    def write(self, snapshot: Snapshot) -> Manifest:
        """Make `snapshot` a version that anybody may read; see `VersionStore.write`."""
        return self._put(draft_full(snapshot, self._location(snapshot.version), self._bucket_bytes))

    def write_delta(self, snapshot: Snapshot, parent: Manifest, base: Mapping[str, TensorBytes]) -> Manifest:
        """Make `snapshot` a version that holds what differs from `parent`, or a full one where that is hardly more; see `VersionStore.write_delta`."""
        return self._put(draft_delta(snapshot, parent, base, self._location(snapshot.version), self._bucket_bytes))

    def _put(self, draft: Draft) -> Manifest:
        manifest = draft.manifest
        with contextlib.suppress(VersionGone):
            there = self.manifest(manifest.version)
            if there.digest != manifest.digest:
                raise ManifestError(f"version {manifest.version} is there with other weights in {manifest.location}: a version is written once")
            self.verify(there)
            return there
        folder = _folder(manifest.version)

        def write(file: str) -> None:
            self._objects.write(f"{folder}/{file}", parts_of(draft.files[file]))
            failpoint(Failpoint.VERSION_PART_WRITTEN)

        spread(write, draft.files)
        if (assets := self._put_assets()) is not None:
            self._objects.write(f"{folder}/{_ASSETS_FILE}", [assets])
        failpoint(Failpoint.VERSION_WRITTEN)
        self._objects.write(f"{folder}/{MANIFEST_FILE}", [manifest_bytes(manifest)])
        failpoint(Failpoint.VERSION_RENAMED)
        return manifest

    def _put_assets(self) -> bytes | None:
        """What `assets.json` says, once the assets that it names are there."""
        if self._model is None:
            return None
        if not self._assets:
            files = [path for path in asset_files(self._model) if not path.name.startswith(".")]
            folder = f"assets-{assets_mark(files)}"
            there = set(self._objects.names(f"{folder}/"))
            for path in files:
                if (name := check_name(f"{folder}/{path.name}")) not in there:
                    self._objects.write(name, [path.read_bytes()])
            self._assets = orjson.dumps([f"{folder}/{path.name}" for path in files])
        return self._assets

    def verify(self, manifest: Manifest) -> None:
        """Return once every byte the manifest names is known to be there and right; see `VersionStore.verify`."""
        with self.open(manifest) as tensors:
            check_tensors(manifest, tensors)

    @contextlib.contextmanager
    def open(self, manifest: Manifest) -> Iterator[Mapping[str, TensorBytes]]:
        """The tensors of a full version, or the blobs of a delta, read into memory whole; see `VersionStore.open`."""
        folder, files = self._place(manifest), by_file(manifest)

        def read(file: str) -> Mapping[str, TensorBytes]:
            return read_tensors(f"{self.location}/{folder}/{file}", self._read(manifest, f"{folder}/{file}"))

        parts = dict(zip(files, spread(read, files), strict=True))
        found: dict[str, TensorBytes] = {}
        for file, entries in files.items():
            found.update(held(manifest, file, entries, parts[file]))
        yield found

    def manifest(self, version: Version) -> Manifest:
        """What the store itself says of a version. Raises: `VersionGone`; `ManifestError` if it cannot be read."""
        name = f"{_folder(version)}/{MANIFEST_FILE}"
        try:
            found = read_manifest(f"{self.location}/{name}", self._objects.read(name))
        except FileNotFoundError as problem:
            raise VersionGone(f"version {version}: {self.location}/{name} is gone") from problem
        if found.version != version:
            raise ManifestError(f"{self.location}/{name} is of version {found.version}")
        return dataclasses.replace(found, location=self._location(version))

    def copy(self, manifest: Manifest, folder: Path, *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Put the files of a version, and what goes beside weights, into `folder`; see `VersionStore.copy`."""
        source = self._place(manifest)

        def fetch(file: str) -> None:
            name, low, size = f"{source}/{file}", 0, _PIECE_BYTES
            if Path(file).name != file:
                raise self._outside(manifest, file)
            with (folder / file).open("xb") as target:
                while low < size:
                    if stopped():
                        raise InterruptedError(f"version {manifest.version}: told to stop")
                    piece = self._read(manifest, name, low, low + _PIECE_BYTES)
                    target.write(piece)
                    if len(piece) < _PIECE_BYTES:
                        break
                    if not low:
                        size = size_of(name, piece)
                    low += len(piece)

        spread(fetch, by_file(manifest))
        self.assets(manifest, folder)

    def assets(self, manifest: Manifest, folder: Path) -> None:
        """Put what goes beside weights into `folder`."""
        name = f"{self._place(manifest)}/{_ASSETS_FILE}"
        try:
            names = orjson.loads(self._objects.read(name))
        except FileNotFoundError:  # its writer had no model to take any from
            return
        except ValueError as problem:
            raise ManifestError(f"version {manifest.version}: {self.location}/{name} is not JSON ({problem})") from problem
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ManifestError(f"version {manifest.version}: {self.location}/{name} is no list of names")
        for asset in names:
            (folder / asset.rpartition("/")[2]).write_bytes(self._read(manifest, asset))

    def _place(self, manifest: Manifest) -> str:
        """The folder of a version, known to be in this store."""
        if manifest.location != self._location(manifest.version) or manifest.transport != "store":
            raise ManifestError(
                f"version {manifest.version} lies in {manifest.location} by {manifest.transport}, "
                f"outside the store {self.location}: set weights.store to the trainer's"
            )
        return _folder(manifest.version)

    def _read(self, manifest: Manifest, name: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            return self._objects.read(name, start, stop)
        except FileNotFoundError as problem:
            inside = next((entry.name for entry in manifest.tensors if name.endswith(f"/{entry.file}")), "")
            raise VersionGone(f"version {manifest.version}: {self.location}/{name} is gone{f', with tensor {inside}' if inside else ''}") from problem
        except DecodeError as problem:
            raise self._outside(manifest, name.partition("/")[2]) from problem

    @staticmethod
    def _outside(manifest: Manifest, file: str) -> ManifestError:
        name = next((entry.name for entry in manifest.tensors if entry.file == file), "")
        return ManifestError(f"version {manifest.version}: tensor {name} is said to lie in {file}, outside the version's folder")

    def delete(self, version: Version) -> None:
        """Remove a version; it is gone for readers at once. Removing what is not there is fine."""
        folder = _folder(version)
        self._objects.delete(f"{folder}/{MANIFEST_FILE}")
        for name in self._objects.names(f"{folder}/"):
            self._objects.delete(name)

    def versions(self) -> tuple[Version, ...]:
        """Versions that are there, oldest first."""
        return self._there(whole=True)

    def sweep(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove what is neither known nor a parent of what is, also what was never finished; see `VersionStore.sweep`."""
        return drop(self, (version for version in self._there(whole=False) if version.incarnation <= incarnation), known)

    def drop_unlisted(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove versions of `incarnation` that are neither known nor parents of what is."""
        return drop(self, (version for version in self.versions() if version.incarnation == incarnation), known)

    def _there(self, *, whole: bool) -> tuple[Version, ...]:
        found = set()
        for name in self._objects.names("v"):
            folder, _, file = name.partition("/")
            version = parse_name(folder)
            if version is not None and (file == MANIFEST_FILE or not whole):
                found.add(version)
        return tuple(sorted(found))

    def _location(self, version: Version) -> str:
        return f"{self.location}/{_folder(version)}"


def _folder(version: Version) -> str:
    return f"v{version.incarnation}-{version.n}"
