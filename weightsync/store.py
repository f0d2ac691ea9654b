"""The `store` transport: versions as safetensors folders in a directory or shared memory, immutable, durable before visible.

    <folder>/v2-7/model.safetensors, manifest.json, config.json, tokenizer.json → ../assets-…/…
    <folder>/assets-1f2e3d4c/        files of the starting model other than its weights, copied once
    <folder>/.tmp-host-pid-…/        a version being written; renamed when whole, swept when its writer is gone

A version folder loads like any Hugging Face model folder. It appears by one rename, after its bytes are on disk (shared memory has no disk to wait for).
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path

import orjson
import psutil
import xxhash

from protocol.codec import to_json
from protocol.durable import make_folder, sync_folder, write_file
from protocol.errors import ManifestError, VersionGone
from protocol.failpoints import Failpoint, failpoint
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync.safetensors_file import open_tensors, write_tensors
from weightsync.snapshot import Snapshot, TensorBytes, weights_digest

WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_MAX_ASSET_BYTES = 256 << 20
_STRANGER_S = 24 * 3600.0
"""A temporary folder of another host is swept when it has not changed for so long."""


class DirectoryStore:
    """Versions of one run in `folder`. All methods block: call them in a thread."""

    def __init__(self, folder: str | os.PathLike[str], model_path: str | os.PathLike[str] | None = None) -> None:
        """`model_path`: the starting model, whose configuration and tokenizer go beside every version; a reader needs none."""
        self.folder = Path(folder).absolute()
        self._model = Path(model_path).absolute() if model_path is not None else None
        self._assets: Path | None = None

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
        make_folder(self.folder, mode=0o700)
        manifest = self._describe(snapshot)
        target = self.path(snapshot.version)
        temporary = self.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            temporary.mkdir()
            write_tensors(temporary / WEIGHTS_FILE, snapshot.tensors, durable=self.durable)
            self._write_file(temporary / MANIFEST_FILE, orjson.dumps(to_json(manifest), option=orjson.OPT_INDENT_2))
            self._link_assets(temporary)
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
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return manifest

    def verify(self, manifest: Manifest) -> None:
        """Return once every byte the manifest names is known to be there and right.

        Raises: `ManifestError` naming the tensor; `VersionGone` if the files were collected.
        """
        files: dict[str, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            files.setdefault(entry.file, []).append(entry)
        folder = self.locate(manifest)
        for file, entries in files.items():
            path = (folder / file).resolve()
            if not path.is_relative_to(folder):
                raise ManifestError(f"version {manifest.version}: tensor {entries[0].name} is said to lie in {file}, outside the version's folder")
            try:
                with open_tensors(path) as tensors:
                    for entry in entries:
                        self._check(manifest.version, entry, tensors.get(entry.name))
            except FileNotFoundError as problem:
                raise VersionGone(f"version {manifest.version}: {path} is gone, with tensor {entries[0].name}") from problem

    def locate(self, manifest: Manifest) -> Path:
        """The folder to load, known to lie in this store.

        Raises: `ManifestError` for another transport or a place outside the store; `VersionGone` if it is not there.
        """
        if manifest.kind != "full" or manifest.transport != "store":
            raise ManifestError(f"version {manifest.version} is {manifest.kind} by {manifest.transport}: this process takes full versions by store")
        folder, root = Path(manifest.location).resolve(), self.folder.resolve()
        if folder == root or not folder.is_relative_to(root):
            raise ManifestError(f"version {manifest.version} lies in {manifest.location}, outside the store {self.folder}: set weights.store to the trainer's")
        if not folder.is_dir():
            raise VersionGone(f"version {manifest.version}: {folder} is gone")
        return folder

    def delete(self, version: Version) -> None:
        """Remove a version; it is gone for readers at once. Removing what is not there is fine."""
        doomed = self.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            self.path(version).rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def versions(self) -> tuple[Version, ...]:
        """Versions that are there, oldest first."""
        found = []
        for path in self.folder.glob("v*-*"):
            incarnation, _, n = path.name.removeprefix("v").partition("-")
            if incarnation.isdigit() and n.isdigit():
                found.append(Version(int(incarnation), int(n)))
        return tuple(sorted(found))

    def sweep(self, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove what no writer is writing and no manifest names: leftovers of a crash between writing and publishing, or of an earlier run.

        Only the run's one publisher may call it, before it writes. Returns the versions removed.
        """
        for temporary in self.folder.glob(".tmp-*"):
            host, pid = temporary.name.removeprefix(".tmp-").rsplit("-", 2)[:2]
            try:
                age_s = time.time() - temporary.stat().st_mtime
            except FileNotFoundError:
                continue
            gone = not psutil.pid_exists(int(pid)) if host == socket.gethostname() and pid.isdigit() else age_s > _STRANGER_S
            if gone:
                shutil.rmtree(temporary, ignore_errors=True)
        return self._drop(version for version in self.versions() if version not in known)

    def drop_unlisted(self, incarnation: int, known: Collection[Version]) -> tuple[Version, ...]:
        """Remove versions of `incarnation` that no manifest names any more: Redis lost the list that they were on.

        Its publisher may call it between two writes; what others write is not looked at.
        """
        return self._drop(version for version in self.versions() if version.incarnation == incarnation and version not in known)

    def _drop(self, versions: Iterable[Version]) -> tuple[Version, ...]:
        dropped = tuple(versions)
        for version in dropped:
            self.delete(version)
        return dropped

    # -- parts ---------------------------------------------------------------------------------------------------------------------------------

    def _describe(self, snapshot: Snapshot) -> Manifest:
        entries = tuple(
            TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, file=WEIGHTS_FILE, checksum=xxhash.xxh3_64_hexdigest(tensor.data))
            for name, tensor in sorted(snapshot.tensors.items())
        )
        return Manifest(
            version=snapshot.version,
            kind="full",
            parent="",
            tensors=entries,
            digest=snapshot.digest or weights_digest(snapshot.tensors),
            transport="store",
            location=str(self.path(snapshot.version)),
            total_bytes=sum(tensor.nbytes for tensor in snapshot.tensors.values()),
            created_at=time.time(),
        )

    def _adopt(self, manifest: Manifest, problem: OSError) -> Manifest:
        """The version is there already: fine if it holds the same weights and they are whole."""
        try:
            digest = orjson.loads((Path(manifest.location) / MANIFEST_FILE).read_bytes())["digest"]
        except (OSError, ValueError, KeyError):
            digest = ""
        if digest != manifest.digest:
            raise ManifestError(f"version {manifest.version} is there with other weights in {manifest.location}: a version is written once") from problem
        self.verify(manifest)
        return manifest

    @staticmethod
    def _check(version: Version, entry: TensorEntry, tensor: TensorBytes | None) -> None:
        if tensor is None:
            raise ManifestError(f"version {version}: tensor {entry.name} is not in {entry.file}")
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise ManifestError(f"version {version}: tensor {entry.name} is {tensor.dtype} {tensor.shape}, expected {entry.dtype} {entry.shape}")
        if (checksum := xxhash.xxh3_64_hexdigest(tensor.data)) != entry.checksum:
            raise ManifestError(f"version {version}: tensor {entry.name} has checksum {checksum}, expected {entry.checksum}: its bytes are damaged")

    def _link_assets(self, folder: Path) -> None:
        """Configuration and tokenizer beside the weights, as relative links to one copy in the store."""
        if self._model is None:
            return
        if self._assets is None or not self._assets.is_dir():
            self._assets = self._copy_assets(self._model)
        for asset in self._assets.iterdir():
            (folder / asset.name).symlink_to(Path("..") / self._assets.name / asset.name)

    def _copy_assets(self, model: Path) -> Path:
        sources = sorted(path for path in model.iterdir() if path.is_file() and _is_asset(path))
        if not any(path.name == "config.json" for path in sources):
            raise ManifestError(f"{model} has no config.json: model.path must be a Hugging Face model folder")
        mark = xxhash.xxh3_64()
        for path in sources:
            stat = path.stat()
            mark.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        target = self.folder / f"assets-{mark.hexdigest()}"
        if target.is_dir():
            return target
        temporary = self.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        try:
            temporary.mkdir()
            for path in sources:
                self._write_file(temporary / path.name, path.read_bytes())
            self._sync(temporary)
            try:
                temporary.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def _write_file(self, path: Path, content: bytes) -> None:
        if self.durable:
            write_file(path, content)
        else:
            path.write_bytes(content)

    def _sync(self, folder: Path) -> None:
        if self.durable:
            sync_folder(folder)


def _is_asset(path: Path) -> bool:
    return (
        path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json") and path.name != MANIFEST_FILE and path.stat().st_size <= _MAX_ASSET_BYTES
    )
