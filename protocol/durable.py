"""Files and folders that are on the disk when the call returns: an fsync of a file says nothing of the folder that names it. All of it blocks."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """The names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """`folder` is there, and the names of all folders that were made for it are on the disk. `mode` is its own, not its parents'."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def write_file(path: Path, content: bytes) -> None:
    """A new file with `content`; its name is the caller's to sync. Raises: `FileExistsError`."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append(path: Path, content: bytes) -> None:
    """`content` is at the end of `path`, which is made if need be, together with its name."""
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)
