from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import Fenced, RedisUnavailable, StepOrder, WeightError
from protocol.messages import Manifest
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync import publisher as publisher_module
from weightsync.cast import cast
from weightsync.config import WeightsConfig
from weightsync.delta import Step, apply
from weightsync.pointer import Pointer
from weightsync.publisher import Publisher
from weightsync.snapshot import HeldWeights, Snapshot, TensorBytes, weights_digest
from weightsync.store import DirectoryStore


class Gate(DirectoryStore):
    """A real store whose writes wait for the test."""

    def __init__(self, folder: Path, model_path: Path) -> None:
        super().__init__(folder, model_path)
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.written: list[Version] = []

    def write(self, snapshot: Callable[[Version], Snapshot]):
        self.started.release()
        assert self.go.acquire(timeout=100)
        self.written.append(snapshot.version)
        return super().write(snapshot)


@pytest.fixture
def gate(store: DirectoryStore, model_path: Path):
    return Gate(store.folder, model_path)


async def troubled(publisher: Publisher, words: str) -> None:
    """Return once it says so."""
    async with asyncio.timeout(100):
        while words not in publisher.trouble:
            await asyncio.sleep(0.01)


async def test_what_is_being_written_is_finished_and_the_newest_of_the_rest_follows(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        for n in (2, 3, 4):
            publisher.submit(snapshot(Version(1, n)), 1)
        assert publisher.busy
        gate.go.release(2)
        await publisher.drain(100)
        assert not publisher.busy
        assert publisher.published.version == Version(1, 4)
    assert gate.written == [Version(1, 1), Version(1, 4)]
    assert await rig.channel.newest_version() == Version(1, 4)


async def test_nothing_is_visible_before_it_is_written(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        assert await rig.channel.newest() is None
        gate.go.release()
        await publisher.drain(100)
        gate.verify(await rig.channel.newest())


async def test_leaving_finishes_the_write_under_way_and_drops_what_waits(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        publisher.submit(snapshot(Version(1, 2)), 1)
        gate.go.release()
    assert gate.written == [Version(1, 1)]
    assert await rig.channel.newest_version() == Version(1, 1)


async def test_leaving_finishes_the_write_under_way_also_when_it_is_cancelled_again_and_again(rig: Any, gate: Gate):
    await rig.attach(1, 9)
    snapshot, memory = held(slowly_changing(Version(1, 1)))

    async def leave() -> None:
        async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
            publisher.submit(snapshot, 1)
            await asyncio.to_thread(gate.started.acquire)
            inside.set()

    inside = asyncio.Event()
    leaving = asyncio.create_task(leave())
    await inside.wait()
    for _ in range(3):
        leaving.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not leaving.done()
    assert not memory.released, "it is being read"
    gate.go.release()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert memory.released
    assert await rig.channel.newest_version() == Version(1, 1)


async def test_a_write_that_never_ends_is_given_up(rig: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(publisher_module, "_LAST_WRITE_S", 0.05)
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
        publisher.submit(slowly_changing(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
    assert await rig.channel.newest() is None
    assert "publisher:write was not done" in caplog.text
    gate.go.release()


async def test_a_replaced_trainer_learns_it_from_its_publisher(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(2, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        with pytest.raises(Fenced):
            await publisher.drain(100)
        with pytest.raises(Fenced):
            publisher.submit(snapshot(Version(1, 4)), 1)
    assert await rig.channel.newest() is None


async def test_publishing_before_trained_is_a_bug_that_shows(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 3)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 4)), 1)
        with pytest.raises(StepOrder):
            await publisher.drain(100)


async def test_a_full_disk_is_survived(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch):
    await rig.attach(1, 9)
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.01,))
    real, left = DirectoryStore.write, iter([28, 28])

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        if (number := next(left, None)) is not None:
            raise OSError(number, "No space left on device")
        return real(self, snap)

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        await publisher.drain(100)
        assert publisher.trouble == ""
    assert await rig.channel.newest_version() == Version(1, 3)


async def test_a_disk_that_is_full_of_what_nobody_needs_is_emptied(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    await rig.attach(1, 9)
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.01,))
    real, tried = DirectoryStore.write, asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        if len(self.versions()) >= 3:
            loop.call_soon_threadsafe(tried.set)
            raise OSError(28, "No space left on device")
        return real(self, snap)

    monkeypatch.setattr(DirectoryStore, "write", write)
    reader = Pointer(rig.redis, rig.keys, "somebody")
    async with Publisher(rig.channel, store, config=WeightsConfig(keep=2)) as publisher:
        publisher.submit(snapshot(Version(1, 0)), 1)
        await publisher.drain(100)
        async with reader.holding(Version(1, 0)):
            for n in (1, 2):
                publisher.submit(snapshot(Version(1, n)), 1)
                await publisher.drain(100)
            publisher.submit(snapshot(Version(1, 3)), 1)
            await tried.wait()
        await publisher.drain(100)
    assert store.versions() == (Version(1, 2), Version(1, 3))


async def test_leftovers_that_cannot_be_deleted_do_not_end_it(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    await rig.attach(1, 9)
    real, refused = DirectoryStore.sweep, iter([30])

    def sweep(self: DirectoryStore, incarnation: int, known: Any) -> Any:
        if (number := next(refused, None)) is not None:
            raise OSError(number, "Read-only file system")
        return real(self, incarnation, known)

    monkeypatch.setattr(DirectoryStore, "sweep", sweep)
    store.write(snapshot(Version(1, 8)))  # a leftover
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        for n in (1, 2):
            publisher.submit(snapshot(Version(1, n)), 1)
            await publisher.drain(100)
    assert Version(1, 8) not in store.versions()


async def test_files_that_somebody_removed_are_told_of(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    await rig.attach(1, 9)
    monkeypatch.setattr(publisher_module, "_POINTER_S", 0.01)
    monkeypatch.setattr(publisher_module, "_FILES_S", 0.01)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await publisher.drain(100)
        store.delete(Version(1, 1))
        await troubled(publisher, "1:1 is gone")
        publisher.submit(snapshot(Version(1, 2)), 1)
        await publisher.drain(100)
        assert publisher.trouble == ""


async def test_a_deadline_names_what_is_in_the_way(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch):
    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        await troubled(publisher, "No space left")
        with pytest.raises(WeightError, match=r"not published within 1 s: version 1:3 .* No space left"):
            await publisher.drain(1)


async def test_old_versions_go_as_new_ones_come(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    async with Publisher(rig.channel, store, config=WeightsConfig(keep=2)) as publisher:
        for n in range(8):
            publisher.submit(snapshot(Version(1, n)), 1)
            await publisher.drain(100)
    assert store.versions() == await rig.channel.versions() == (Version(1, 6), Version(1, 7))


async def test_leftovers_of_an_earlier_run_are_swept_before_the_first_version(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    other = snapshot(Version(1, 7))
    store.write(type(other)(version=Version(1, 0), tensors=other.tensors))
    await rig.attach(1, 0)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 0)), 1)
        await publisher.drain(100)
    store.verify(await rig.channel.newest())


async def test_a_trainer_that_was_replaced_before_its_first_version_deletes_nothing_of_its_successor(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]
):
    await rig.publish(3, 2)
    await rig.attach(3, 3)
    successors = store.write(snapshot(Version(3, 3)))  # about to be published
    async with Publisher(rig.channel, store, config=WeightsConfig()) as late:
        late.submit(snapshot(Version(2, 2)), 2)
        with pytest.raises(Fenced):
            await late.drain(100)
    store.verify(successors)
    await rig.channel.publish(successors, 3)


async def test_a_pointer_that_redis_lost_is_moved_forward_again(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher_module, "_POINTER_S", 0.02)
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await publisher.drain(100)
        before = await rig.redis.hgetall(rig.keys.weights)
        publisher.submit(snapshot(Version(1, 2)), 1)
        await publisher.drain(100)
        await rig.redis.delete(rig.keys.weights)
        await rig.redis.hset(rig.keys.weights, mapping=before)
        while await rig.channel.newest_version() != Version(1, 2):
            mark = rig.wakes.mark(Topic.WEIGHTS)
            await rig.wakes.wait(Topic.WEIGHTS, since=mark, timeout_s=0.05)
        assert (await rig.channel.newest()).digest == publisher.published.digest


async def test_versions_that_redis_lost_do_not_fill_the_store(rig: Any, redis: Any, keys: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(2, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig(keep=3)) as publisher:
        for n in (1, 2):
            publisher.submit(snapshot(Version(2, n)), 2)
            await publisher.drain(100)
        store.write(snapshot(Version(3, 0)))  # its trainer is about to publish it
        await redis.hdel(keys.weights, "manifest:2:1")
        publisher.submit(snapshot(Version(2, 3)), 2)
        await publisher.drain(100)
    assert store.versions() == (Version(2, 2), Version(2, 3), Version(3, 0))


async def test_a_version_is_offered_again_while_redis_has_lost_the_attachment(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.02,))
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(2, 9)), 2)
        await troubled(publisher, "lost the attachment")
        with pytest.raises(WeightError, match="lost the attachment"):
            await publisher.drain(0.1)
        await rig.attach(2, 9)
        await publisher.drain(100)
        assert await rig.channel.newest_version() == Version(2, 9)


