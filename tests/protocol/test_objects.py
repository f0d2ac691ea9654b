from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fsspec.registry import known_implementations

from protocol.errors import ConfigError, DecodeError
from protocol.objects import FolderStore, FsspecStore, ObjectStore, object_store


@pytest.fixture(params=["folder", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    where = {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/b", "memory": f"memory://{uuid.uuid4().hex}/x"}[request.param]
    return object_store(where, key="buffer.spill")


def test_what_was_written_reads_back_whole_and_in_part(store: ObjectStore) -> None:
    array = np.arange(5, dtype="<i4")
    store.write("a/b", [b"12", memoryview(array).cast("B"), b"", b"3"])
    assert store.read("a/b") == b"12" + array.tobytes() + b"3"
    assert store.read("a/b", 1, 4) == b"2\x00\x00"
    assert store.read("a/b", 21) == b"\x003"
    assert store.read("a/b", 22, 100) == b"3"
    store.write("a/b", [b"other"])
    assert store.read("a/b") == b"other"
    store.write("empty", [])
    assert store.read("empty") == b""


def test_names_are_ascending_and_begin_with_the_prefix(store: ObjectStore) -> None:
    assert store.names() == store.names("a/") == []
    for name in ("b", "a/2", "a/10", "a/b/c", "ab"):
        store.write(name, [b"x"])
    assert store.names() == ["a/10", "a/2", "a/b/c", "ab", "b"]
    assert store.names("a/") == ["a/10", "a/2", "a/b/c"]
    assert store.names("a/1") == ["a/10"]
    assert store.names("a") == ["a/10", "a/2", "a/b/c", "ab"]
    assert store.names("a/2/") == store.names("zz/y") == []


def test_a_deleted_object_is_gone_and_deleting_it_again_is_fine(store: ObjectStore) -> None:
    store.write("a/b/c", [b"x"])
    store.write("a/d", [b"x"])
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/there")
    assert store.names() == ["a/d"]
    for missing in ("a/b/c", "a/b", "a", "never"):
        with pytest.raises(FileNotFoundError) as caught:
            store.read(missing)
        assert missing in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "a/",
        "./a",
        ".hidden",
        "a/.part-1",
        "a\x00b",
        "a\nb",
        "a b",
        "ä",
        "x" * 201,
        "a/" * 8 + "b",
        "~",
        "*",
    ],
)
def test_a_name_that_could_leave_the_store_is_refused_everywhere(store: ObjectStore, name: str) -> None:
    for call in (lambda: store.write(name, [b"x"]), lambda: store.read(name), lambda: store.delete(name)):
        with pytest.raises(DecodeError, match="object name: got") as caught:
            call()
        assert len(str(caught.value)) < 300
    if "/" in name.strip("/") or ".." in name:
        with pytest.raises(DecodeError):
            store.names(name + "/")


# -- folders -----------------------------------------------------------------------------------------------------------------------------------


def test_an_object_in_a_folder_has_its_name_after_its_bytes_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    real: Callable[[int], None] = os.fsync

    def fsync(handle: int) -> None:
        target = Path(f"/proc/self/fd/{handle}").readlink()
        seen.append(("folder" if target.is_dir() else "file", (tmp_path / "s" / "a" / "b").exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    FolderStore(tmp_path / "s").write("a/b", [b"x"])
    assert seen == [("folder", False), ("file", False), ("folder", False), ("folder", True)]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.write("a", [b"old"])

    def fsync(_handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Input/output error") as caught:
        store.write("a", [b"new"])
    assert caught.value.filename == str(tmp_path / "a")
    assert store.read("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_an_error_with_the_object_s_path(tiny_disk: Path) -> None:
    store = FolderStore(tiny_disk / "spill")
    store.write("small", [b"x" * 1000])
    with pytest.raises(OSError, match="No space left") as caught:
        store.write("large", [b"x" * 50_000] * 20)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tiny_disk / "spill" / "large")
    assert store.names() == ["small"]
    store.write("next", [b"y" * 50_000])  # nothing of the failed write takes space
    assert store.read("next") == b"y" * 50_000


def test_a_write_cut_short_by_the_system_leaves_nothing(tmp_path: Path) -> None:
    script = """
        import resource, signal, sys
        from pathlib import Path
        from protocol.objects import FolderStore

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        store = FolderStore(Path(sys.argv[1]))
        store.write("small", [b"x" * 9_000])
        try:
            store.write("large", [b"x" * 6_000, b"y" * 6_000])
        except OSError as problem:
            print(problem.errno, problem.filename, store.names())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{errno.EFBIG} {tmp_path / 'large'} ['small']"
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_what_a_killed_writer_left_is_no_object_and_goes_in_time(tmp_path: Path) -> None:
    old, young = tmp_path / ".part-old", tmp_path / ".part-young"
    for left in (old, young):
        left.write_bytes(b"half")
    os.utime(old, (1, 1))
    store = FolderStore(tmp_path)
    assert store.names() == []
    store.write("a/b", [b"x"])
    assert (old.exists(), young.exists()) == (False, True)


@pytest.mark.faults
def test_a_writer_killed_half_way_leaves_nothing_in_a_folder_that_is_never_written_to_again(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        from pathlib import Path
        from protocol.objects import FolderStore

        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        FolderStore(Path(sys.argv[1])).write("of/one/attempt/blob", [b"half"])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    os.utime(left, (1, 1))
    FolderStore(tmp_path).write("of/another/attempt/blob", [b"x"])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "of/another/attempt/blob"]


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    problems: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(100):
                store.write(f"shared/{name}", [b"x"])
                store.delete(f"shared/{name}")
        except OSError as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert store.names() == []


def test_a_folder_that_may_not_be_read_is_an_error_and_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    store.write("a/b", [b"x"])

    def scandir(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        store.names()


def test_a_relative_folder_is_one_of_where_the_process_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = object_store("runs/spill", key="buffer.spill")
    monkeypatch.chdir("/")
    store.write("a", [b"x"])
    assert (tmp_path / "runs" / "spill" / "a").read_bytes() == b"x"
    assert store.url == str(tmp_path / "runs" / "spill")


# -- URLs --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("nowhere://x", "buffer.spill nowhere://x: Protocol not known: nowhere"),
        ("", "buffer.spill is empty: give a folder or an fsspec URL"),
        ("file://relative", "a file URL needs an absolute path"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_its_key(where: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        object_store(where, key="buffer.spill")


def test_a_missing_driver_says_what_to_install_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "absent", {"class": "no_such_driver.Files", "err": "Install no-such-driver to access it"})
    with pytest.raises(ConfigError, match=r"buffer.blobs absent://host/x: Install no-such-driver to access it; install the driver") as caught:
        object_store("absent://user:secret@host/x", key="buffer.blobs")
    assert "secret" not in str(caught.value)


class _Driver:
    """A file system that refuses, or keeps half."""

    def __init__(self, problem: Exception | None) -> None:
        self.problem = problem

    def pipe_file(self, _path: str, _content: bytes) -> None:
        if self.problem is not None:
            raise self.problem

    def info(self, _path: str) -> dict[str, int]:
        return {"size": 1}

    def invalidate_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"\[Errno 28\] No space left on device: 'memory://x/a'"),
        (PermissionError("Access Denied"), "memory://x/a: Access Denied"),
        (RuntimeError("bucket in another region"), "memory://x/a: RuntimeError: bucket in another region"),
        (None, "memory://x/a: 1 bytes were stored of 3"),
    ],
)
def test_whatever_a_driver_raises_is_an_os_error_with_the_place(problem: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore("memory://x", key="buffer.spill")
    monkeypatch.setattr(store, "_fs", _Driver(problem))
    with pytest.raises(OSError, match=said) as caught:
        store.write("a", [b"123"])
    if isinstance(problem, OSError):
        assert type(caught.value) is type(problem)
