from __future__ import annotations

import dataclasses
import errno
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from buffer.blobs import BlobStore
from protocol.errors import ConfigError, PayloadLost
from protocol.messages import Attempt, BlobRef, GroupHeader, RolloutGroup, Seq, SlotToken
from protocol.objects import FolderStore, ObjectStore, object_store
from tests.protocol.samples import same_group

from .recorded import a_group

SLOT = (Seq(4), Attempt(2), SlotToken("9f3c"))
EXTRAS = {
    "experts": np.arange(600, dtype="<i2").reshape(10, 20, 3),
    "pixels/0": np.asfortranarray(np.arange(400, dtype=">f4").reshape(20, 20)),
    "small": np.ones(3, dtype="|u1"),
    "none": np.zeros((0, 4), dtype="<f4"),
}


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return object_store(str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}", key="buffer.blobs")


def put(store: ObjectStore, extras: dict[str, np.ndarray], least_bytes: int = 100) -> tuple[RolloutGroup, GroupHeader]:
    group, recorded = a_group(4, extras=extras)
    kept, blobs = BlobStore(store, "demo").put(*SLOT, group, least_bytes=least_bytes)
    return kept, dataclasses.replace(recorded.header, blobs=blobs)


def test_large_extras_leave_the_group_and_come_back_equal(store: ObjectStore) -> None:
    kept, header = put(store, EXTRAS)
    assert set(kept.extras) == {"small", "none"}
    assert store.names() == ["demo/4-2-9f3c/experts", "demo/4-2-9f3c/pixels%2F0"]
    assert header.blobs["experts"] == BlobRef(name="demo/4-2-9f3c/experts", dtype="<i2", shape=(10, 20, 3), bytes=1200, digest=header.blobs["experts"].digest)
    restored = BlobStore(store, "another run").restore(header, kept)
    little = {name: np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")) for name, array in EXTRAS.items()}
    assert same_group(restored, a_group(4, extras=little)[0])
    assert not restored.extras["experts"].flags.writeable


def test_with_a_least_size_of_nothing_everything_leaves(store: ObjectStore) -> None:
    kept, header = put(store, EXTRAS, least_bytes=0)
    assert dict(kept.extras) == {}
    assert set(BlobStore(store, "demo").restore(header, kept).extras) == set(EXTRAS)


def test_a_group_without_large_extras_is_handed_back_as_it_is(store: ObjectStore) -> None:
    group, recorded = a_group(4, extras={"small": EXTRAS["small"]})
    blobs = BlobStore(store, "demo")
    assert blobs.put(*SLOT, group, least_bytes=100) == (group, {})
    assert blobs.restore(recorded.header, group) is group
    assert store.names() == []


def test_bytes_go_to_the_store_from_where_they_lie(tmp_path: Path) -> None:
    class Handed(FolderStore):
        parts: Sequence[bytes | memoryview] = ()

        def write(self, _name: str, parts: Sequence[bytes | memoryview]) -> None:
            self.parts = parts

    store = Handed(tmp_path)
    put(store, {"experts": EXTRAS["experts"]})
    (part,) = store.parts
    assert np.shares_memory(np.frombuffer(part, dtype="|u1"), EXTRAS["experts"])


@pytest.mark.parametrize("name", ["", ".", "..", "../../etc/passwd", "/abs", ".part-1", "a b\n\x00ä", "x" * 5000, "%2E", "~", "a/b/c"])
def test_an_extra_may_be_called_anything(store: ObjectStore, name: str) -> None:
    others = {"%": EXTRAS["small"], "x" * 5001: EXTRAS["small"]}
    kept, header = put(store, {name: EXTRAS["experts"], **others}, least_bytes=0)
    assert all(one.startswith("demo/4-2-9f3c/") and one.count("/") == 2 for one in store.names())
    assert np.array_equal(BlobStore(store, "demo").restore(header, kept).extras[name], EXTRAS["experts"])
    assert len(store.names()) == 3


def test_a_blob_that_is_gone_or_damaged_is_a_lost_payload(store: ObjectStore) -> None:
    kept, header = put(store, EXTRAS)
    blobs, name = BlobStore(store, "demo"), header.blobs["experts"].name
    data = bytearray(store.read(name))
    data[7] ^= 1
    for damage in (bytes(data), bytes(data[:-1]), b""):
        store.write(name, [damage])
        with pytest.raises(PayloadLost, match=rf"payload of group 4: blob {name} of extra 'experts': {len(damage)} bytes do not match digest"):
            blobs.restore(header, kept)
    store.delete(name)
    with pytest.raises(PayloadLost, match="is gone"):
        blobs.restore(header, kept)


@pytest.mark.parametrize("changes", [{"name": "../../etc/passwd"}, {"name": "/etc/passwd"}, {"dtype": "O"}, {"shape": (7,)}, {"shape": (1 << 62, 1 << 62)}])
def test_a_hostile_reference_is_a_lost_payload(store: ObjectStore, changes: dict[str, object]) -> None:
    kept, header = put(store, {"experts": EXTRAS["experts"]})
    hostile = dataclasses.replace(header, blobs={"experts": dataclasses.replace(header.blobs["experts"], **changes)})
    with pytest.raises(PayloadLost, match="payload of group 4: blob"):
        BlobStore(store, "demo").restore(hostile, kept)


class _Failing(FolderStore):
    """Refuses the third write."""

    writes = 0

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self.writes += 1
        if self.writes == 3:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        super().write(name, parts)


def test_extras_that_do_not_all_fit_leave_none_and_touch_nothing_else(tmp_path: Path) -> None:
    store = _Failing(tmp_path)
    group, _ = a_group(4, extras=EXTRAS)
    store.write("demo/4-2-9f3c/before", [b"x"])
    with pytest.raises(OSError, match="No space left"):
        BlobStore(store, "demo").put(*SLOT, group, least_bytes=100)
    assert store.names() == ["demo/4-2-9f3c/before"]


def test_an_attempt_s_blobs_are_deleted_together_and_no_others(store: ObjectStore) -> None:
    put(store, EXTRAS)
    blobs = BlobStore(store, "demo")
    group, _ = a_group(4, extras={"experts": EXTRAS["experts"]})
    others = [(Seq(4), Attempt(2), SlotToken("9f3c1")), (Seq(4), Attempt(20), SlotToken("9f3c")), (Seq(44), Attempt(2), SlotToken("9f3c"))]
    for other in others:
        blobs.put(*other, group, least_bytes=1000)
    BlobStore(store, "demo2").put(*SLOT, group, least_bytes=1000)
    blobs.delete(blobs.folder(*SLOT))
    blobs.delete(blobs.folder(*SLOT))
    assert store.names() == sorted([f"{blobs.folder(*other)}experts" for other in others] + ["demo2/4-2-9f3c/experts"])


def test_a_process_that_sees_another_folder_than_the_trainer_is_refused(tmp_path: Path) -> None:
    shared, elsewhere = FolderStore(tmp_path / "shared"), FolderStore(tmp_path / "elsewhere")
    BlobStore(shared, "demo").claim()
    BlobStore(shared, "demo").check()
    for store, run in ((elsewhere, "demo"), (shared, "other")):
        with pytest.raises(ConfigError, match=r"buffer\.blobs of the run is .* here, which is not what its trainer sees"):
            BlobStore(store, run).check()
    assert shared.names() == ["demo/claimed"]


def test_a_full_disk_takes_no_blobs_and_leaves_none(tiny_disk: Path) -> None:
    blobs = BlobStore(FolderStore(tiny_disk), "demo")
    blobs.claim()
    free = os.statvfs(tiny_disk)
    (tiny_disk / "full").write_bytes(b"x" * (free.f_bavail * free.f_bsize))
    blobs.check()  # an empty probe needs no block
    group, _ = a_group(4, extras=EXTRAS)
    with pytest.raises(OSError, match="No space left"):
        blobs.put(*SLOT, group, least_bytes=100)
    assert FolderStore(tiny_disk).names("demo/") == ["demo/claimed"]