async def test_a_publisher_that_is_not_running_says_so(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    with pytest.raises(WeightError, match="async with"):
        Publisher(rig.channel, store, config=WeightsConfig()).submit(snapshot(Version(1, 0)), 1)


@pytest.mark.parametrize("problem", [ValueError("a bug"), MemoryError(), RedisUnavailable("at maxmemory")])
async def test_whatever_ends_the_publisher_is_raised_by_all_who_rely_on_it(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch, problem: Exception
):
    await rig.attach(1, 9)

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        raise problem

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with asyncio.timeout(100), Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        watch = asyncio.create_task(publisher.failed())
        publisher.submit(snapshot(Version(1, 3)), 1)
        with pytest.raises(type(problem)):
            await publisher.drain(100)
        with pytest.raises(type(problem)):
            publisher.submit(snapshot(Version(1, 4)), 1)
        with pytest.raises(type(problem)):
            await watch


async def test_draining_a_publisher_that_has_ended_is_no_success(rig: Any, store: DirectoryStore):
    publisher = Publisher(rig.channel, store, config=WeightsConfig())
    async with publisher:
        await publisher.drain(1)
    with pytest.raises(WeightError, match="not running"):
        await publisher.drain(1)


async def test_a_version_that_redis_does_not_take_yet_is_not_written_again(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.02,))
    real, written = DirectoryStore.write, []

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        written.append(snap.version)
        return real(self, snap)

    monkeypatch.setattr(DirectoryStore, "write", write)
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        publisher.submit(snapshot(Version(2, 9)), 2)
        await troubled(publisher, "lost the attachment")
        with pytest.raises(WeightError, match="lost the attachment"):
            await publisher.drain(0.1)
        await rig.attach(2, 9)
        await publisher.drain(100)
    assert written == [Version(2, 9)]


