"""Reading the journal again: byte for byte from Redis and from the spill, what a gap says, and a reader that follows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import buffer.replay
from buffer.config import BufferConfig
from buffer.recording import RecordedGroup, RecordedStep, Recording, RecordingAbout
from buffer.replay import JournalReader, ReplayRange, cut_into_steps, decoded, recorded_steps, self_contained
from buffer.staleness import token_mask
from buffer.storage import Storage, open_storage
from protocol.codec import decode_group, digest, encode, encode_group
from protocol.connection import Client
from protocol.errors import ConfigError, ReplayGap
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Attempt, GroupHeader, Rollout, RolloutGroup, Seq, SlotToken, Span
from protocol.objects import object_store
from protocol.versions import Fork, Lineage, Version
from protocol.wakeups import Wakeups, wakeups

WRITER = Version(3, 7)
IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=2, dataset="rows", tokenizer="words")


def settings(**changes: object) -> BufferConfig:
    return BufferConfig.model_validate({"groups_per_step": 4, "pipeline_depth": 1.0, "chunk_groups": 2, "byte_budget": 100_000, "retention": 100} | changes)


def bytes_of(step: RecordedStep) -> list[tuple[bytes, bytes]]:
    """Header and payload of every group, in order."""
    return [
        (encode(header), payload)
        for chunk, payloads in zip(step.chunks, step.payloads, strict=True)
        for header, payload in zip(chunk.headers, payloads, strict=True)
    ]


async def train(world: Any, incarnation: int, step: int) -> list[tuple[bytes, bytes]]:
    """Produce and train a step; what a trainer was given, byte for byte."""
    await world.produce(4, Version(incarnation, step - 1))
    chunks = await world.lease(incarnation, step)
    headers = [header for chunk in chunks for header in chunk.headers]
    given = list(zip(map(encode, headers), await world.ledger.payloads(headers), strict=True))
    await world.ledger.trained(incarnation, step, f"w{step}", {})
    await world.serve(Version(incarnation, step))
    return given


async def train_again(world: Any, incarnation: int, step: int) -> None:
    await world.lease(incarnation, step)
    await world.ledger.trained(incarnation, step, f"other{step}", {})


async def spill(world: Any, storage: Storage, incarnation: int, last: int) -> None:
    """Move steps 1 to `last` out of the ledger's own store."""
    reader = JournalReader(world.ledger, Storage())
    assert storage.spill is not None
    for step in range(1, last + 1):
        storage.spill.write_step(await reader.read(step))
        await world.ledger.spilled(incarnation, step)


async def test_a_step_is_read_as_it_was_trained_from_redis_then_from_the_spill_and_is_judged_by_the_same_record(world: Any, tmp_path: Path) -> None:
    config = settings(spill=str(tmp_path / "spill"), retention=0)
    incarnation = await world.start(config)
    storage = open_storage(config, "run")
    reader = JournalReader(world.ledger, storage)
    given = {step: await train(world, incarnation, step) for step in range(1, 6)}

    before = {step: await reader.read(step) for step in given}
    assert {step: bytes_of(found) for step, found in before.items()} == given
    assert [(before[3].digest, before[3].incarnation, [chunk.chunk for chunk in before[3].chunks])] == [("w3", incarnation, [0, 1])]

    await spill(world, storage, incarnation, 3)
    assert await world.payload_count() == 8, "three steps have left"
    for step in (4, 5):
        await world.checkpoint(incarnation, step)
    dropped = (await world.ledger.status()).dropped
    assert dropped >= 3, "their journal entries are gone too"
    after = {step: await reader.read(step) for step in range(1, 6) if step > dropped or step <= 3}
    assert {step: bytes_of(found) for step, found in after.items()} == {step: given[step] for step in after}
    assert [chunk.record for chunk in after[2].chunks] == [chunk.record for chunk in before[2].chunks], "so it masks the same tokens"
    assert (after[2].digest, after[2].incarnation) == ("w2", incarnation)


