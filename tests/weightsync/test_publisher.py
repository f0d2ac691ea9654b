from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import Fenced, RedisUnavailable, StepOrder, WeightError
from protocol.messages import Manifest
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync import publisher as publisher_module
from weightsync.publisher import Publisher
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore


class Gate(DirectoryStore):
    """A real store whose writes wait for the test."""

    def __init__(self, folder: Path, model_path: Path) -> None:
        super().__init__(folder, model_path)
        self.started, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.written: list[Version] = []

    def write(self, snapshot: Callable[[Version], Snapshot]):
        self.started.release()
        assert self.go.acquire(timeout=20)
        self.written.append(snapshot.version)
        return super().write(snapshot)


@pytest.fixture
def gate(store: DirectoryStore, model_path: Path):
    return Gate(store.folder, model_path)


async def test_what_is_being_written_is_finished_and_the_newest_of_the_rest_follows(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        for n in (2, 3, 4):
            publisher.submit(snapshot(Version(1, n)), 1)
        assert publisher.busy
        gate.go.release(2)
        await publisher.drain(20)
        assert not publisher.busy
        assert publisher.published.version == Version(1, 4)
    assert gate.written == [Version(1, 1), Version(1, 4)]
    assert await rig.channel.newest_version() == Version(1, 4)


async def test_nothing_is_visible_before_it_is_written(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        assert await rig.channel.newest() is None
        gate.go.release()
        await publisher.drain(20)
        gate.verify(await rig.channel.newest())


async def test_leaving_finishes_the_write_under_way_and_drops_what_waits(rig: Any, gate: Gate, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 9)
    async with Publisher(rig.channel, gate) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await asyncio.to_thread(gate.started.acquire)
        publisher.submit(snapshot(Version(1, 2)), 1)
        gate.go.release()
    assert gate.written == [Version(1, 1)]
    assert await rig.channel.newest_version() == Version(1, 1)


async def test_a_replaced_trainer_learns_it_from_its_publisher(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(2, 9)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        with pytest.raises(Fenced):
            await publisher.drain(20)
        with pytest.raises(Fenced):
            publisher.submit(snapshot(Version(1, 4)), 1)
    assert await rig.channel.newest() is None


async def test_publishing_before_trained_is_a_bug_that_shows(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 3)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 4)), 1)
        with pytest.raises(StepOrder):
            await publisher.drain(20)


async def test_a_full_disk_is_survived(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch):
    await rig.attach(1, 9)
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.01,))
    real, left = DirectoryStore.write, iter([28, 28])

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        if (number := next(left, None)) is not None:
            raise OSError(number, "No space left on device")
        return real(self, snap)

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        await publisher.drain(20)
        assert publisher.trouble == ""
    assert await rig.channel.newest_version() == Version(1, 3)


async def test_a_deadline_names_what_is_in_the_way(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch):
    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 3)), 1)
        with pytest.raises(WeightError, match=r"not published within 1 s: version 1:3 .* No space left"):
            await publisher.drain(1)


async def test_old_versions_go_as_new_ones_come(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    async with Publisher(rig.channel, store, keep=2) as publisher:
        for n in range(8):
            publisher.submit(snapshot(Version(1, n)), 1)
            await publisher.drain(20)
    assert store.versions() == await rig.channel.versions() == (Version(1, 6), Version(1, 7))


async def test_leftovers_of_an_earlier_run_are_swept_before_the_first_version(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    other = snapshot(Version(1, 7))
    store.write(type(other)(version=Version(1, 0), tensors=other.tensors))
    await rig.attach(1, 0)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 0)), 1)
        await publisher.drain(20)
    store.verify(await rig.channel.newest())


async def test_a_pointer_that_redis_lost_is_moved_forward_again(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher_module, "_POINTER_S", 0.02)
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(1, 1)), 1)
        await publisher.drain(20)
        before = await rig.redis.hgetall(rig.keys.weights)
        publisher.submit(snapshot(Version(1, 2)), 1)
        await publisher.drain(20)
        await rig.redis.delete(rig.keys.weights)
        await rig.redis.hset(rig.keys.weights, mapping=before)
        while await rig.channel.newest_version() != Version(1, 2):
            mark = rig.wakes.mark(Topic.WEIGHTS)
            await rig.wakes.wait(Topic.WEIGHTS, since=mark, timeout_s=0.05)
        assert (await rig.channel.newest()).digest == publisher.published.digest


async def test_versions_that_redis_lost_do_not_fill_the_store(rig: Any, redis: Any, keys: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(2, 9)
    async with Publisher(rig.channel, store, keep=3) as publisher:
        for n in (1, 2):
            publisher.submit(snapshot(Version(2, n)), 2)
            await publisher.drain(20)
        store.write(snapshot(Version(3, 0)))  # its trainer is about to publish it
        await redis.hdel(keys.weights, "manifest:2:1")
        publisher.submit(snapshot(Version(2, 3)), 2)
        await publisher.drain(20)
    assert store.versions() == (Version(2, 2), Version(2, 3), Version(3, 0))


async def test_a_version_is_offered_again_while_redis_has_lost_the_attachment(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher_module, "_RETRY_S", (0.02,))
    await rig.attach(1, 9)
    async with Publisher(rig.channel, store) as publisher:
        publisher.submit(snapshot(Version(2, 9)), 2)
        with pytest.raises(WeightError, match="lost the attachment"):
            await publisher.drain(0.3)
        await rig.attach(2, 9)
        await publisher.drain(20)
        assert await rig.channel.newest_version() == Version(2, 9)


async def test_a_publisher_that_is_not_running_says_so(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    with pytest.raises(WeightError, match="async with"):
        Publisher(rig.channel, store).submit(snapshot(Version(1, 0)), 1)


@pytest.mark.parametrize("problem", [ValueError("a bug"), MemoryError(), RedisUnavailable("at maxmemory")])
async def test_whatever_ends_the_publisher_is_raised_by_all_who_rely_on_it(
    rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch, problem: Exception
):
    await rig.attach(1, 9)

    def write(self: DirectoryStore, snap: Snapshot) -> Manifest:
        raise problem

    monkeypatch.setattr(DirectoryStore, "write", write)
    async with asyncio.timeout(20), Publisher(rig.channel, store) as publisher:
        watch = asyncio.create_task(publisher.failed())
        publisher.submit(snapshot(Version(1, 3)), 1)
        with pytest.raises(type(problem)):
            await publisher.drain(20)
        with pytest.raises(type(problem)):
            publisher.submit(snapshot(Version(1, 4)), 1)
        with pytest.raises(type(problem)):
            await watch


async def test_draining_a_publisher_that_has_ended_is_no_success(rig: Any, store: DirectoryStore):
    publisher = Publisher(rig.channel, store)
    async with publisher:
        await publisher.drain(1)
    with pytest.raises(WeightError, match="not running"):
        await publisher.drain(1)