# -- types and deltas --------------------------------------------------------------------------------------------------------------------------------

DELTA = WeightsConfig(transport="delta", full_every=4, keep=2)


def slowly_changing(version: Version, *, changed: int = 40, size: int = 20_000) -> Snapshot:
    """Of `size` floats, `changed` differ from the version before."""
    floats = np.zeros(size, "<f4")
    for n in range(version.n + 1):
        rng = np.random.default_rng(n)
        floats[rng.integers(0, size, changed if n else size)] = rng.standard_normal(changed if n else size)
    tensors = {
        "model.embed.weight": TensorBytes(dtype="F32", shape=(size // 100, 100), data=floats.tobytes()),
        "model.steps": TensorBytes(dtype="I64", shape=(), data=version.n.to_bytes(8, "little")),
    }
    return Snapshot(version=version, tensors=tensors)


def read(store: DirectoryStore, manifest: Manifest) -> dict[str, tuple[str, bytes]]:
    """The version as a reader makes it: its whole ancestor, and the deltas since."""
    chain: list[Step] = []
    at = manifest
    while at.kind == "delta":
        with store.open(at) as blobs:
            chain.insert(0, Step(at, {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=bytes(one.data)) for name, one in blobs.items()}))
        at = store.manifest(at.parent_version)
    store.verify(at)
    with store.open(at) as tensors:
        into = {name: bytearray(bytes(one.data)) for name, one in tensors.items()}
        base = {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=bytes(one.data)) for name, one in tensors.items()}
    apply(at, base, chain, {name: memoryview(data) for name, data in into.items()})
    return {name: (base[name].dtype, bytes(data)) for name, data in into.items()}


def plain(tensors: Any) -> dict[str, tuple[str, bytes]]:
    return {name: (one.dtype, bytes(one.data)) for name, one in tensors.items()}


async def test_versions_hold_what_changed_and_every_nth_is_whole(rig: Any, store: DirectoryStore):
    await rig.attach(1, 99)
    kinds = []
    async with Publisher(rig.channel, store, config=DELTA) as publisher:
        for n in range(9):
            snapshot = slowly_changing(Version(1, n))
            before = publisher.published
            publisher.submit(snapshot, 1)
            await publisher.drain(100)
            manifest = publisher.published
            kinds.append(manifest.kind)
            assert manifest.digest == weights_digest(snapshot.tensors)
            assert await asyncio.to_thread(read, store, await rig.channel.newest()) == plain(snapshot.tensors)
            if manifest.kind == "delta":
                assert (manifest.parent, manifest.parent_version) == (before.digest, before.version)
                assert 0 < manifest.changed_elements <= 41
                assert manifest.elements == 20_001
    assert kinds == ["full", "delta", "delta", "delta", "full", "delta", "delta", "delta", "full"]
    events = await rig.events("published")
    assert [event["kind"] for event in events] == kinds
    assert all(0 < event["changed"] < 0.003 if event["kind"] == "delta" else event["changed"] == 1 for event in events)


