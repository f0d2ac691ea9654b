from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from protocol.errors import Fenced, ManifestError, StepOrder, WeightError
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.claim import Claim
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore


async def reader(rig: Any, engine: str) -> Claim:
    """An engine that has taken nothing yet."""
    await rig.registry.beat(rig.status(engine, "b1"), ttl_s=600)
    return rig.channel.claim(engine, "b1")


async def test_a_published_version_is_newest_and_announced_once(rig: Any):
    digest = await rig.publish(1, 0)
    newest = await rig.channel.newest()
    assert newest.version == Version(1, 0)
    assert newest.digest == digest
    assert await rig.channel.newest_version() == Version(1, 0)
    await rig.channel.publish(newest, 1)
    events = await rig.events("published")
    assert [(event["version"], event["digest"], event["bytes"]) for event in events] == [("1:0", digest, newest.total_bytes)]


async def test_before_the_first_publish_there_is_no_version(rig: Any):
    assert await rig.channel.newest() is None
    assert await rig.channel.newest_version() is None
    assert await rig.channel.versions() == ()


async def test_a_trainer_that_was_replaced_publishes_nothing(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.publish(1, 3)
    await rig.attach(2, 3)
    manifest = store.write(snapshot(Version(1, 3)))
    with pytest.raises(Fenced, match="incarnation 2"):
        await rig.channel.publish(manifest, 1)
    with pytest.raises(Fenced):
        await rig.channel.publish(manifest, 2)
    assert await rig.channel.newest_version() == Version(1, 3)


async def test_a_version_that_is_not_trained_is_not_published(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 3)
    with pytest.raises(StepOrder, match=r"trained 3 steps"):
        await rig.channel.publish(store.write(snapshot(Version(1, 4))), 1)
    assert await rig.channel.newest() is None


async def test_the_pointer_moves_forward_only_within_and_over_incarnations(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.publish(1, 5)
    with pytest.raises(WeightError, match="forward only"):
        await rig.channel.publish(store.write(snapshot(Version(1, 4))), 1)
    await rig.publish(2, 3)
    assert await rig.channel.newest_version() == Version(2, 3)


async def test_a_version_with_other_weights_is_refused(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.publish(1, 5)
    manifest = await rig.channel.newest()
    with pytest.raises(ManifestError, match="other weights"):
        await rig.channel.publish(dataclasses.replace(manifest, digest="0" * 32), 1)


async def test_two_concurrent_publishers_leave_the_newer_version(rig: Any, store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    manifests = [store.write(snapshot(Version(1, n))) for n in range(10)]
    results = await asyncio.gather(*(rig.channel.publish(manifest, 1) for manifest in reversed(manifests)), return_exceptions=True)
    assert await rig.channel.newest_version() == Version(1, 9)
    assert all(result is None or isinstance(result, WeightError) for result in results)
    order = [Version.parse(event["version"]) for event in await rig.events("published")]
    assert order == sorted(order)


async def test_collection_keeps_the_newest_few_and_what_is_pinned(rig: Any, store: DirectoryStore):
    for n in range(3):
        await rig.publish(1, n)
    claim = await reader(rig, "r0")
    assert (await claim.look(None)).manifest.version == Version(1, 2)
    for n in range(3, 8):
        await rig.publish(1, n)
    assert set(await rig.channel.collect(store, keep=2)) == {Version(1, n) for n in (0, 1, 3, 4, 5)}
    assert await rig.channel.versions() == store.versions() == (Version(1, 2), Version(1, 6), Version(1, 7))
    assert await rig.channel.collect(store, keep=2) == ()
    await rig.registry.leave("r0", "b1")
    assert await rig.channel.collect(store, keep=2) == (Version(1, 2),)
    assert await rig.channel.versions() == store.versions() == (Version(1, 6), Version(1, 7))


async def test_collection_never_deletes_what_an_engine_serves_or_targets(rig: Any, store: DirectoryStore):
    for n in range(2):
        await rig.publish(1, n)
    await rig.registry.beat(rig.status("e0", "b1"), ttl_s=600)
    await rig.registry.ack("e0", "b1", Version(1, 0))
    claim = rig.channel.claim("e0", "b1")
    assert (await claim.look(None)).manifest.version == Version(1, 1)
    for n in range(2, 6):
        await rig.publish(1, n)
    await rig.channel.collect(store, keep=1)
    assert store.versions() == (Version(1, 0), Version(1, 1), Version(1, 5))
    await rig.registry.ack("e0", "b1", Version(1, 1), reconciler=claim.owner)
    await rig.channel.collect(store, keep=1)
    assert store.versions() == (Version(1, 1), Version(1, 5))
    await rig.registry.leave("e0", "b1")
    await rig.channel.collect(store, keep=1)
    assert store.versions() == (Version(1, 5),)


async def test_what_an_engine_was_paused_for_stays_until_it_acks_whatever_a_late_look_goes_for(rig: Any, store: DirectoryStore):
    await rig.publish(1, 0)
    claim = await reader(rig, "e0")
    await claim.look(None)
    assert await claim.pause(Version(1, 0), most=1, valid_s=60, idle=True)
    await rig.publish(1, 1)
    await claim.look(None)  # sent before the pause, or a second time, and executed after it
    await rig.publish(1, 2)
    assert await rig.channel.collect(store, keep=1) == ()
    assert store.versions() == (Version(1, 0), Version(1, 1), Version(1, 2))
    await rig.registry.ack("e0", "b1", Version(1, 0), reconciler=claim.owner)
    await rig.registry.ack("e0", "b1", Version(1, 2), reconciler=claim.owner)
    await rig.channel.collect(store, keep=1)
    assert store.versions() == (Version(1, 2),)


async def test_a_late_pause_for_an_older_version_frees_nothing(rig: Any, store: DirectoryStore):
    for n in (0, 1):
        await rig.publish(1, n)
    claim = await reader(rig, "e0")
    await claim.look(None)
    for n in (0, 1, 0):
        assert await claim.pause(Version(1, n), most=1, valid_s=60, idle=False)
    await rig.publish(1, 2)
    await claim.look(None)
    assert await rig.channel.collect(store, keep=1) == ()


async def test_no_engine_is_paused_for_a_version_that_was_collected_before(rig: Any, store: DirectoryStore):
    await rig.publish(1, 0)
    claim = await reader(rig, "e0")
    await claim.look(None)
    await rig.publish(1, 1)
    await claim.look(None)
    assert await rig.channel.collect(store, keep=1) == (Version(1, 0),)
    assert not await claim.pause(Version(1, 0), most=1, valid_s=60, idle=True)
    assert not await claim.pause(Version(1, 0), most=1, valid_s=60, idle=False)
    assert await claim.pause(Version(1, 1), most=1, valid_s=60, idle=False)


@pytest.mark.parametrize("how", ["leaves", "restarts"])
async def test_an_engine_that_is_gone_holds_nothing(rig: Any, how: str):
    await rig.publish(1, 0)
    claim, other = await reader(rig, "e0"), await reader(rig, "e0/applying/1:0")
    for one in (claim, other):
        await one.look(None)
        assert await one.pause(Version(1, 0), most=2, valid_s=60, idle=False)
    if how == "leaves":
        await rig.registry.leave("e0", "b1")
    else:
        await rig.registry.beat(rig.status("e0", "b2"), ttl_s=600)
    left = set(await rig.redis.hkeys(rig.keys.weight_pins))
    assert left == {b"e0/applying/1:0/target", b"e0/applying/1:0/applying/1:0"}


async def test_a_pin_that_is_not_renewed_runs_out(rig: Any, store: DirectoryStore, redis: Any, keys: Any):
    await rig.publish(1, 0)
    await (await reader(rig, "r0")).look(None)
    await redis.hset(keys.weight_pins, "r0/target", "1:0:1")
    await rig.publish(1, 1)
    assert await rig.channel.collect(store, keep=1) == (Version(1, 0),)
    assert not await redis.hexists(keys.weight_pins, "r0/target")


async def test_a_collection_that_was_broken_off_is_finished_by_the_next(rig: Any, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch):
    for n in range(3):
        await rig.publish(1, n)

    def fail(*_: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "delete", fail)
        with pytest.raises(PermissionError):
            await rig.channel.collect(store, keep=1)
    assert await rig.channel.versions() == (Version(1, 2),)
    assert len(store.versions()) == 3
    assert set(await rig.channel.collect(store, keep=1)) == {Version(1, 0), Version(1, 1)}
    assert store.versions() == (Version(1, 2),)


async def test_a_version_that_comes_free_during_a_collection_is_deleted_by_it(rig: Any, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch):
    await rig.publish(1, 0)
    await (await reader(rig, "r0")).look(None)
    for n in range(1, 3):
        await rig.publish(1, n)
    loop, delete = asyncio.get_running_loop(), store.delete

    def delete_as_the_reader_leaves(version: Version) -> None:
        asyncio.run_coroutine_threadsafe(rig.registry.leave("r0", "b1"), loop).result(10)
        delete(version)

    monkeypatch.setattr(store, "delete", delete_as_the_reader_leaves)
    assert await rig.channel.collect(store, keep=1) == (Version(1, 1), Version(1, 0))
    assert await rig.channel.versions() == store.versions() == (Version(1, 2),)


async def test_a_look_racing_a_collection_holds_or_finds_a_newer_version(rig: Any, store: DirectoryStore):
    """The pointer read and the pin are one step: whatever a reconciler was given is there until it looks again."""
    await rig.publish(1, 0)
    stop = asyncio.Event()

    async def read(name: str) -> int:
        count, claim = 0, await reader(rig, name)
        while not stop.is_set():
            await asyncio.to_thread(store.verify, (await claim.look(None)).manifest)
            count += 1
        return count

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read(f"r{i}")) for i in range(3)]
        for n in range(1, 25):
            await rig.publish(1, n)
            await rig.channel.collect(store, keep=1)
        stop.set()
    assert all(reader.result() > 0 for reader in readers)
    assert len(store.versions()) <= 4


def chained(store: DirectoryStore, snapshot: Callable[[Version], Snapshot], last: int) -> list[Manifest]:
    """Version 1:0 whole and 1:1 to 1:last as deltas: the same weights but for one element."""
    base = snapshot(Version(1, 0)).tensors
    made = [store.write(Snapshot(version=Version(1, 0), tensors=base))]
    for n in range(1, last + 1):
        content = bytearray(base["model.embed.weight"].data)
        content[4 * (n % 12)] ^= 1
        tensors = {**base, "model.embed.weight": dataclasses.replace(base["model.embed.weight"], data=bytes(content))}
        made.append(store.write_delta(Snapshot(version=Version(1, n), tensors=tensors), made[-1], base))
        base = tensors
    return made


@pytest.fixture
def large() -> Callable[[Version], Snapshot]:
    """So large that a delta of one element is worth it."""

    def make(version: Version) -> Snapshot:
        return Snapshot(version=version, tensors={"model.embed.weight": TensorBytes(dtype="F32", shape=(1000,), data=bytes(4000))})

    return make


async def test_what_a_kept_delta_is_made_from_is_kept(rig: Any, store: DirectoryStore, large: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    made = chained(store, large, 5)
    for manifest in made:
        await rig.channel.publish(manifest, 1)
    assert await rig.channel.collect(store, keep=1) == ()
    assert store.versions() == tuple(Version(1, n) for n in range(6))
    await rig.publish(1, 6)
    assert set(await rig.channel.collect(store, keep=1)) == {Version(1, n) for n in range(6)}
    assert store.versions() == await rig.channel.versions() == (Version(1, 6),)


async def test_what_a_pinned_delta_is_made_from_is_kept(rig: Any, redis: Any, keys: Any, store: DirectoryStore, large: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    made = chained(store, large, 3)
    for manifest in made[:3]:
        await rig.channel.publish(manifest, 1)
    claim = await reader(rig, "r0")
    assert (await claim.look(None)).manifest.version == Version(1, 2)
    assert await rig.channel.pinned() == {Version(1, 2)}
    await rig.channel.publish(made[3], 1)
    for n in (4, 5):
        await rig.publish(1, n)
    assert set(await rig.channel.collect(store, keep=1)) == {Version(1, 3), Version(1, 4)}
    assert store.versions() == (Version(1, 0), Version(1, 1), Version(1, 2), Version(1, 5))
    await rig.registry.leave("r0", "b1")
    assert await rig.channel.pinned() == frozenset()
    await rig.channel.collect(store, keep=1)
    assert store.versions() == (Version(1, 5),)
    assert not [field for field in await redis.hkeys(keys.weights) if field.startswith(b"parent:")]


async def test_a_chain_of_which_redis_lost_a_link_is_kept_whole(rig: Any, redis: Any, keys: Any, store: DirectoryStore, large: Callable[[Version], Snapshot]):
    """Redis comes back with what it knew after 1:1; the trainer goes on with 1:3."""
    await rig.attach(1, 20)
    made = chained(store, large, 3)
    for manifest in made[:2]:
        await rig.channel.publish(manifest, 1)
    then = await redis.hgetall(keys.weights)
    await rig.channel.publish(made[2], 1)
    await redis.delete(keys.weights)
    await redis.hset(keys.weights, mapping=then)
    await rig.channel.publish(made[3], 1)
    assert await rig.channel.collect(store, keep=1) == ()
    assert store.drop_unlisted(1, await rig.channel.versions()) == ()
    assert store.versions() == tuple(Version(1, n) for n in range(4))


async def test_the_audit_says_whether_a_version_is_whole_and_how_much_changed(rig: Any, store: DirectoryStore, large: Callable[[Version], Snapshot]):
    await rig.attach(1, 20)
    for manifest in chained(store, large, 1):
        await rig.channel.publish(manifest, 1)
    assert [(event["kind"], event["changed"]) for event in await rig.events("published")] == [("full", 1), ("delta", 0.001)]
