"""Rollouts without a trainer: what is recorded, what comes free again, whose run is left alone, and what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.blobs import BlobStore
from buffer.config import BufferConfig
from buffer.contract import Granted, RunState
from buffer.recording import Recording
from buffer.storage import Storage
from producer.config import RolloutOnlyConfig
from producer.main import prepare
from producer.rollout_only import TRAINER_ID, Owner, Recorder
from protocol.codec import decode_group, digest, encode_group
from protocol.config import validate
from protocol.errors import ConfigError, Fenced, RunExists
from protocol.keys import Keys
from protocol.messages import BlobRef, GroupHeader, Reason, Rollout, RolloutGroup, Span, TrainerStatus
from protocol.objects import object_store
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync.channel import Channel
from weightsync.safetensors_file import write_tensors
from weightsync.snapshot import TensorBytes, weights_digest

ROOT = Path(__file__).parents[2]
WEIGHTS = {name: TensorBytes(dtype="F32", shape=(4,), data=np.arange(4, dtype=np.float32).tobytes()) for name in ("a.weight", "b.weight")}
FIRST = Version(1, 0)


def sections(stage: Any, **changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The run's file, B = 2 and room for 3 groups; its model has weights in two files."""
    (stage.folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    for name, tensor in WEIGHTS.items():
        path = stage.folder / "model" / f"{name}.safetensors"
        if not path.exists():
            write_tensors(path, {name: tensor}, durable=False)
    base: dict[str, dict[str, Any]] = {
        "buffer": {"groups_per_step": 2, "pipeline_depth": 0.5, "slot_seconds": 600.0},
        "weights": {"store": str(stage.folder / "weights")},
    }
    return base | changes


def owner(stage: Any, **changes: dict[str, Any]) -> Owner:
    values = stage.values(**sections(stage, **changes))
    config = validate(RolloutOnlyConfig, values, source="test")
    return Owner(config, identity=prepare(config).identity, client=stage.redis, keys=Keys(config.run.name), waker=stage.wakeups)


def recording(where: Path) -> Recording:
    return Recording(object_store(str(where), key="--rollout-only"))


async def start(stage: Any, where: Path, *arguments: str) -> asyncio.subprocess.Process:
    """The command as a process."""
    with (stage.folder / "run.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "producer.main", "-c", str(stage.file(**sections(stage))), "--rollout-only", str(where), *arguments),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=log,
        )


async def ended(stage: Any, process: asyncio.subprocess.Process) -> int:
    try:
        async with asyncio.timeout(300):
            return await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
            sys.stderr.write((stage.folder / "run.log").read_text())


async def reached(stage: Any, count: int) -> None:
    """Returns once so many groups have left the ledger into the recording."""
    async with asyncio.timeout(300):
        while True:
            mark = stage.wakeups.mark(*Topic)
            if await stage.redis.exists(stage.keys.state) and (await stage.ledger.status()).dead.get(Reason.RECORDED, 0) >= count:
                return
            await stage.wakeups.wait(*Topic, since=mark, timeout_s=0.2)


async def test_it_makes_the_run_publishes_the_starting_weights_records_n_groups_and_ends_drained(stage: Any, tmp_path: Path) -> None:
    """More groups than there are slots: those that are recorded give theirs back."""
    engine = await stage.engine("a")
    process = await start(stage, tmp_path / "out", "--groups", "7")
    assert await ended(stage, process) == 0, (stage.folder / "run.log").read_text()

    groups = list(recording(tmp_path / "out").groups())
    assert len({(group.header.seq, group.header.token) for group in groups}) == len(groups) == 7
    assert all(group.header.trainable == {FIRST: 8} for group in groups)
    assert all([rollout.finish_reason for rollout in decode_group(group.payload).rollouts] == ["stop", "stop"] for group in groups)
    about = recording(tmp_path / "out").about()
    assert (about.run, about.settings.groups_per_step, about.identity.group_size) == (stage.keys.run, 2, 2)
    status = await stage.ledger.status()
    assert (status.state, status.trained, status.dead[Reason.RECORDED], status.generating) == (RunState.DRAINING, 0, 7, 0)
    assert len(engine.requests) >= 14
    newest = await Channel(stage.redis, stage.keys).newest()
    assert newest is not None
    assert (newest.version, newest.digest) == (FIRST, weights_digest(WEIGHTS))
    assert await Presence(stage.redis, stage.keys, "trainer", TrainerStatus).members() == []
    audit = [line for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines() if '"op":"dead"' in line]
    assert len(audit) == 7


@pytest.mark.faults
@pytest.mark.timeout(500)
async def test_killed_at_any_time_it_goes_on_and_no_group_is_lost_or_recorded_under_two_names(stage: Any, tmp_path: Path) -> None:
    await stage.engine("a")
    how = ("--groups", "40", "--set", "buffer.slot_seconds=5.0")  # what a killed one held comes free then
    process = await start(stage, tmp_path / "out", *how)
    await reached(stage, 5)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    # What its engine answers is of version 1:0 still, which lies on the line of the second attachment.
    second = await start(stage, tmp_path / "out", *how)
    assert await ended(stage, second) == 0, (stage.folder / "run.log").read_text()

    groups = list(recording(tmp_path / "out").groups())
    counted = Counter(group.header.seq for group in groups)
    assert set(counted.values()) == {1}
    status = await stage.ledger.status()
    assert (status.dead[Reason.RECORDED], len(counted)) == (40, 40)
    assert status.incarnation == 2
    assert status.next_seq == 40 + status.outstanding + status.released, "every prompt handed out is recorded, or still in the buffer"


async def test_sigterm_records_what_is_ready_and_leaves_the_run_drained(stage: Any, tmp_path: Path) -> None:
    engine = await stage.engine("a")
    process = await start(stage, tmp_path / "out")
    await reached(stage, 2)
    process.send_signal(signal.SIGTERM)
    assert await ended(stage, process) == 0, (stage.folder / "run.log").read_text()
    status = await stage.ledger.status()
    assert (status.state, status.generating, status.ready) == (RunState.DRAINING, 0, 0)
    assert len(list(recording(tmp_path / "out").groups())) == status.dead[Reason.RECORDED]
    assert engine.requests


# -- whose run it is -----------------------------------------------------------------------------------------------------------------------------


async def nothing(stop: asyncio.Event) -> None:
    await stop.wait()


def stopped() -> asyncio.Event:
    stop = asyncio.Event()
    stop.set()
    return stop


async def test_a_run_that_is_or_was_anybodys_training_is_left_alone(stage: Any, tmp_path: Path) -> None:
    trainers = Presence(stage.redis, stage.keys, "trainer", TrainerStatus)
    await trainers.beat("host-1", TrainerStatus(trainer_id="host-1"), ttl_s=600.0)
    with pytest.raises(RunExists, match=r"has a trainer \(host-1\).*another run.name"):
        await owner(stage).run(stopped(), nothing, where=str(tmp_path / "out"), groups=None)
    await trainers.leave("host-1")
    await stage.create(stage.config())
    with pytest.raises(RunExists, match=r"was made to be trained.*another run.name"):
        await owner(stage).run(stopped(), nothing, where=str(tmp_path / "out"), groups=None)
    assert (await stage.ledger.status()).incarnation == 1
    assert not (tmp_path / "out").exists()


async def test_its_own_run_is_taken_up_again_and_the_owner_before_is_fenced(stage: Any, tmp_path: Path) -> None:
    where = str(tmp_path / "out")
    stop = asyncio.Event()
    first = asyncio.create_task(owner(stage).run(stop, nothing, where=where, groups=None))
    trainers = Presence(stage.redis, stage.keys, "trainer", TrainerStatus)
    async with asyncio.timeout(300):
        while not (members := await trainers.members()):
            await stage.wakeups.wait(Topic.RUN, timeout_s=0.05)
    assert (members[0].trainer_id, members[0].incarnation) == (TRAINER_ID, 1)
    await owner(stage).run(stopped(), nothing, where=where, groups=None)
    assert (await stage.ledger.status()).incarnation == 2
    stop.set()
    with pytest.raises(Fenced):
        await first
    with pytest.raises(ConfigError, match=rf"holds a recording of run '{stage.keys.run}'"):
        await owner(stage, rollout={"group_size": 3}, run={"name": f"{stage.keys.run}-b"}).run(stopped(), nothing, where=where, groups=None)
    assert not await stage.redis.exists(Keys(f"{stage.keys.run}-b").state)


async def test_a_model_without_weights_is_refused_before_the_run_is_made(stage: Any, tmp_path: Path) -> None:
    changes = sections(stage)
    (stage.folder / "model" / "a.weight.safetensors").unlink()
    (stage.folder / "model" / "b.weight.safetensors").unlink()
    config = validate(RolloutOnlyConfig, stage.values(**changes), source="test")
    alone = Owner(config, identity=prepare(config).identity, client=stage.redis, keys=stage.keys, waker=stage.wakeups)
    with pytest.raises(ConfigError, match=r"model.path .*no \*.safetensors"):
        await alone.run(stopped(), nothing, where=str(tmp_path / "out"), groups=None)
    assert not await stage.redis.exists(stage.keys.state)


# -- the recorder --------------------------------------------------------------------------------------------------------------------------------


async def put(stage: Any, count: int, *, blobs: dict[int, dict[str, BlobRef]] | None = None) -> list[tuple[int, bytes]]:
    """READY groups; (seq, payload) of each. `blobs`: their extras, by seq."""
    granted = await stage.ledger.reserve("p", f"put-{count}", count, max_bytes=2000, served=FIRST)
    assert isinstance(granted, Granted)
    made = []
    for slot in granted.slots:
        mask = np.array([0, 1, 1], dtype=np.uint8)
        tokens = np.full(3, slot.seq, dtype=np.int32)
        spans = (Span(version=FIRST, start=1, end=3),)
        payload = encode_group(RolloutGroup(rollouts=(Rollout(tokens=tokens, mask=mask, logprobs=-mask.astype(np.float32), spans=spans, reward=1.0),)))
        header = GroupHeader(
            seq=slot.seq,
            attempt=slot.attempt,
            token=slot.token,
            prompt_id="p",
            producer_id="p",
            group_size=1,
            lengths=(3,),
            trainable={FIRST: 2},
            oldest=FIRST,
            rewards=(1.0,),
            payload_bytes=len(payload),
            payload_digest=digest(payload),
            blobs=(blobs or {}).get(slot.seq, {}),
        )
        await stage.ledger.put(header, payload)
        made.append((slot.seq, payload))
    return made


def recorder(stage: Any, where: Path, *, already: int = 0, groups: int | None = None) -> Recorder:
    return Recorder(stage.ledger, stage.wakeups, recording(where), Storage(), incarnation=1, already=already, groups=groups, deadline_s=60.0)


async def attached(stage: Any) -> None:
    config = stage.config()
    await stage.ledger.create(prepare(config).identity, BufferConfig(groups_per_step=8))
    await stage.ledger.attach(None, trainer_id=TRAINER_ID)


class _KilledError(Exception):
    pass


async def test_a_kill_between_the_recording_and_the_ledger_records_twice_what_is_read_once(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await attached(stage)
    made = await put(stage, 3)

    async def dies(*_: object) -> int:
        raise _KilledError

    with monkeypatch.context() as patch:
        patch.setattr(type(stage.ledger), "set_aside", dies)
        with pytest.raises(_KilledError):
            await recorder(stage, tmp_path / "out").run(stopped())
    assert (await stage.ledger.status()).ready == 3
    second = recorder(stage, tmp_path / "out")
    await second.run(stopped())
    assert second.recorded == 3
    assert (await stage.ledger.status()).ready == 0
    objects = [path for path in (tmp_path / "out" / "groups").rglob("*") if path.is_file()]
    assert len(objects) == 2, "they were written twice"
    assert [(group.header.seq, group.payload) for group in recording(tmp_path / "out").groups()] == made


async def test_a_disk_that_is_full_keeps_groups_ready_and_is_tried_again(stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await attached(stage)
    made = await put(stage, 2)
    write, tries = Recording.write_groups, []

    def full_once(self: Recording, groups: Any) -> None:
        tries.append(len(groups))
        if len(tries) == 1:
            raise OSError(28, "No space left on device", "groups")
        write(self, groups)

    monkeypatch.setattr(Recording, "write_groups", full_once)
    monkeypatch.setattr("producer.rollout_only._RETRY_S", 0.01)
    async with asyncio.timeout(300):
        await recorder(stage, tmp_path / "out", groups=2).run(asyncio.Event())
    assert tries == [2, 2]
    assert [group.header.seq for group in recording(tmp_path / "out").groups()] == [seq for seq, _ in made]
    assert (await stage.ledger.status()).state is RunState.DRAINING


@pytest.mark.parametrize("blobs", [False, True])
async def test_a_lost_payload_is_left_out_and_made_again(stage: Any, tmp_path: Path, blobs: bool) -> None:
    """Of three groups the second is lost: its payload, or an extra of it in the blob store."""
    await attached(stage)
    extra = {"experts": BlobRef(name="gone/experts", bytes=4, digest="d", dtype="<i4", shape=(1,))} if blobs else {}
    made = await put(stage, 3, blobs={1: extra})
    if not blobs:
        (lost,) = [header for header in await stage.ledger.ready(3) if header.seq == 1]
        await stage.redis.delete(stage.keys.payload(lost.seq, lost.attempt, lost.token))
    found = Recorder(
        *(stage.ledger, stage.wakeups, recording(tmp_path / "out"), Storage(blobs=BlobStore(object_store(str(tmp_path), key="b"), stage.keys.run))),
        incarnation=1,
        already=0,
        groups=None,
        deadline_s=60.0,
    )
    await found.run(stopped())
    assert [group.header.seq for group in recording(tmp_path / "out").groups()] == [made[0][0], made[2][0]]
    status = await stage.ledger.status()
    assert (found.recorded, status.ready, status.released, status.dead, status.releases) == (2, 0, 1, {Reason.RECORDED: 2}, {Reason.PAYLOAD_LOST: 1})


async def test_it_takes_no_more_than_is_asked_for_over_all_its_lives(stage: Any, tmp_path: Path) -> None:
    await attached(stage)
    await put(stage, 4)
    await recorder(stage, tmp_path / "out", already=8, groups=10).run(asyncio.Event())
    assert len(list(recording(tmp_path / "out").groups())) == 2
    assert (await stage.ledger.status()).ready == 2