async def test_what_is_skipped_is_in_the_next_delta(rig: Any, store: DirectoryStore, gate: Gate):
    await rig.attach(1, 99)
    async with Publisher(rig.channel, gate, config=DELTA) as publisher:
        publisher.submit(slowly_changing(Version(1, 0)), 1)
        await asyncio.to_thread(gate.started.acquire)
        for n in (1, 2, 3):
            publisher.submit(slowly_changing(Version(1, n)), 1)
        gate.go.release()
        await publisher.drain(100)
        assert (publisher.published.kind, publisher.published.parent_version) == ("delta", Version(1, 0))
        assert await asyncio.to_thread(read, gate, publisher.published) == plain(slowly_changing(Version(1, 3)).tensors)


async def test_the_first_version_of_an_incarnation_and_of_a_publisher_is_whole(rig: Any, store: DirectoryStore):
    await rig.attach(1, 99)
    async with Publisher(rig.channel, store, config=DELTA) as publisher:
        for n in (0, 1):
            publisher.submit(slowly_changing(Version(1, n)), 1)
            await publisher.drain(100)
        assert publisher.published.kind == "delta"
        await rig.attach(2, 99)
        publisher.submit(slowly_changing(Version(2, 2)), 2)
        await publisher.drain(100)
        assert publisher.published.kind == "full"
    async with Publisher(rig.channel, store, config=DELTA) as publisher:
        publisher.submit(slowly_changing(Version(2, 3)), 2)
        await publisher.drain(100)
        assert publisher.published.kind == "full"


async def test_a_parent_that_is_gone_from_the_store_makes_the_next_one_whole(rig: Any, store: DirectoryStore):
    await rig.attach(1, 99)
    async with Publisher(rig.channel, store, config=DELTA) as publisher:
        for n in (0, 1):
            publisher.submit(slowly_changing(Version(1, n)), 1)
            await publisher.drain(100)
        store.delete(Version(1, 0))
        publisher.submit(slowly_changing(Version(1, 2)), 1)
        await publisher.drain(100)
        assert publisher.published.kind == "full"
        assert await asyncio.to_thread(read, store, publisher.published) == plain(slowly_changing(Version(1, 2)).tensors)


async def test_weights_that_change_everywhere_are_published_whole_and_deltas_tried_less(rig: Any, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch):
    real, tried = DirectoryStore.write_delta, []

    def write_delta(self: DirectoryStore, snap: Snapshot, *rest: Any) -> Manifest:
        tried.append(snap.version.n)
        return real(self, snap, *rest)

    monkeypatch.setattr(DirectoryStore, "write_delta", write_delta)
    await rig.attach(1, 99)
    async with Publisher(rig.channel, store, config=DELTA) as publisher:
        for n in range(8):
            floats = np.random.default_rng(n).standard_normal(5000).astype("<f4")
            publisher.submit(Snapshot(version=Version(1, n), tensors={"w": TensorBytes(dtype="F32", shape=(5000,), data=floats.tobytes())}), 1)
            await publisher.drain(100)
            assert publisher.published.kind == "full"
    assert tried == [1, 3, 6]


@pytest.mark.parametrize("config", [WeightsConfig(dtype="bfloat16"), WeightsConfig(dtype="bfloat16", transport="delta")])
async def test_floats_are_published_in_the_type_asked_for_and_described_as_published(rig: Any, store: DirectoryStore, config: WeightsConfig):
    await rig.attach(1, 99)
    async with Publisher(rig.channel, store, config=config) as publisher:
        for n in (0, 1):
            trained = slowly_changing(Version(1, n))
            snapshot = Snapshot(version=trained.version, tensors=trained.tensors, digest=weights_digest(trained.tensors))
            expected = cast(trained.tensors, "bfloat16")
            publisher.submit(snapshot, 1)
            await publisher.drain(100)
            manifest = publisher.published
            assert {entry.name: entry.dtype for entry in manifest.tensors} == {"model.embed.weight": "BF16", "model.steps": "I64"}
            assert manifest.digest == weights_digest(expected) != snapshot.digest
            assert await asyncio.to_thread(read, store, manifest) == plain(expected)
    assert manifest.kind == ("delta" if config.transport == "delta" else "full")