async def test_a_gap_says_what_is_asked_for_and_what_is_held(world: Any, tmp_path: Path) -> None:
    incarnation = await world.start(settings(retention=1))
    reader = JournalReader(world.ledger, Storage())
    with pytest.raises(ReplayGap, match="no trained step is held"):
        await reader.steps(ReplayRange())
    for step in range(1, 6):
        await train(world, incarnation, step)
    for step in (4, 5):
        await world.checkpoint(incarnation, step)
    assert await reader.steps(ReplayRange()) == [4, 5]
    with pytest.raises(ReplayGap, match=r"step 2 is not held; held are 4 to 5"):
        await reader.read(2)
    with pytest.raises(ReplayGap, match=r"step 9 is not held; held are 4 to 5; it is not trained yet"):
        await reader.read(9)
    with pytest.raises(ReplayGap, match=r"steps 2 to 3 are not held; held are 4 to 5.*buffer.retention or buffer.spill"):
        await reader.steps(ReplayRange.parse("2:5"))
    with pytest.raises(ReplayGap, match=r"steps 6 to 7 are not held"):
        await reader.steps(ReplayRange.parse("5:7"))


async def test_a_payload_that_is_gone_is_a_gap_and_never_a_shorter_step(world: Any) -> None:
    incarnation = await world.start(settings())
    await train(world, incarnation, 1)
    (chunk, _) = await world.ledger.chunks(1, 1)
    await world.lose_payload(chunk.headers[1])
    with pytest.raises(ReplayGap, match=r"step 1: the payload of group 1 is neither in Redis nor in the spill"):
        await JournalReader(world.ledger, Storage()).read(1)


async def test_steps_are_chosen_by_number_by_policy_and_by_time(world: Any) -> None:
    incarnation = await world.start(settings())
    for step in range(1, 5):
        await train(world, incarnation, step)
    reader = JournalReader(world.ledger, Storage())
    assert await reader.steps(ReplayRange.parse("2:3")) == [2, 3]
    assert await reader.steps(ReplayRange.parse(":2")) == [1, 2]
    assert await reader.steps(ReplayRange.parse("3")) == [3]
    assert await reader.steps(ReplayRange.of_versions("0:2")) == [1, 2, 3], "step s trains v(s-1)"
    at = [(await world.ledger.trained_step(step)).at for step in range(1, 5)]
    wanted = [step for step, moment in enumerate(at, 1) if at[1] <= moment <= at[2]]
    assert await reader.steps(ReplayRange(since=at[1], until=at[2])) == wanted
    with pytest.raises(ReplayGap, match="was trained in that time"):
        await reader.steps(ReplayRange(since=at[3] + 1))
    for wrong in ("", ":", "a:b", "1:2:3", "-1:4", "5:2"):
        with pytest.raises(ConfigError, match="--steps"):
            ReplayRange.parse(wrong)


async def test_a_hole_in_a_step_that_is_not_asked_for_is_no_gap(world: Any, tmp_path: Path) -> None:
    config = settings(spill=str(tmp_path / "spill"), retention=0)
    incarnation = await world.start(config)
    storage = open_storage(config, "run")
    for step in range(1, 5):
        await train(world, incarnation, step)
    since = (await world.ledger.trained_step(3)).at
    await spill(world, storage, incarnation, 2)
    assert storage.spill is not None
    for step in (1, 2):
        holed = storage.spill.read_step(step)
        storage.spill.write_step(dataclasses.replace(holed, at=since - 10 + step, payloads=tuple((b"", *rest) for _, *rest in holed.payloads)))
    for step in (3, 4):
        await world.checkpoint(incarnation, step)
    assert (await world.ledger.status()).dropped == 2
    reader = JournalReader(world.ledger, storage)
    assert await reader.steps(ReplayRange(since=since)) == [3, 4]
    assert await reader.steps(ReplayRange(until=since - 9)) == [1]
    with pytest.raises(ReplayGap, match=r"step 1: the payload of group 0 was lost before it was recorded"):
        await reader.read(1)


async def taken(stream: AsyncGenerator[RecordedStep, None], count: int) -> list[tuple[int, int]]:
    """(step, incarnation) of the next `count`."""
    async with asyncio.timeout(100):
        found = [await anext(stream) for _ in range(count)]
    return [(step.step, step.incarnation) for step in found]


