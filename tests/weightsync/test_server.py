"""What a weight server decides and stages by itself: turns, places, copies that are checked, and what it must be given."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError, ManifestError, TransportFailed, VersionGone
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from tests.weightsync.served_rig import big_snapshot
from weightsync.buckets import plan
from weightsync.claim import PIN_S
from weightsync.pointer import Pointer
from weightsync.server import line
from weightsync.server.line import Line, Sender
from weightsync.server.own_thread import OwnThread
from weightsync.server.right import TransferRight
from weightsync.server.serve import WeightServerConfig, run_weight_server
from weightsync.server.shelf import Shelf, Staged
from weightsync.server.staging import Stager
from weightsync.snapshot import TensorBytes, weights_digest

V1, V2, V3 = (Version(1, n) for n in (1, 2, 3))


class Engine:
    def __init__(self) -> None:
        self.losses = 0

    def lost(self) -> None:
        self.losses += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# the right --------------------------------------------------------------------------------------------------------------------------------------


async def test_the_right_goes_round_in_the_order_of_asking():
    right = TransferRight(idle_s=100.0, clock=Clock())
    first, *others = (Engine() for _ in range(4))
    await right.take(first, deadline_s=1)
    order: list[Engine] = []

    async def wait(engine: Engine) -> None:
        await right.take(engine, deadline_s=60)
        order.append(engine)
        right.give(engine)

    waiting = [asyncio.create_task(wait(engine)) for engine in others]
    await asyncio.sleep(0)
    right.give(others[0])  # it has nothing to give
    await asyncio.sleep(0)
    assert order == []
    right.give(first)
    await asyncio.gather(*waiting)
    assert order == others
    assert first.losses == 0


async def test_an_idle_right_is_lost_to_who_waits_and_a_used_one_is_not():
    clock = Clock()
    right = TransferRight(idle_s=5.0, clock=clock)
    idle, busy, late = Engine(), Engine(), Engine()
    await right.take(idle, deadline_s=1)
    clock.now = 4.9
    await right.take(idle, deadline_s=1)  # renewed
    clock.now = 9.8
    waiting = asyncio.create_task(right.take(busy, deadline_s=60))
    await asyncio.sleep(0)
    assert right._holder is idle
    clock.now = 9.95
    await waiting
    assert (idle.losses, right._holder) == (1, busy)
    right.use(busy)
    clock.now = 100.0
    with pytest.raises(TimeoutError):
        await right.take(late, deadline_s=0)
    assert busy.losses == 0
    with pytest.raises(PermissionError):
        right.use(idle)


async def test_one_whose_engine_is_paused_goes_before_one_that_only_prepared_and_never_before_one_that_sends():
    right = TransferRight(idle_s=100.0)
    prepared, paused, waiting = Engine(), Engine(), Engine()
    await right.take(prepared, deadline_s=1)
    queued = asyncio.create_task(right.take(waiting, deadline_s=60))
    await asyncio.sleep(0)
    await right.take(paused, deadline_s=0, urgent=True)
    right.use(paused)
    assert (prepared.losses, right._holder) == (1, paused)
    with pytest.raises(TimeoutError):
        await right.take(prepared, deadline_s=0, urgent=True)
    right.give(paused)
    await queued
    assert right._holder is waiting


async def test_who_gives_up_waiting_is_passed_over():
    right = TransferRight(idle_s=100.0)
    holder, quitter, next_ = Engine(), Engine(), Engine()
    await right.take(holder, deadline_s=1)
    quitting = asyncio.create_task(right.take(quitter, deadline_s=60))
    waiting = asyncio.create_task(right.take(next_, deadline_s=60))
    await asyncio.sleep(0)
    quitting.cancel()
    right.give(holder)
    await waiting
    assert right._holder is next_
    await asyncio.wait([quitting])
    assert quitting.cancelled()


async def test_a_right_that_comes_to_one_who_is_being_cancelled_goes_on():
    right = TransferRight(idle_s=100.0)
    holder, quitter, next_ = Engine(), Engine(), Engine()
    await right.take(holder, deadline_s=1)
    quitting = asyncio.create_task(right.take(quitter, deadline_s=60))
    waiting = asyncio.create_task(right.take(next_, deadline_s=60))
    await asyncio.sleep(0)
    right.give(holder)
    assert right._holder is quitter
    quitting.cancel()
    await waiting
    assert right._holder is next_
    await asyncio.wait([quitting])


# the shelf --------------------------------------------------------------------------------------------------------------------------------------


def _staged(version: Version) -> Staged:
    return Staged(version=version, digest=str(version), buckets=(), memory=(torch.zeros(version.n, dtype=torch.uint8),))


async def test_the_oldest_version_that_nobody_holds_makes_room():
    shelf = Shelf(places=2)
    assert await shelf.room() == ()
    shelf.put(_staged(V1))
    shelf.put(_staged(V2))
    shelf.hold(V1)
    given_up = await shelf.room()
    assert [len(memory) for memory in given_up] == [2]
    shelf.put(_staged(V3))
    shelf.hold(V3)
    waiting = asyncio.create_task(shelf.room())
    await asyncio.sleep(0)
    assert not waiting.done(), "both are held"
    shelf.release(V1)
    assert [len(memory) for memory in await waiting] == [1]
    assert shelf.newest == V3
    with pytest.raises(VersionGone):
        shelf.hold(V1)


async def test_who_waits_for_a_version_gets_it_or_is_told_why_not():
    shelf = Shelf()
    waiting = asyncio.create_task(shelf.wait(V2, deadline_s=60))
    shelf.aim(V2)
    shelf.put(_staged(V2))
    assert (await waiting).version == V2
    assert shelf.get(V2).digest == "1:2"
    with pytest.raises(VersionGone, match="went on to 1:2"):
        await shelf.wait(V1, deadline_s=60)
    waiting = asyncio.create_task(shelf.wait(V3, deadline_s=60))
    shelf.aim(V3)
    shelf.fail(V3, ManifestError("tensor w is damaged"))
    with pytest.raises(ManifestError, match="tensor w is damaged"):
        await waiting
    shelf.aim(V3)  # it is tried again
    with pytest.raises(TransportFailed, match=r"1:3 was not staged within 0.0 s; the server has 1:2"):
        await shelf.wait(V3, deadline_s=0.01)


# staging ----------------------------------------------------------------------------------------------------------------------------------------


def _manifest(tensors: Mapping[str, TensorBytes], version: Version = V1) -> Manifest:
    entries = tuple(
        TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, file="f", checksum=xxhash.xxh3_64_hexdigest(tensor.data))
        for name, tensor in sorted(tensors.items())
    )
    digest = weights_digest(tensors)
    return Manifest(version=version, kind="full", parent="", tensors=entries, digest=digest, transport="store", location="x", total_bytes=0)


def _bytes_of(staged: Staged) -> dict[str, bytes]:
    found = {}
    for bucket, memory in zip(staged.buckets, staged.memory, strict=True):
        for name, low, high in zip(bucket.names, bucket.offsets, (*bucket.offsets[1:], bucket.nbytes), strict=True):
            found[name] = memory.numpy()[low:high].tobytes()
    return found


@given(st.data())
def test_what_is_staged_is_what_the_files_hold(data: st.DataObject):
    kinds = st.sampled_from([("F32", 4), ("BF16", 2), ("I64", 8), ("U8", 1), ("F16", 2)])
    shapes = st.lists(st.integers(0, 9), max_size=3)
    tensors = {}
    for index in range(data.draw(st.integers(1, 8))):
        (dtype, size), shape = data.draw(kinds), tuple(data.draw(shapes))
        count = size
        for extent in shape:
            count *= extent
        tensors[f"t{index}"] = TensorBytes(dtype=dtype, shape=shape, data=data.draw(st.binary(min_size=count, max_size=count)))
    stager = Stager(torch.device("cpu"), data.draw(st.integers(1, 600)))
    staged = stager.stage(_manifest(tensors), tensors, ())
    assert _bytes_of(staged) == {name: bytes(tensor.data) for name, tensor in tensors.items()}
    assert staged.buckets == plan(_manifest(tensors), stager._bucket_bytes)


def test_memory_of_an_old_version_is_used_again_where_it_fits():
    stager = Stager(torch.device("cpu"), 1 << 20)
    first, second, other = big_snapshot(V1), big_snapshot(V2), big_snapshot(V3, megabytes=1)
    staged = stager.stage(_manifest(first.tensors), first.tensors, ())
    again = stager.stage(_manifest(second.tensors, V2), second.tensors, staged.memory)
    assert [new.data_ptr() for new in again.memory] == [old.data_ptr() for old in staged.memory]
    assert _bytes_of(again)["layers.0.weight"] == bytes(second.tensors["layers.0.weight"].data)
    third = stager.stage(_manifest(other.tensors, V3), other.tensors, again.memory)
    assert {new.data_ptr() for new in third.memory}.isdisjoint(old.data_ptr() for old in again.memory)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("layers.1.weight"), "tensor layers.1.weight is not in f"),
        (lambda tensors: tensors.update({"norm.weight": TensorBytes(dtype="F16", shape=(3,), data=bytes(6))}), "tensor norm.weight is F16"),
        (lambda tensors: tensors.update({"steps": TensorBytes(dtype="I64", shape=(1,), data=bytes(8))}), r"tensor steps is I64 \(1,\), expected I64 \(\)"),
        (lambda tensors: tensors.update({"steps": TensorBytes(dtype="I64", shape=(), data=bytes(8))}), "tensor steps has checksum"),
    ],
)
def test_files_that_do_not_hold_the_version_are_refused_with_the_tensor_named(change: Any, problem: str):
    tensors = dict(big_snapshot(V1).tensors)
    manifest = _manifest(tensors)
    change(tensors)
    with pytest.raises(ManifestError, match=problem):
        Stager(torch.device("cpu"), 1 << 20).stage(manifest, tensors, ())


def test_a_device_without_room_fails_the_way_not_the_version():
    huge = TensorEntry(name="w", dtype="F32", shape=(1 << 50,), file="f", checksum="")
    manifest = Manifest(version=V1, kind="full", parent="", tensors=(huge,), digest="d", transport="store", location="x", total_bytes=0)
    with pytest.raises(TransportFailed, match="cannot be staged on cpu"):
        Stager(torch.device("cpu"), 1 << 20).stage(manifest, {}, ())


# its own thread ---------------------------------------------------------------------------------------------------------------------------------


async def test_a_call_that_does_not_return_costs_its_waiter_the_deadline_and_blocks_no_other_thread():
    stuck, free, released = OwnThread("stuck"), OwnThread("free"), threading.Event()
    with pytest.raises(TimeoutError):
        await stuck.call(released.wait, deadline_s=0.05)
    assert stuck.busy
    assert await free.call(lambda: 7, deadline_s=60) == 7
    with pytest.raises(ZeroDivisionError):
        await free.call(lambda: 1 // 0, deadline_s=60)
    assert not free.busy
    released.set()
    assert await stuck.call(lambda: 8, deadline_s=60) == 8
    assert not stuck.busy
    stuck.close()
    free.close()


async def test_a_thread_that_is_stuck_takes_only_so_many_calls_and_says_when_it_is_free():
    stuck, released, ran = OwnThread("stuck"), threading.Event(), []
    free = asyncio.Event()
    stuck.when_free(lambda: ran.append("free now"))
    assert ran.pop() == "free now"
    waiting = [asyncio.create_task(stuck.call(released.wait, deadline_s=60)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="8 calls run or wait already"):
        await stuck.call(lambda: ran.append("refused"), deadline_s=60)
    stuck.when_free(free.set)
    assert not free.is_set()
    released.set()
    await asyncio.gather(*waiting)
    await asyncio.wait_for(free.wait(), 60)
    assert ran == []
    stuck.close()


# the pointer ------------------------------------------------------------------------------------------------------------------------------------


async def test_what_a_server_reads_is_pinned_in_the_same_step_and_kept_while_it_is_staged(rig: Any):
    pointer = Pointer(rig.redis, rig.keys, "weight-server:a")
    assert await pointer.look(None) is None
    await rig.publish(1, 0)
    manifest = await pointer.look(None)
    assert manifest is not None
    assert manifest.version == Version(1, 0)
    assert await pointer.look(manifest.version) is None
    async with pointer.holding(manifest.version):
        for n in range(1, 5):
            await rig.publish(1, n)
            await pointer.look(manifest.version)  # late or early, it does not move the pin of what is read
            await rig.channel.collect(rig.store, keep=1)
        assert manifest.version in await rig.channel.versions()
    await rig.channel.collect(rig.store, keep=1)
    with pytest.raises(VersionGone, match="1:0 is collected"):
        async with pointer.holding(manifest.version):
            raise AssertionError("nothing is left to read")
    assert await rig.channel.versions() == (Version(1, 4),)
    assert PIN_S > 10, "far beyond the time between two looks"
    await pointer.release()
    assert await rig.redis.hgetall(rig.keys.weight_pins) == {}


# a line -----------------------------------------------------------------------------------------------------------------------------------------


def _sender(backend: str = "gloo", *, group_timeout_s: float = 60.0) -> Sender:
    return Sender(
        device=torch.device("cpu"), backend=backend, address="127.0.0.1", group_timeout_s=group_timeout_s, shelf=Shelf(), right=TransferRight(idle_s=100.0)
    )


class Meeting:
    """A group whose other side comes when a test says so. Real ones, between processes, are in test_collective."""

    def __init__(self, *, backend: str, device: torch.device, address: str, world_size: int, timeout_s: float) -> None:
        self.name, self.address, self.port, self.world_size, self._timeout_s = f"{backend} on {device}", address, 1, world_size, timeout_s
        self.came = threading.Event()

    def join(self) -> None:
        if not self.came.wait(self._timeout_s):
            raise TransportFailed("did not form")

    def abort(self) -> None:
        self.came.set()

    def destroy(self) -> None:
        """Nothing is held."""


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "Group", Meeting)


@pytest.mark.usefixtures("meetings")
async def test_two_engines_never_meet_their_groups_at_the_same_time():
    """An engine decodes nothing while it waits in its group, so engines that all come back to a new server stop one after the other."""
    sender, order = _sender(), []
    first, second = Line(sender, "e0"), Line(sender, "e1")
    assert (await first._join({"ranks": 1}, 30.0))["world_size"] == 2
    joining = asyncio.create_task(second._join({"ranks": 1}, 30.0))
    joining.add_done_callback(lambda _: order.append("e1 begins"))
    with pytest.raises(TransportFailed, match="still forming"):
        await first._take({"version": "1:1"}, 1.0)
    first._group.came.set()  # type: ignore[union-attr]
    await first._joined({}, 30.0)
    assert not joining.done()
    order.append("e0 met")
    await first._give({}, 1.0)
    await joining
    assert order == ["e0 met", "e1 begins"]
    assert sender.right._holder is second
    with pytest.raises(TransportFailed, match="has a group already"):
        await first._join({"ranks": 1}, 1.0)
    await first._end([])
    await second._end([])
    assert sender.right._holder is None


@pytest.mark.usefixtures("meetings")
async def test_an_engine_that_does_not_come_frees_the_others_when_its_group_times_out():
    sender = _sender(group_timeout_s=0.2)
    first, second = Line(sender, "e0"), Line(sender, "e1")
    await first._join({"ranks": 1}, 30.0)
    await second._join({"ranks": 1}, 30.0)
    with pytest.raises(TransportFailed, match="did not form"):
        await first._joined({}, 30.0)
    await asyncio.gather(first._end([]), second._end([]))
    assert sender.right._holder is None


async def test_memory_that_a_stuck_call_may_still_read_is_kept_until_the_call_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(line, "ABORT_S", 0.05)
    released = threading.Event()

    class Stuck:
        def abort(self) -> None:
            """It does not help."""

        def destroy(self) -> None:
            released.wait()

    sender = _sender()
    sender.shelf.put(_staged(V1))
    stuck = Line(sender, "e0")
    await stuck._take({"version": str(V1), "use": True}, 1.0)
    stuck._group = Stuck()  # type: ignore[assignment]
    await stuck._end([])
    assert sender.right._holder is None, "the next engine need not wait"
    assert sender.shelf._holds[V1] == 1
    released.set()
    async with asyncio.timeout(60):
        while sender.shelf._holds:
            await asyncio.sleep(0)


# what it must be given --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "device", "problem"),
    [
        ("store", "", 'weights.transport = "store" needs no weight server'),
        ("delta", "", "needs no weight server"),
        ("gloo", "cuda:0", 'weights.transport = "gloo" sends from cpu'),
        ("nccl", "cpu", "sends from cuda:N"),
        ("ipc", "cpu", "sends from cuda:N"),
        ("gloo", "toaster", "device 'toaster'"),
        ("nccl", "cuda:64", "device cuda:64: not there"),
    ],
)
async def test_a_device_that_cannot_send_is_refused_before_anything_starts(transport: str, device: str, problem: str, tmp_path: Path):
    config = WeightServerConfig.model_validate(
        {
            "run": {"name": "r", "dir": str(tmp_path)},
            "redis": {"url": "redis://127.0.0.1:1"},
            "weights": {"transport": transport},
        }
    )
    with pytest.raises(ConfigError, match=problem):
        await run_weight_server(config, asyncio.Event(), device=device)


async def test_a_server_without_an_address_of_redis_says_which_key_is_missing(tmp_path: Path):
    config = WeightServerConfig.model_validate({"run": {"name": "r", "dir": str(tmp_path)}, "weights": {"transport": "gloo"}})
    with pytest.raises(ConfigError, match=r"redis\.url is empty"):
        await run_weight_server(config, asyncio.Event())
