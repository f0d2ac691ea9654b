"""Named objects in a folder or behind an fsspec URL: what is too large or too old for Redis lies here.

    object_store("runs/demo/spill", key="buffer.spill")     a folder: fsync of file and folder, atomic rename
    object_store("s3://bucket/run", key="buffer.spill")     any fsspec file system whose driver is installed

Every method blocks: call it with `asyncio.to_thread`. A name is path segments of letters, digits and `._%=+,@-`, none of which starts with a dot, so no name
leaves the store, whoever wrote it. What the store itself refuses (no space, no permission, no answer) is an `OSError` that carries the object's place.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from protocol.durable import make_folder, sync_folder
from protocol.errors import ConfigError, DecodeError
from protocol.frames import brief

_SEGMENT = re.compile(r"[A-Za-z0-9_%=+,@-][A-Za-z0-9._%=+,@-]{0,199}")
_MAX_SEGMENTS = 8
_PART = ".part-"
"""Begins the name of a file that is being written; no object is called so."""
_ABANDONED_S = 3600.0
"""A file that nobody has finished for so long is left by a kill."""
_FOLDER_TRIES = 16


class ObjectStore(Protocol):
    """Objects by name. An object is written whole, may be replaced whole, and never changes otherwise."""

    @property
    def url(self) -> str:
        """Where it is, for messages; without a password."""

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """The concatenated parts are whole and durable under `name` when this returns; after an error they are whole or not there. Replaces."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """The object, or bytes [start, stop) of it. Raises: `FileNotFoundError`."""

    def names(self, prefix: str = "") -> list[str]:
        """Objects whose names begin with `prefix`, ascending."""

    def delete(self, name: str) -> None:
        """It is not there; a missing one is fine."""


def object_store(where: str, *, key: str) -> ObjectStore:
    """The store at a folder or URL; nothing is touched yet. A relative folder is one of the folder the process was started in.

    Raises: `ConfigError` naming the configuration `key`, for a scheme nobody knows or a driver that is not installed.
    """
    if not where:
        raise ConfigError(f"{key} is empty: give a folder or an fsspec URL such as s3://bucket/folder")
    scheme = where.partition("://")[0] if "://" in where else ""
    if scheme in ("file", "local"):
        path = where.partition("://")[2]
        if not path.startswith("/"):
            raise ConfigError(f"{key} {where}: a {scheme} URL needs an absolute path, {scheme}:///folder")
        return FolderStore(Path(path))
    if not scheme:
        return FolderStore(Path(where))
    return FsspecStore(where, key=key)


def check_name(name: str) -> str:
    """`name`, if it is one. Raises: `DecodeError`: a name that is none comes from bytes of somebody else."""
    segments = name.split("/")
    if len(segments) > _MAX_SEGMENTS or not all(_SEGMENT.fullmatch(one) for one in segments):
        raise DecodeError(
            "object name", f"got {brief(name)}, expected at most {_MAX_SEGMENTS} segments of letters, digits and ._%=+,@-, none starting with a dot"
        )
    return name


def _folder_of(prefix: str) -> str:
    """The folder that everything with this prefix lies in: "a/b" of "a/b/c" and of "a/b/"; "" of "a"."""
    folder = prefix.rpartition("/")[0]
    return check_name(folder) if folder else ""


class FolderStore:
    """Objects as files below a folder, which the first write makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._tidied = False

    @property
    def url(self) -> str:
        return str(self._folder)

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        with _named(path):
            handle, part = self._new_part()
            try:
                try:
                    for one in parts:
                        _write_all(handle, one)
                    os.fsync(handle)
                finally:
                    os.close(handle)
                self._move(part, path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            sync_folder(path.parent)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._path(name)
        try:
            with path.open("rb") as file:
                file.seek(start)
                return file.read(-1 if stop is None else max(0, stop - start))
        except (IsADirectoryError, NotADirectoryError) as problem:
            raise FileNotFoundError(problem.errno, "is no object", str(path)) from problem

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for folder, _, files in os.walk(self._folder / _folder_of(prefix), onerror=_unless_missing):
            inside = Path(folder).relative_to(self._folder).as_posix()
            found += [file if inside == "." else f"{inside}/{file}" for file in files if _SEGMENT.fullmatch(file)]
        return sorted(name for name in found if name.startswith(prefix))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or gone already
            for folder in path.parents:
                if folder == self._folder:
                    break
                folder.rmdir()

    def _path(self, name: str) -> Path:
        return self._folder / check_name(name)

    def _new_part(self) -> tuple[int, Path]:
        """A new file to write to. All lie in the store's own folder: one that a kill leaves elsewhere would stay for ever where nothing is written again."""
        make_folder(self._folder)
        self._tidy()
        part = self._folder / f"{_PART}{secrets.token_hex(8)}"
        return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), part

    @staticmethod
    def _move(part: Path, path: Path) -> None:
        """A `delete` may take the folder away, empty, between its making and the move: then both again."""
        for left in reversed(range(_FOLDER_TRIES)):
            try:
                make_folder(path.parent)
                part.replace(path)
                break
            except (FileNotFoundError, FileExistsError):
                if not left:
                    raise

    def _tidy(self) -> None:
        """Delete what writers that were killed have left; once a store."""
        if self._tidied:
            return
        self._tidied = True
        for left in self._folder.glob(f"{_PART}*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    left.unlink()


class FsspecStore:
    """Objects below an fsspec URL. Whole or not there wherever the file system shows an upload only once it is complete, as object stores do; elsewhere a kill
    may leave half an object, which a reader finds by its digests. Options and credentials are the driver's business: environment and `~/.config/fsspec`.
    """

    def __init__(self, url: str, *, key: str) -> None:
        from fsspec.core import url_to_fs

        try:
            self._fs: Any
            self._fs, root = url_to_fs(url)
        except Exception as problem:
            raise ConfigError(f"{key} {_public(url)}: {_said(problem, url)}; install the driver that it names, or correct the URL") from problem
        self._root = str(root).rstrip("/")
        self._url = _public(url)

    @property
    def url(self) -> str:
        return self._url

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path, content = self._path(name), b"".join(parts)
        with self._asking(name):
            try:
                self._fs.pipe_file(path, content)
            except FileNotFoundError:  # a file system that has folders
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.pipe_file(path, content)
            self._fs.invalidate_cache()
            if (stored := self._fs.info(path)["size"]) != len(content):
                raise OSError(f"{self._url}/{name}: {stored} bytes were stored of {len(content)}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        path = self._path(name)
        with self._asking(name):
            return bytes(self._fs.cat_file(path, start=start or None, end=stop))

    def names(self, prefix: str = "") -> list[str]:
        folder = _folder_of(prefix)
        with self._asking(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(f"{self._root}/{folder}" if folder else self._root or "/")
            except FileNotFoundError:
                return []
        names = [str(path)[len(self._root) + 1 :] for path in found]
        return sorted(name for name in names if name.startswith(prefix))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._asking(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    @contextlib.contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Whatever a driver raises is an `OSError` with the object's place; drivers have trees of errors of their own."""
        try:
            yield
        except OSError as problem:
            if self._url in str(problem):
                raise
            raise _same_kind(problem, f"{self._url}/{name}") from problem
        except Exception as problem:
            raise OSError(f"{self._url}/{name}: {type(problem).__name__}: {problem}") from problem


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise _same_kind(problem, str(path)) from problem


def _same_kind(problem: OSError, place: str) -> OSError:
    """The error with the object's place for its file name, of the same class, which follows from errno."""
    if problem.errno is None:
        return type(problem)(f"{place}: {problem}")
    return OSError(problem.errno, problem.strerror or os.strerror(problem.errno), place)


def _unless_missing(problem: OSError) -> None:
    if not isinstance(problem, FileNotFoundError | NotADirectoryError):
        raise problem


def _write_all(handle: int, part: bytes | memoryview) -> None:
    left = memoryview(part).cast("B")
    while left:
        left = left[os.write(handle, left) :]


def _public(url: str) -> str:
    """The URL without user and password."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    shown = url.replace(f"{user}@", "", 1) if user else url
    return shown if shown.endswith("://") else shown.rstrip("/")


def _said(problem: Exception, url: str) -> str:
    """What the driver said; its package name is in there. Never the password."""
    return str(problem).replace(url, _public(url)) or type(problem).__name__