async def test_a_follower_is_known_takes_nothing_and_is_given_rewound_steps_again_by_the_incarnation_that_trains_them(world: Any) -> None:
    """Its first look is at a line that is then left after step 2: of the steps it has, 3 and 4 come again."""
    first = await world.start(settings())
    for step in range(1, 5):
        await train(world, first, step)
        if step in (1, 2):
            await world.checkpoint(first, step)
    ledger = world.ledger
    before = await ledger.status()
    stream = JournalReader(ledger, Storage()).follow("shadow-a", Wakeups(), 1)
    assert await taken(stream, 4) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    after = await ledger.status()
    assert after.readers == {"shadow-a": 4}
    assert dataclasses.replace(after, readers={}, sequence=0) == dataclasses.replace(before, readers={}, sequence=0)

    checkpoint = next(one for one in after.checkpoints if one.step == 2)
    second = (await ledger.attach(checkpoint, trainer_id="t2")).incarnation
    await world.lease(second, 3)
    await ledger.trained(second, 3, "other weights", {})
    assert await taken(stream, 1) == [(3, 2)]
    await world.lease(second, 4)
    await ledger.trained(second, 4, "other weights still", {})
    await ledger.drain(second, "test")
    assert await taken(stream, 1) == [(4, 2)]
    async with asyncio.timeout(100):
        assert await anext(stream, None) is None, "the run has drained"


@pytest.mark.parametrize("trained_again", [2, 4])
async def test_a_run_that_goes_back_while_a_step_is_read_ends_no_follower(world: Any, monkeypatch: pytest.MonkeyPatch, trained_again: int) -> None:
    first = await world.start(settings())
    for step in range(1, 5):
        await train(world, first, step)
        if step in (1, 2):
            await world.checkpoint(first, step)
    ledger, outcome_of, gone_back = world.ledger, world.ledger.trained_step, False

    async def trained_step(step: int) -> Any:
        nonlocal gone_back
        outcome = await outcome_of(step)
        if step < 4 or gone_back:
            return outcome
        gone_back = True
        second = (await ledger.attach(next(one for one in (await ledger.status()).checkpoints if one.step == 2), trainer_id="t2")).incarnation
        for again in range(3, trained_again + 1):
            await train_again(world, second, again)
        return None  # asked between the two

    monkeypatch.setattr(ledger, "trained_step", trained_step)
    stream = JournalReader(ledger, Storage()).follow("shadow-a", Wakeups(), 1)
    assert await taken(stream, 3) == [(1, 1), (2, 1), (3, 1)]
    if trained_again == 4:
        assert await taken(stream, 2) == [(3, 2), (4, 2)]
    else:
        following = asyncio.create_task(anext(stream), name="follow")
        while not gone_back:
            await asyncio.sleep(0)
        await train_again(world, 2, 3)
        async with asyncio.timeout(100):
            assert (await following).incarnation == 2
    await stream.aclose()


async def test_what_the_spill_has_of_a_line_that_was_given_up_is_a_gap_and_no_step_for_ever(world: Any, tmp_path: Path) -> None:
    config = settings(spill=str(tmp_path / "spill"), retention=0)
    first = await world.start(config)
    storage = open_storage(config, "run")
    for step in (1, 2):
        await train(world, first, step)
    await spill(world, storage, first, 2)
    second = (await world.ledger.attach(None, trainer_id="t2")).incarnation
    for step in (1, 2):
        await train_again(world, second, step)
        await world.ledger.spilled(second, step)  # and never wrote it
        await world.checkpoint(second, step)
    assert (await world.ledger.status()).dropped == 1
    stream = JournalReader(world.ledger, storage).follow("shadow-a", Wakeups(), 1)
    with pytest.raises(ReplayGap, match=r"step 1 is held only as incarnation 1 trained it"):
        await taken(stream, 1)


async def test_steps_whose_weights_came_out_equal_do_not_come_again(world: Any) -> None:
    first = await world.start(settings())
    for step in range(1, 4):
        await train(world, first, step)
        if step == 1:
            await world.checkpoint(first, step)
    ledger = world.ledger
    stream = JournalReader(ledger, Storage()).follow("shadow-a", Wakeups(), 1)
    assert await taken(stream, 3) == [(1, 1), (2, 1), (3, 1)]
    second = (await ledger.attach((await ledger.status()).checkpoints[0], trainer_id="t2")).incarnation
    for step in (2, 3):
        await world.lease(second, step)
        await ledger.trained(second, step, f"w{step}", {})
    await train(world, second, 4)
    assert await taken(stream, 1) == [(4, 2)]
    await stream.aclose()


