"""From Redis to the spill and back, on both ledgers: what is trained is never in neither place."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.client import TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import ChunkRecord, Slot
from buffer.recording import RecordedStep
from buffer.spill import Spiller, SpillStatus
from buffer.storage import Storage, open_storage
from buffer.upkeep import rounds, sweeping, upkeep
from protocol.codec import digest, encode_group
from protocol.errors import Fenced, StorageUnavailable
from protocol.messages import Edge, GroupHeader, Reason
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups

from .conftest import Harness, header_for, settings
from .recorded import a_group

EXPERTS = np.arange(3000, dtype="<i2").reshape(10, 100, 3)


class NeverWoken(Wakeups):
    """For what waits for nothing here."""

    async def wait(self, *topics: Topic, **_: Any) -> None:
        raise AssertionError(f"nothing should wait for {topics}")


def config_of(folder: Path, **changes: object) -> BufferConfig:
    return settings(spill=str(folder / "spill"), blobs=str(folder / "blobs"), blob_bytes=1000, **changes)


def payload_of(storage: Storage, slot: Slot, extras: dict[str, np.ndarray]) -> tuple[GroupHeader, bytes]:
    group, recorded = a_group(slot.seq, extras=extras)
    blobs: Any = {}
    if storage.blobs is not None:
        group, blobs = storage.blobs.put(slot.seq, slot.attempt, slot.token, group, least_bytes=1000)
    payload = encode_group(group)
    header = header_for(slot, {Version(1, 0): 4}, payload)
    return dataclasses.replace(header, lengths=(6,), group_size=1, rewards=recorded.header.rewards, blobs=blobs), payload


async def train(world: Harness, storage: Storage, incarnation: int, step: int, *, extras: dict[str, np.ndarray] | None = None) -> dict[int, bytes]:
    """A step of new groups; their payloads by seq."""
    record = await world.ledger.open_step(incarnation, step)
    put: dict[int, bytes] = {}
    while len(put) < record.groups:
        for slot in await world.reserve(record.groups - len(put), max_bytes=2000):
            header, payload = payload_of(storage, slot, extras or {})
            await world.ledger.put(header, payload)
            put[slot.seq] = payload
    await world.train(incarnation, step)
    return put


def payloads_by_seq(step: RecordedStep) -> dict[int, bytes]:
    pairs = zip(step.chunks, step.payloads, strict=True)
    return {header.seq: payload for chunk, payloads in pairs for header, payload in zip(chunk.headers, payloads, strict=True)}


async def chunks_of(world: Harness, incarnation: int, step: int) -> list[ChunkRecord]:
    record = await world.ledger.open_step(incarnation, step)
    chunks = [await world.ledger.lease(incarnation, step, i) for i in range(-(-record.groups // record.chunk))]
    assert all(isinstance(chunk, ChunkRecord) for chunk in chunks)
    return chunks  # type: ignore[return-value]


# -- the order of things -----------------------------------------------------------------------------------------------------------------------


async def test_a_retired_step_is_durable_before_it_leaves_and_is_recorded_as_it_was_trained(world: Harness, tmp_path: Path, monkeypatch: Any) -> None:
    config = config_of(tmp_path)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    put = {step: await train(world, storage, incarnation, step) for step in (1, 2, 3)}
    for step in (2, 3):
        await world.checkpoint(incarnation, step)
    journal = await world.ledger.chunks(1, 2)
    outcome = await world.ledger.trained_step(2)
    assert outcome is not None
    order: list[tuple[str, int, bool]] = []
    recording = storage.spill
    assert recording is not None
    write, spilled = type(recording).write_step, world.ledger.spilled

    def writing(self: Any, step: RecordedStep) -> None:
        write(self, step)
        order.append(("written", step.step, step.step in self.steps()))

    async def leaving(of: int, step: int) -> None:
        order.append(("leaves", step, step in recording.steps()))
        await spilled(of, step)

    monkeypatch.setattr(type(recording), "write_step", writing)
    monkeypatch.setattr(world.ledger, "spilled", leaving)
    spiller = Spiller(world.ledger, storage, incarnation)
    assert await spiller.flush() == 2
    assert order == [("written", 1, True), ("leaves", 1, True), ("written", 2, True), ("leaves", 2, True)]
    assert await world.payload_count() == 4
    assert spiller.status == SpillStatus(steps=2)
    found = recording.read_step(2)
    assert (found.step, found.incarnation, found.digest, found.at) == (2, incarnation, "w2", outcome.at)
    assert found.chunks == tuple(chunk for chunk in journal if chunk.step == 2)
    assert payloads_by_seq(found) == put[2]
    assert await spiller.flush() == 0
    assert [chunk.step for chunk in await world.ledger.chunks(1, 9)] == [3, 3]


@pytest.mark.parametrize("after", ["nothing", "the write", "the ledger's answer"])
async def test_a_trainer_that_dies_while_it_spills_loses_nothing(world: Harness, tmp_path: Path, monkeypatch: Any, after: str) -> None:
    config = config_of(tmp_path)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    put = await train(world, storage, incarnation, 1)
    for step in (2, 3):
        await train(world, storage, incarnation, step)
        await world.checkpoint(incarnation, step)
    assert storage.spill is not None

    class Died(BaseException):
        pass

    with monkeypatch.context() as dying:
        if after == "nothing":
            dying.setattr(type(storage.spill), "write_step", lambda *_: (_ for _ in ()).throw(Died()))
        else:
            spilled = world.ledger.spilled

            async def die(of: int, step: int) -> None:
                if after == "the ledger's answer":
                    await spilled(of, step)
                raise Died

            dying.setattr(world.ledger, "spilled", die)
        with pytest.raises(Died):
            await Spiller(world.ledger, storage, incarnation).flush()
    kept = (await world.ledger.status()).checkpoints
    second = (await world.ledger.attach(kept[-1], trainer_id="next")).incarnation
    await Spiller(world.ledger, open_storage(config, "demo"), second).flush()
    assert storage.spill.steps() == [1, 2]
    assert payloads_by_seq(storage.spill.read_step(1)) == put
    assert await world.payload_count() == 4


async def test_a_rewind_trains_on_spilled_payloads_and_their_extras(world: Harness, tmp_path: Path) -> None:
    config = config_of(tmp_path, byte_budget=14_000)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    put = {step: await train(world, storage, incarnation, step, extras={"experts": EXPERTS}) for step in range(1, 6)}
    assert await Spiller(world.ledger, storage, incarnation).flush() > 0, "over half the budget is trained, and no checkpoint covers it"
    status = await world.ledger.status()
    assert status.dropped == 0
    assert status.bytes_used <= 7_000

    second = (await world.ledger.attach(None, trainer_id="next")).incarnation
    await world.serve(Version(second, 0))
    buffer = TrainerBuffer(world.ledger, NeverWoken(), second, storage)
    for step in range(1, 6):
        for leased in await chunks_of(world, second, step):
            chunk, groups = await buffer.fetch(leased)
            assert chunk == leased
            for header, group in groups:
                assert header.payload_digest == digest(put[step][header.seq])
                assert group.rollouts[0].tokens.tolist() == list(range(header.seq, header.seq + 6))
                assert np.array_equal(group.extras["experts"], EXPERTS)
        await world.ledger.trained(second, step, f"w{step}", {})


async def test_a_step_trained_again_from_the_spill_is_recorded_anew(world: Harness, tmp_path: Path) -> None:
    """Its record is of weights that were given up: a reader of the line would be told of them for ever."""
    config = config_of(tmp_path, byte_budget=14_000, retention=0)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    put = {step: await train(world, storage, incarnation, step, extras={"experts": EXPERTS}) for step in range(1, 6)}
    assert await Spiller(world.ledger, storage, incarnation).flush() > 0
    second = (await world.ledger.attach(None, trainer_id="next")).incarnation
    await world.serve(Version(second, 0))
    for step in range(1, 6):
        await chunks_of(world, second, step)
        await world.ledger.trained(second, step, f"other{step}", {})
    for step in (4, 5):
        await world.checkpoint(second, step)
    await Spiller(world.ledger, storage, second).flush()
    await world.checkpoint(second, 5)
    assert (await world.ledger.status()).dropped == 4
    assert storage.spill is not None
    again = {step: storage.spill.read_step(step) for step in storage.spill.steps()}
    assert {step: (one.incarnation, one.digest) for step, one in again.items()} == {step: (second, f"other{step}") for step in again}
    assert {step: payloads_by_seq(one) for step, one in again.items()} == {step: put[step] for step in again}
    assert await world.violations() == []


async def test_a_payload_that_is_in_neither_place_is_lost_and_leaves_a_hole_that_is_told(
    world: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, byte_budget=10_000)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    await train(world, storage, incarnation, 1)
    journal = await world.ledger.chunks(1, 1)
    await world.lose_payload(journal[0].headers[1])
    for step in (2, 3, 4, 5):
        await train(world, storage, incarnation, step)
    assert await Spiller(world.ledger, storage, incarnation).flush() > 0
    assert storage.spill is not None
    assert [len(payload) > 0 for payload in storage.spill.read_step(1).payloads[0]] == [True, False]

    second = (await world.ledger.attach(None, trainer_id="next")).incarnation
    leased = (await chunks_of(world, second, 1))[0]
    chunk, groups = await TrainerBuffer(world.ledger, NeverWoken(), second, storage).fetch(leased)
    assert [header.seq for header, _ in groups] == [header.seq for header in chunk.headers] == [0]
    assert chunk.revision > leased.revision
    assert "step 1 is trained again without groups that it had (1): this resume is not exact" in caplog.text


async def test_a_blob_that_is_gone_makes_its_group_a_lost_payload(world: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, chunk_groups=4)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    record = await world.ledger.open_step(incarnation, 1)
    headers = []
    for slot in await world.reserve(5, max_bytes=2000):
        header, payload = payload_of(storage, slot, {"experts": EXPERTS})
        await world.ledger.put(header, payload)
        headers.append(header)
    chunk = await world.ledger.lease(incarnation, 1, 0)
    assert isinstance(chunk, ChunkRecord)
    assert len(chunk.headers) == record.groups == 4
    assert storage.blobs is not None
    storage.blobs.delete(headers[2].blobs["experts"].name)
    trained, groups = await TrainerBuffer(world.ledger, NeverWoken(), incarnation, storage).fetch(chunk)
    assert [header.seq for header, _ in groups] == [0, 1, 3, 4]
    assert trained.headers == tuple(header for header, _ in groups)
    assert (await world.ledger.status()).releases == {Reason.PAYLOAD_LOST: 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"], "the step is whole, so nothing is inexact"


async def test_a_store_that_does_not_answer_is_not_a_lost_payload(world: Harness, tmp_path: Path, monkeypatch: Any) -> None:
    config = config_of(tmp_path, chunk_groups=4)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    await world.ledger.open_step(incarnation, 1)
    for slot in await world.reserve(4, max_bytes=2000):
        await world.ledger.put(*payload_of(storage, slot, {"experts": EXPERTS}))
    chunk = await world.ledger.lease(incarnation, 1, 0)
    assert isinstance(chunk, ChunkRecord)
    buffer = TrainerBuffer(world.ledger, NeverWoken(), incarnation, storage)

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host", "s3://bucket")

    for store, name in ((storage.blobs, "read"), (storage.spill, "names")):
        assert store is not None
        with monkeypatch.context() as cut:
            cut.setattr(store._store, name, unreachable)
            if name == "names":
                await world.lose_payload(chunk.headers[0])
            with pytest.raises(StorageUnavailable, match=r"No route to host.*make buffer.spill and buffer.blobs reachable"):
                await buffer.fetch(chunk)
    assert (await world.ledger.status()).releases == {}


# -- a store that refuses ----------------------------------------------------------------------------------------------------------------------


class Ears:
    """Wraps a spiller: a test hears each round."""

    def __init__(self, spiller: Spiller) -> None:
        self.spiller = spiller
        self.failures: asyncio.Queue[Exception] = asyncio.Queue()
        self.successes: asyncio.Queue[None] = asyncio.Queue()

    def failed(self, problem: Exception, pause_s: float) -> None:
        self.spiller.failed(problem, pause_s)
        self.failures.put_nowait(problem)

    def worked(self) -> None:
        self.spiller.worked()
        self.successes.put_nowait(None)


@contextlib.asynccontextmanager
async def spilling(spiller: Spiller) -> AsyncIterator[Ears]:
    ears, stop = Ears(spiller), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(rounds(spiller.flush, stop, ears))
        try:
            yield ears
        finally:
            stop.set()


async def test_a_full_disk_keeps_payloads_in_redis_says_since_when_and_is_mended_by_room(world: Harness, tiny_disk: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("buffer.upkeep._EVERY_S", 0.01)
    config = settings(spill=str(tiny_disk), byte_budget=9_000, groups_per_step=1, chunk_groups=1)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    (tiny_disk / "demo").mkdir()
    free = os.statvfs(tiny_disk)
    (tiny_disk / "others").write_bytes(b"x" * (free.f_bavail * free.f_bsize))
    at = 1000.0
    spiller = Spiller(world.ledger, storage, incarnation, clock=lambda: at)
    bulk = {"bulk": np.random.default_rng(0).integers(0, 200, 1500, dtype=np.uint8)}
    put = {step: await train(world, storage, incarnation, step, extras=bulk) for step in (1, 2, 3, 4)}
    assert sum(len(payload) for one in put.values() for payload in one.values()) * 2 > 9_000
    async with asyncio.timeout(100), spilling(spiller) as ears:
        problem = await ears.failures.get()
        assert isinstance(problem, OSError)
        assert problem.errno == errno.ENOSPC
        at = 1060.0
        await ears.failures.get()
        assert spiller.status == SpillStatus(failing_since=1000.0, problem=str(problem))
        assert str(tiny_disk) in spiller.status.problem
        assert await world.payload_count() == 4
        edge = await world.ask(4, max_bytes=3000)
        assert getattr(edge, "edge", None) is Edge.NO_BUDGET
        (tiny_disk / "others").unlink()
        await ears.successes.get()
        assert spiller.status.problem == ""
        assert spiller.status.failing_since == 0.0
        assert spiller.status.steps > 0
    assert storage.spill is not None
    assert {step: payloads_by_seq(storage.spill.read_step(step)) for step in storage.spill.steps()} == {step: put[step] for step in storage.spill.steps()}
    assert storage.spill.steps()[0] == 1
    assert await world.payload_count() == 4 - len(storage.spill.steps())
    assert not hasattr(await world.ask(1, max_bytes=3000), "edge"), "there is budget again"


async def test_a_replaced_trainer_spills_no_more(world: Harness, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("buffer.upkeep._EVERY_S", 0.01)
    config = config_of(tmp_path)
    first = await world.start(config)
    storage = open_storage(config, "demo")
    for step in (1, 2, 3):
        await train(world, storage, first, step)
    for step in (2, 3):
        await world.checkpoint(first, step)
    second = (await world.ledger.attach((await world.ledger.status()).checkpoints[-1], trainer_id="next")).incarnation
    spiller = Spiller(world.ledger, storage, first)
    with pytest.raises(Fenced):
        await spiller.flush()
    async with asyncio.timeout(100):
        await rounds(spiller.flush, asyncio.Event(), spiller)  # ends by itself
    assert await world.payload_count() == 12
    assert await Spiller(world.ledger, storage, second).flush() == 2
    assert await world.payload_count() == 4


async def test_upkeep_spills_what_came_last_when_it_closes(world: Harness, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    async with asyncio.timeout(100), upkeep(world.ledger, storage, incarnation) as spiller:
        assert spiller is not None
        for step in (1, 2, 3):
            await train(world, storage, incarnation, step)
        for step in (2, 3):
            await world.checkpoint(incarnation, step)
    assert spiller.status.steps == 2
    assert await world.payload_count() == 4


async def test_a_run_without_a_spill_has_upkeep_all_the_same(world: Harness) -> None:
    incarnation = await world.start(settings())
    async with asyncio.timeout(100), upkeep(world.ledger, Storage(), incarnation) as spiller:
        assert spiller is None


def test_a_spiller_without_a_spill_is_a_mistake(on_pure: Harness) -> None:
    with pytest.raises(ValueError, match=r"without buffer\.spill"):
        Spiller(on_pure.ledger, Storage(), 1)


# -- blobs that nobody needs -------------------------------------------------------------------------------------------------------------------


def blobs_of(storage: Storage) -> set[str]:
    assert storage.blobs is not None
    return {name.split("/")[1].partition("-")[0] for name in storage.blobs._store.names("demo/")}


async def test_blobs_go_with_their_group_and_stay_with_a_recording_of_it(world: Harness, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    sweep = sweeping(world.ledger, storage)
    slots = await world.reserve(7, max_bytes=2000)
    for slot in slots:  # all of them have written their blobs
        header, payload = payload_of(storage, slot, {"experts": EXPERTS})
        if slot.seq < 5:
            await world.ledger.put(header, payload)
    await sweep()
    assert blobs_of(storage) == {"0", "1", "2", "3", "4", "5", "6"}
    await world.ledger.release(slots[5].seq, slots[5].token, Reason.FAILED)  # refused by the ledger, or by the producer
    await world.advance(61)  # the owner of 6 died between blob and put
    assert await world.ledger.set_aside(incarnation, [(slots[4].seq, slots[4].token)]) == 1
    await sweep()
    assert blobs_of(storage) == {"0", "1", "2", "3", "4"}
    await world.train(incarnation, 1)
    for step in (2, 3):
        await train(world, storage, incarnation, step)
        await world.checkpoint(incarnation, step)
    await Spiller(world.ledger, storage, incarnation).flush()
    assert (await world.ledger.status()).dropped >= 1
    await sweep()
    assert blobs_of(storage) == {"0", "1", "2", "3", "4"}, "recordings refer to them"


async def test_without_a_spill_blobs_go_when_a_checkpoint_frees_their_step(world: Harness, tmp_path: Path) -> None:
    config = settings(blobs=str(tmp_path), blob_bytes=1000)
    incarnation = await world.start(config)
    storage = open_storage(config, "demo")
    sweep = sweeping(world.ledger, storage)
    for step in (1, 2, 3):
        await train(world, storage, incarnation, step, extras={"experts": EXPERTS})
        await sweep()
    assert len(blobs_of(storage)) == 12
    for step in (2, 3):
        await world.checkpoint(incarnation, step)
    await sweep()
    assert blobs_of(storage) == {"8", "9", "10", "11"}


async def test_a_store_that_refuses_to_delete_is_asked_again(world: Harness, tmp_path: Path, monkeypatch: Any) -> None:
    config = settings(blobs=str(tmp_path), blob_bytes=1000)
    await world.start(config)
    storage = open_storage(config, "demo")
    assert storage.blobs is not None
    (slot,) = await world.reserve(1, max_bytes=2000)
    payload_of(storage, slot, {"experts": EXPERTS})
    await world.ledger.release(slot.seq, slot.token, Reason.GIVEN_BACK)
    sweep = sweeping(world.ledger, storage)
    with monkeypatch.context() as broken:
        broken.setattr(storage.blobs._store, "delete", lambda _name: (_ for _ in ()).throw(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(PermissionError):
            await sweep()
    assert blobs_of(storage) == {"0"}
    await sweep()
    assert blobs_of(storage) == set()
