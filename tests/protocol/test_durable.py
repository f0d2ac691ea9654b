from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.durable import append, make_folder, write_file


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What was fsynced, in order."""
    seen: list[Path] = []
    real: Callable[[int], None] = os.fsync

    def fsync(handle: int) -> None:
        seen.append(Path(f"/proc/self/fd/{handle}").readlink())
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_new_folder_s_name_is_synced_and_those_of_its_new_parents(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def test_the_first_line_of_a_file_syncs_its_name_too(tmp_path: Path, synced: list[Path]) -> None:
    path = tmp_path / "lines"
    append(path, b"1\n")
    assert synced == [path, tmp_path]
    append(path, b"2\n")
    assert synced == [path, tmp_path, path]
    assert path.read_bytes() == b"1\n2\n"


def test_a_file_is_written_once(tmp_path: Path, synced: list[Path]) -> None:
    write_file(tmp_path / "one", b"x")
    assert synced == [tmp_path / "one"]
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "one", b"y")
