"""A fork is the ledger at one moment, rewound: what was spilled and what lies in blobs comes along, and the other run is only read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from buffer.client import TrainerBuffer
from buffer.contract import CheckpointRef, Granted
from buffer.fork import Moved, RunCopy, copy_payloads, copy_stores, read_run, write_run
from buffer.recording import RecordingAbout
from buffer.redis_ledger import RedisLedger
from buffer.replay import decoded
from buffer.spill import Spiller
from buffer.storage import claim_storage, open_storage
from protocol.codec import digest, encode_group
from protocol.connection import Client
from protocol.errors import RunExists, RunMissing
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus, GroupHeader, Rollout, RolloutGroup, Seq, Span
from protocol.versions import Version
from protocol.wakeups import wakeups
from weightsync.registry import Registry

from .conftest import IDENTITY, settings

BYTES = 2_000


def group_of(seq: int, version: Version) -> RolloutGroup:
    """A rollout of 4 tokens, and an extra of 64 bytes that says whose it is."""
    mask = np.array([0, 1, 1, 1], dtype=np.uint8)
    spans = (Span(version=version, start=1, end=4),)
    rollout = Rollout(tokens=np.full(4, seq, dtype=np.int32), mask=mask, logprobs=np.zeros(4, dtype=np.float32), spans=spans, reward=1.0)
    return RolloutGroup(rollouts=(rollout,), extras={"experts": np.full(16, seq, dtype="<i4")})


class World:
    """A run with spill and blobs, one group a step, and an engine that always serves the newest version."""

    def __init__(self, client: Client, keys: Keys, folder: Path) -> None:
        self.client, self.keys, self.folder = client, keys, folder
        self.settings = settings(
            groups_per_step=1, chunk_groups=1, pipeline_depth=3.0, spill=str(folder / "spill"), blobs=str(folder / "blobs"), blob_bytes=64, max_staleness=99
        )
        self.ledger = RedisLedger(client, keys)
        self.storage = open_storage(self.settings, keys.run)

    async def start(self) -> None:
        await self.ledger.create(IDENTITY, self.settings)
        await asyncio.to_thread(claim_storage, self.storage, RecordingAbout(run=self.keys.run, identity=IDENTITY, settings=self.settings))
        await self.ledger.attach(None, trainer_id="trainer")
        status = EngineStatus(engine_id=EngineId("e"), boot_nonce="n", url="http://127.0.0.1:9", kind="embedded", state=EngineState.STARTING)
        registry = Registry(self.client, self.keys)
        await registry.beat(status)
        await registry.ack("e", "n", Version(1, 0))

    async def put(self, count: int) -> None:
        for _ in range(count):
            granted = await self.ledger.reserve("owner", f"{np.random.default_rng().integers(1 << 60)}", 1, max_bytes=BYTES)
            assert isinstance(granted, Granted)
            (slot,) = granted.slots
            assert self.storage.blobs is not None
            group, blobs = self.storage.blobs.put(slot.seq, slot.attempt, slot.token, group_of(slot.seq, Version(1, 0)), least_bytes=64)
            payload = encode_group(group)
            header = GroupHeader(
                seq=slot.seq,
                attempt=slot.attempt,
                token=slot.token,
                prompt_id=f"row-{slot.seq}",
                producer_id="producer",
                group_size=1,
                lengths=(4,),
                sampled=(3,),
                trainable={Version(1, 0): 3},
                oldest=Version(1, 0),
                rewards=(1.0,),
                payload_bytes=len(payload),
                payload_digest=digest(payload),
                blobs=blobs,
            )
            await self.ledger.put(header, payload)

    async def train(self, *steps: int) -> None:
        for step in steps:
            await self.put(1)
            await self.ledger.open_step(1, step)
            await self.ledger.lease(1, step, 0)
            await self.ledger.trained(1, step, f"d{step}", {})

    async def checkpoint(self, *steps: int) -> None:
        for step in steps:
            await self.ledger.checkpoint(1, CheckpointRef(step=step, incarnation=1, digest=f"d{step}", path=f"/nowhere/step-{step}"), keep=2)

    async def spill(self, due: int, last: int) -> None:
        """Every step that is due, `due` of them, and those up to `last`, as it would be with trained bytes pressing on the budget."""
        spiller = Spiller(self.ledger, self.storage, 1)
        assert await spiller.flush() == due
        for step in range(due + 1, last + 1):
            assert await spiller._spill(step)

    async def dumps(self) -> dict[bytes, object]:
        """Everything of the run that a look does not change."""
        found: dict[bytes, object] = {}
        async for key in self.client.scan_iter(match=f"*{self.keys.run}[:}}]*"):
            found[key] = await self.client.dump(key)
        state = await self.client.hgetall(self.keys.state)
        found[self.keys.state.encode()] = {name: value for name, value in state.items() if name not in (b"clock", b"seen")}
        return found

    def files(self) -> dict[str, bytes]:
        own = [self.folder / "spill" / self.keys.run, self.folder / "blobs" / self.keys.run]
        return {str(path): path.read_bytes() for folder in own for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest_asyncio.fixture
async def world(redis: Client, keys: Keys, tmp_path: Path) -> AsyncIterator[World]:
    found = World(redis, keys, tmp_path)
    await found.start()
    yield found


def checkpoint_of(copy: RunCopy, step: int) -> CheckpointRef:
    (found,) = [one for one in copy.checkpoints if one.step == step]
    return dataclasses.replace(found, path="/elsewhere")


async def test_a_fork_replays_from_redis_spill_and_blobs_what_the_other_run_took_after_the_checkpoint(world: World):
    """Checkpoints of 2 and 4; steps up to 5 have left Redis for the spill, 6 has not, two groups are READY and one is being generated."""
    await world.train(1, 2, 3, 4, 5, 6)
    await world.checkpoint(2, 4)
    await world.spill(2, 5)
    await world.put(2)
    assert isinstance(await world.ledger.reserve("owner", "left alone", 1, max_bytes=BYTES), Granted)
    before, files = await world.dumps(), world.files()

    target = Keys(f"{world.keys.run}-b")
    copy = await read_run(world.client, world.keys)
    assert (copy.trained, copy.dropped, [one.step for one in copy.checkpoints]) == (6, 2, [2, 4])
    copied = await copy_payloads(world.client, copy, target)
    changed = await asyncio.to_thread(copy_stores, copy, target)
    incarnation = await write_run(world.client, copy, target, checkpoint_of(copy, 4), changed)
    assert (await world.dumps(), world.files()) == (before, files), "the other run is only read"

    fork = RedisLedger(world.client, target)
    status = await fork.status()
    assert (incarnation, status.incarnation, status.trained, status.leased, status.ready, status.generating, status.released) == (2, 2, 4, 2, 2, 0, 1)
    assert [(one.step, one.path) for one in status.checkpoints] == [(4, "/elsewhere")]
    assert len(copied) == len(copy.headers) - len(copy.spilled)


async def test_what_a_fork_trains_is_what_the_other_run_had(world: World):
    await world.train(1, 2, 3, 4, 5)
    await world.checkpoint(1, 2, 3)
    await world.spill(2, 4)
    await world.put(2)
    target = Keys(f"{world.keys.run}-b")
    copy = await read_run(world.client, world.keys)
    await copy_payloads(world.client, copy, target)
    await write_run(world.client, copy, target, checkpoint_of(copy, 3), await asyncio.to_thread(copy_stores, copy, target))
    await RedisLedger(world.client, world.keys).delete_run()
    for where in ("spill", "blobs"):
        await asyncio.to_thread(lambda folder: [path.unlink() for path in folder.rglob("*") if path.is_file()], world.folder / where / world.keys.run)

    fork = RedisLedger(world.client, target)
    attachment = await fork.attach((await fork.status()).checkpoints[-1], trainer_id="trainer")
    assert (attachment.incarnation, attachment.resume_step) == (3, 3)
    seen: list[Seq] = []
    async with wakeups(world.client, target) as waker:
        buffer = TrainerBuffer(fork, waker, attachment.incarnation, open_storage(world.settings, target.run))
        for step in (4, 5, 6, 7):
            await fork.open_step(attachment.incarnation, step)
            _, groups = await buffer.fetch(await buffer.lease(step, 0))
            for header, group in groups:
                seen.append(header.seq)
                assert group.rollouts[0].tokens.tolist() == [header.seq] * 4
                assert group.extras["experts"].tolist() == [header.seq] * 16
            await fork.trained(attachment.incarnation, step, f"other {step}", {})
    assert seen == [3, 4, 5, 6]


async def test_recorded_steps_of_a_fork_have_blobs_of_its_own(world: World):
    await world.train(1, 2, 3, 4)
    await world.checkpoint(1, 2)
    await world.spill(1, 4)
    target = Keys(f"{world.keys.run}-b")
    await asyncio.to_thread(copy_stores, await read_run(world.client, world.keys), target)
    for path in (world.folder / "blobs" / world.keys.run).rglob("*"):
        if path.is_file():
            path.unlink()
    of_fork = open_storage(world.settings, target.run)
    assert of_fork.spill is not None
    steps = of_fork.spill.steps()
    assert steps == [2, 3, 4]
    for step in steps:
        ((_, [(header, group)]),) = decoded(of_fork.spill.read_step(step), of_fork.blobs)
        assert group.extras["experts"].tolist() == [header.seq] * 16


async def test_a_run_that_lets_go_of_what_is_copied_is_noticed_and_nothing_is_left(world: World):
    await world.train(1, 2)
    await world.checkpoint(1, 2)
    await world.put(1)
    copy = await read_run(world.client, world.keys)
    gone = copy.headers[-1]
    await world.client.delete(world.keys.payload(gone.seq, gone.attempt, gone.token))
    target = Keys(f"{world.keys.run}-b")
    with pytest.raises(Moved, match=f"group {gone.seq}"):
        await copy_payloads(world.client, copy, target)
    assert [key async for key in world.client.scan_iter(match=f"*{target.run}*")] == []


async def test_a_name_that_is_taken_stays_as_it_is(world: World, keys: Keys):
    await world.train(1)
    await world.checkpoint(1)
    copy, target = await read_run(world.client, world.keys), Keys(f"{keys.run}-b")
    await write_run(world.client, copy, target, checkpoint_of(copy, 1), {})
    taken = await RedisLedger(world.client, target).status()
    with pytest.raises(RunExists, match="exists already"):
        await write_run(world.client, copy, target, checkpoint_of(copy, 1), {})
    assert await RedisLedger(world.client, target).status() == taken


async def test_a_run_that_is_not_there_cannot_be_read(redis: Client, keys: Keys):
    with pytest.raises(RunMissing):
        await read_run(redis, keys)