async def test_a_follower_waits_for_the_next_step_and_is_woken_by_it(redis: Client, keys: Keys, on_redis: Any) -> None:
    incarnation = await on_redis.start(settings())
    async with wakeups(redis, keys) as waker:
        stream = JournalReader(on_redis.ledger, Storage()).follow("shadow-a", waker, 1)
        waiting = asyncio.create_task(taken(stream, 1))
        await train(on_redis, incarnation, 1)
        assert await waiting == [(1, incarnation)]
        await stream.aclose()


# -- recordings ----------------------------------------------------------------------------------------------------------------------------------


def group(version: Version, *, extras: bool = False) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            tokens=np.arange(5, dtype=np.int32) + i,
            mask=np.array([0, 0, 1, 1, 1], dtype=np.uint8),
            logprobs=np.array([0, 0, -1, -2, -3], dtype=np.float32),
            spans=(Span(version=version, start=2, end=5),),
            reward=float(i),
        )
        for i in range(2)
    )
    return RolloutGroup(rollouts=rollouts, extras={"experts": np.arange(4000, dtype=np.int32)} if extras else {})


def recorded(seq: int, version: Version = WRITER) -> RecordedGroup:
    payload = encode_group(group(version))
    header = GroupHeader(
        seq=Seq(seq),
        attempt=Attempt(1),
        token=SlotToken("t"),
        prompt_id=str(seq),
        producer_id="p",
        group_size=2,
        lengths=(5, 5),
        trainable={version: 6},
        oldest=version,
        rewards=(0.0, 1.0),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )
    return RecordedGroup(header=header, payload=payload)


def test_loose_groups_become_steps_in_order_with_nothing_masked_and_the_rest_left_over() -> None:
    steps = list(cut_into_steps((recorded(seq, Version(1 + seq % 3, 7 * (seq % 3))) for seq in range(11)), settings(groups_per_step=4, chunk_groups=3)))
    assert [[header.seq for chunk in step.chunks for header in chunk.headers] for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [[len(chunk.headers) for chunk in step.chunks] for step in steps] == [[3, 1], [3, 1]]
    assert [[chunk.last for chunk in step.chunks] for step in steps] == [[False, True]] * 2
    for step in steps:
        for chunk, groups in decoded(step, None):
            for _, one in groups:
                for (mask, ages), rollout in zip(token_mask(one, chunk.record), one.rollouts, strict=True):
                    assert mask.tolist() == rollout.mask.tolist()
                    assert set(ages[2:].tolist()) == {step.step - 1}


def test_a_recording_with_a_hole_between_two_steps_is_no_stream(tmp_path: Path) -> None:
    recording = Recording(object_store(str(tmp_path / "r"), key="--out"))
    recording.describe(RecordingAbout(run="r", identity=IDENTITY, settings=settings()))
    for step in cut_into_steps((recorded(seq) for seq in range(12)), settings()):
        if step.step != 2:
            recording.write_step(step)
    with pytest.raises(ReplayGap, match=r"steps 1, 3, 2 are missing"):
        list(recorded_steps(recording, settings()))


def test_a_group_takes_its_extras_along_and_one_without_keeps_its_very_bytes(tmp_path: Path) -> None:
    storage = open_storage(settings(blobs=str(tmp_path / "blobs"), blob_bytes=100), "run")
    assert storage.blobs is not None
    version = Version(1, 0)
    whole = group(version, extras=True)
    small, blobs = storage.blobs.put(Seq(0), Attempt(1), SlotToken("t"), whole, least_bytes=100)
    payload = encode_group(small)
    header = dataclasses.replace(recorded(0, version).header, payload_bytes=len(payload), payload_digest=digest(payload), blobs=blobs)
    alone = self_contained(RecordedGroup(header=header, payload=payload), storage.blobs)
    storage.blobs.delete("")
    assert alone.header.blobs == {}
    assert alone.header.payload_digest == digest(alone.payload)
    assert decode_group(alone.payload).extras["experts"].tolist() == whole.extras["experts"].tolist()
    plain = recorded(1)
    assert self_contained(plain, storage.blobs) is plain


def test_examples_in_docstrings_are_true() -> None:
    import doctest

    found = doctest.testmod(buffer.replay, extraglobs={"Lineage": Lineage, "Fork": Fork})
    assert (found.failed, found.attempted > 3) == (0, True)