async def test_a_number_that_the_type_does_not_reach_ends_the_publisher_by_name(rig: Any, store: DirectoryStore):
    await rig.attach(1, 9)
    huge = TensorBytes(dtype="F32", shape=(1,), data=np.array([1e6], "<f4").tobytes())
    async with Publisher(rig.channel, store, config=WeightsConfig(dtype="float16")) as publisher:
        publisher.submit(Snapshot(version=Version(1, 1), tensors={"w": huge}), 1)
        with pytest.raises(WeightError, match=r"tensor w .*float16"):
            await publisher.drain(100)
    assert await rig.channel.newest() is None


# -- memory that is used again -----------------------------------------------------------------------------------------------------------------------


class Held(HeldWeights):
    """Overwritten as soon as it may be."""

    plain = True

    def __init__(self, snapshot: Snapshot) -> None:
        self.content = {name: bytearray(one.data) for name, one in snapshot.tensors.items()}
        self.tensors = {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=self.content[name]) for name, one in snapshot.tensors.items()}
        self.read = self.released = self.taken = False

    def digest(self) -> str:
        return weights_digest(self.tensors)

    def host(self, dtype: str = "") -> dict[str, TensorBytes] | None:
        if self.taken or self.released:
            return None
        self.read = True
        return self.tensors

    def release(self) -> None:
        self.released = True
        self._overwrite()

    def take(self) -> None:
        assert not self.read
        self.taken = True
        self._overwrite()

    def _overwrite(self) -> None:
        for content in self.content.values():
            content[:] = b"\xff" * len(content)


def held(snapshot: Snapshot) -> tuple[Snapshot, Held]:
    tensors = Held(snapshot)
    return Snapshot(version=snapshot.version, tensors=tensors, digest=tensors.digest()), tensors


@pytest.mark.parametrize("config", [WeightsConfig(), WeightsConfig(dtype="bfloat16"), DELTA, WeightsConfig(dtype="bfloat16", transport="delta", full_every=4)])
async def test_memory_is_given_back_once_its_bytes_are_not_needed_and_not_before(rig: Any, store: DirectoryStore, config: WeightsConfig):
    await rig.attach(1, 99)
    all_held = []
    async with Publisher(rig.channel, store, config=config) as publisher:
        for n in range(6):
            snapshot, memory = held(slowly_changing(Version(1, n)))
            all_held.append(memory)
            publisher.submit(snapshot, 1)
            await publisher.drain(100)
            assert await asyncio.to_thread(read, store, publisher.published) == plain(cast(slowly_changing(Version(1, n)).tensors, config.dtype))
            assert all(one.released for one in all_held[:-1])
            assert memory.released == (config.transport == "store" or config.dtype == "bfloat16"), "a base of deltas is kept, and only it"
    assert all(one.released for one in all_held)


async def test_a_copy_that_was_replaced_or_taken_over_is_never_published(rig: Any, gate: Gate):
    await rig.attach(1, 99)
    async with Publisher(rig.channel, gate, config=WeightsConfig()) as publisher:
        memories = {}
        for n in (1, 2, 3):
            snapshot, memories[n] = held(slowly_changing(Version(1, n)))
            publisher.submit(snapshot, 1)
            if n == 1:
                await asyncio.to_thread(gate.started.acquire)
        assert memories[2].released
        assert not memories[3].released
        memories[3].take()  # as training does before it hands over the next
        gate.go.release()
        await publisher.drain(100)
        assert publisher.published.version == Version(1, 1)
        snapshot, memories[4] = held(slowly_changing(Version(1, 4)))
        publisher.submit(snapshot, 1)
        gate.go.release()
        await publisher.drain(100)
    assert gate.written == [Version(1, 1), Version(1, 4)]
    assert all(memory.released for n, memory in memories.items() if n != 3)


async def test_a_copy_that_never_got_out_is_given_back(rig: Any, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch):
    await rig.attach(1, 99)

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        (first, one), (second, two) = held(slowly_changing(Version(1, 1))), held(slowly_changing(Version(1, 2)))
        publisher.submit(first, 1)
        await troubled(publisher, "No space")
        with pytest.raises(WeightError, match="No space"):
            await publisher.drain(0.1)
        assert not one.released
        publisher.submit(second, 1)
        while not one.released:
            await asyncio.sleep(0.01)
    assert two.released


async def test_how_long_publishing_took_is_known(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store, config=WeightsConfig()) as publisher:
        assert (publisher.published, publisher.publish_s) == (None, 0.0)
        publisher.submit(snapshot(Version(1, 3)), 1)
        await publisher.drain(100)
        assert publisher.publish_s > 0
