"""Training on real Redis with a producer in the test: what is trained, witnessed, published and kept; how it ends."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.audit import read_audit
from buffer.contract import CheckpointRef, RunState, TrainedReply
from buffer.redis_ledger import RedisLedger
from buffer.report import totals
from buffer.storage import open_storage
from buffer.witness import read_witness
from consumer.backend import StepReport
from consumer.batch import ChunkBatch
from consumer.checkpoint import CheckpointDamaged, read_checkpoint, write_checkpoint
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.journal import read_journal
from consumer.torch_backend import TorchBackend
from protocol.codec import encode_group
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import EXIT_CONFIG, ConfigError, Fenced, RunExists
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import Edge, Manifest, TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.snapshot import Snapshot, weights_digest
from weightsync.store import DirectoryStore

pytestmark = pytest.mark.redis
Tables = Callable[..., dict[str, dict[str, Any]]]


def configured(tables: dict[str, dict[str, Any]]) -> TrainerDaemonConfig:
    config = validate(TrainerDaemonConfig, tables, source="test")
    config.check()
    return config


async def trained(config: TrainerDaemonConfig, client: Client, *, new: bool = True, stop: asyncio.Event | None = None, from_step: int | None = None) -> None:
    keys = Keys(config.run.name)
    identity = identify(config.run, config.model, config.data, config.rollout)
    await run_trainer(config, RedisLedger(client, keys), client, keys, stop or asyncio.Event(), new_as=identity if new else None, from_step=from_step)


async def test_a_run_trains_every_group_once_and_its_records_agree(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config = configured(make_config(stop__steps=9))
    producing(keys)
    await trained(config, redis)

    witness = read_witness(config.run.folder / "witness.jsonl")
    assert [line.step for line in witness] == list(range(1, 10))
    assert [seq for line in witness for seq in line.seqs] == list(range(36))
    status = await RedisLedger(redis, keys).status()
    report = totals(await read_audit(config.run.folder / "audit.jsonl", redis, keys), witness, status)
    assert report.disagreements == ()
    assert (report.groups_trained, report.groups_lost, report.groups_duplicated, report.steps_trained) == (36, 0, 0, 9)
    assert (status.state, status.trained) == (RunState.DRAINING, 9)

    newest = await Channel(redis, keys).newest()
    assert newest is not None
    assert (str(newest.version), newest.digest) == ("1:9", witness[-1].digest)
    saved = [read_checkpoint(one, folder=config.checkpoint_folder) for one in status.checkpoints]
    assert [(one.progress.step, weights_digest(one.state.weights)) for one in saved] == [(8, witness[7].digest), (9, witness[8].digest)]
    kept = sorted(path.name for path in (config.checkpoint_folder).iterdir())
    assert kept == ["step-000008-1", "step-000009-1"]
    journal = read_journal((config.checkpoint_folder / "step-000009-1" / "journal.msgpack").read_bytes())
    assert {step: [header.seq for chunk in chunks for header in chunk.headers] for step, chunks in journal.items()} == {
        line.step: list(line.seqs) for line in witness if line.step > 4
    }
    lines = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [f"1:{step}" for step in range(1, 10)]
    assert [line["checkpoint_blocked_s"] > 0 for line in lines] == [line["step"] in (4, 8) for line in lines]
    assert lines[-1]["tokens_total"] == sum(line.tokens for line in witness)
    assert all(sum(line["staleness"].values()) == line["tokens"] for line in lines)
    assert await Presence(redis, keys, "trainer", TrainerStatus).members() == []


async def test_a_step_lets_go_of_each_chunk_when_it_is_trained(
    redis: Client, make_config: Tables, producing: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    config = configured(make_config(stop__steps=2, buffer__groups_per_step=6, buffer__chunk_groups=1))
    accumulate, finish_step = TorchBackend.accumulate, TorchBackend.finish_step
    tokens: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def accumulated(self: TorchBackend, batch: ChunkBatch) -> None:
        alive.append(sum(one() is not None for one in tokens))
        accumulate(self, batch)
        tokens.extend(weakref.ref(group.tokens) for group in batch.groups)

    def finished(self: TorchBackend, step: int, divisor: float) -> StepReport:
        alive.append(sum(one() is not None for one in tokens))
        return finish_step(self, step, divisor)

    monkeypatch.setattr(TorchBackend, "accumulate", accumulated)
    monkeypatch.setattr(TorchBackend, "finish_step", finished)
    producing(Keys(config.run.name))
    await trained(config, redis)
    assert len(tokens) == 12
    assert max(alive) <= 1, "a trained chunk is held only until the next one was fetched"


async def test_a_waiting_trainer_says_for_what_and_since_when_and_stops_at_the_last_whole_step(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    config, stop = configured(make_config(run__stall_seconds=1e-6)), asyncio.Event()
    producing(keys, limit=4 * 2 + 2)
    presence = Presence(redis, keys, "trainer", TrainerStatus)
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        group.create_task(trained(config, redis, stop=stop))
        while not ((members := await presence.members()) and members[0].trained == 2 and members[0].waiting_for is Edge.NO_GROUP):
            await asyncio.sleep(0.05)
        assert members[0].waiting_since > 0
        assert (members[0].step, members[0].incarnation) == (3, 1)
        assert 0 < members[0].moved_at <= members[0].waiting_since
        assert any("training is blocked" in record.message and "no group" in record.message for record in caplog.records)
        stop.set()
    ledger = RedisLedger(redis, keys)
    status = await ledger.status()
    assert (status.state, status.trained, [one.step for one in status.checkpoints]) == (RunState.DRAINING, 2, [2])
    assert [line.step for line in read_witness(config.run.folder / "witness.jsonl")] == [1, 2]
    assert status.leased == 2, "a journalled chunk is not given back"


async def test_a_stopped_run_resumes_to_the_bits_of_an_unbroken_one(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    other = Keys(f"{keys.run}-b")
    whole, parts = configured(make_config(stop__steps=7)), configured(make_config(other.run, stop__steps=3))
    producing(keys)
    await trained(whole, redis)
    producing(other)
    await trained(parts, redis)
    await trained(configured(make_config(other.run, stop__steps=7)), redis, new=False)
    first, second = (read_witness(config.run.folder / "witness.jsonl") for config in (whole, parts))
    assert [(line.step, line.seqs, line.digest) for line in first] == [(line.step, line.seqs, line.digest) for line in second]
    assert [(line.incarnation, line.parent, line.fork_step) for line in second] == [(1, 0, 0)] * 3 + [(2, 1, 3)] * 4


async def test_a_replaced_trainer_is_fenced_and_changes_nothing(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config = configured(make_config())
    producing(keys, limit=4)
    ledger = RedisLedger(redis, keys)
    task = asyncio.create_task(trained(config, redis))
    metrics = config.run.folder / "metrics.jsonl"
    async with asyncio.timeout(300):
        while not (metrics.exists() and metrics.stat().st_size):
            await asyncio.sleep(0.05)
        await ledger.attach(None, trainer_id="another")
        with pytest.raises(BaseExceptionGroup) as raised:
            await task
    assert raised.value.split(Fenced)[1] is None, "nothing but Fenced ended it"
    status = await ledger.status()
    assert (status.incarnation, status.trained, status.state, status.checkpoints) == (2, 0, RunState.OPEN, ())
    assert [line.step for line in read_witness(config.run.folder / "witness.jsonl")] == [1]


@pytest.mark.parametrize("criterion", [("tokens", 1, 1), ("reward", 1e-9, 20), ("seconds", 1e-6, 1)])
async def test_each_stop_criterion_ends_the_run_at_a_step(redis: Client, make_config: Tables, producing: Callable[..., Any], criterion: tuple[str, float, int]):
    key, value, steps = criterion
    tables = make_config()
    keys = Keys(tables["run"]["name"])
    tables["stop"] = {key: value}
    config = configured(tables)
    producing(keys)
    await trained(config, redis)
    assert (await RedisLedger(redis, keys).status()).trained == steps
    events = await read_audit(config.run.folder / "audit.jsonl", redis, keys)
    assert [event.fields["reason"] for event in events if event.op == "drained"] == [f"stop.{key} {value:g}"]


async def test_the_trust_region_and_group_mean_train_too(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config = configured(make_config(loss__kind="trust_region", trainer__advantage="group_mean", weights__publish_every=2, stop__steps=3))
    producing(keys)
    await trained(config, redis)
    lines = [orjson.loads(line) for line in (config.run.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert len(lines) == 3
    assert all(line["grad_norm"] > 0 for line in lines)
    newest = await Channel(redis, keys).newest_version()
    assert str(newest) == "1:3", "the final version is published whatever the interval"


async def test_a_damaged_checkpoint_names_the_others_and_going_back_is_asked_for(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config, more = configured(make_config(stop__steps=5)), configured(make_config(stop__steps=7))
    producing(keys)
    await trained(config, redis)
    damaged = config.checkpoint_folder / "step-000005-1" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-5])
    with pytest.raises(CheckpointDamaged, match=r"step-000005-1 .*step 4.* `rl-trainer --resume --from-step 4`") as raised:
        await trained(more, redis, new=False)
    assert raised.value.exit_code == EXIT_CONFIG
    with pytest.raises(ConfigError, match=r"--from-step 3: .* registered are 4, 5"):
        await trained(more, redis, new=False, from_step=3)
    await trained(more, redis, new=False, from_step=4)
    lines = read_witness(config.run.folder / "witness.jsonl")
    assert [(line.incarnation, line.fork_step, line.step) for line in lines[5:]] == [(2, 4, 5), (2, 4, 6), (2, 4, 7)]
    assert lines[5].digest == lines[4].digest, "step 5 was trained again to the same bits"
    assert [one.step for one in (await RedisLedger(redis, keys).status()).checkpoints] == [4, 7]


async def test_a_checkpoint_wanted_while_an_older_one_is_written_is_written_too(
    redis: Client, make_config: Tables, producing: Callable[..., Any], sampler: Any, monkeypatch: pytest.MonkeyPatch
):
    """The budget is full after four steps, and the first checkpoint frees nothing: without the second the run stands still."""
    sizes = [len(encode_group(sampler.group(seq))) for seq in range(16)]
    charge = max(len(encode_group(sampler.group(seq))) for seq in range(32))
    tables = make_config(checkpoint__every_steps=0, buffer__byte_budget=sum(sizes) + charge - 1, stop__steps=6)
    config, keys = validate(TrainerDaemonConfig, tables, source="test"), Keys(tables["run"]["name"])
    written, go = threading.Event(), threading.Event()

    def write(*arguments: Any, **options: Any) -> CheckpointRef:
        if not written.is_set():
            written.set()
            assert go.wait(300)
        return write_checkpoint(*arguments, **options)

    real = RedisLedger.trained

    async def step_trained(self: RedisLedger, *arguments: Any) -> TrainedReply:
        reply = await real(self, *arguments)
        if written.is_set():
            go.set()  # it was under way when this step ended
        return reply

    monkeypatch.setattr("consumer.keeper.write_checkpoint", write)
    monkeypatch.setattr(RedisLedger, "trained", step_trained)
    producing(keys, charge=charge)
    async with asyncio.timeout(300):
        await trained(config, redis)
    assert (await RedisLedger(redis, keys).status()).trained == 6


async def test_versions_are_cast_and_told_as_changes_while_steps_are_known_by_the_weights_themselves(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]
):
    """Against a run that publishes every step as it is: the same weights, to the bit."""
    plain = configured(make_config(stop__steps=6))
    producing(keys)
    await trained(plain, redis)
    digests = [line.digest for line in read_witness(plain.run.folder / "witness.jsonl")]

    weights = {"weights__transport": "delta", "weights__dtype": "bfloat16", "weights__publish_every": 2, "weights__full_every": 3}
    config = configured(make_config(f"{keys.run}-cast", stop__steps=6, **weights))
    other = Keys(config.run.name)
    producing(other)
    await trained(config, redis)
    assert [line.digest for line in read_witness(config.run.folder / "witness.jsonl")] == digests
    newest = await Channel(redis, other).newest()
    assert newest is not None
    assert str(newest.version) == "1:6"
    assert {entry.dtype for entry in newest.tensors} == {"BF16"}
    assert newest.digest != digests[-1], "it describes what was published"

    lines = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["snapshot_s"] > 0 for line in lines] == [step % 2 == 0 for step in range(1, 7)], "only what is published is copied"
    assert all(line["digest_s"] > 0 for line in lines)
    assert all(line["publish_s"] > 0 for line in lines)
    assert all(Version.parse(line["published"]).n % 2 == 0 for line in lines)


async def test_a_publisher_that_fails_ends_the_trainer_before_it_waits_for_ever(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    config = configured(make_config(buffer__max_staleness=1, weights__publish_every=2))
    write = DirectoryStore.write

    def fails_later(self: DirectoryStore, snapshot: Snapshot) -> Manifest:
        if snapshot.version.n:
            raise ValueError("a bug")
        return write(self, snapshot)

    monkeypatch.setattr(DirectoryStore, "write", fails_later)
    producing(keys)
    async with asyncio.timeout(300):
        with pytest.raises(BaseExceptionGroup) as raised:
            await trained(config, redis)
    assert raised.value.subgroup(ValueError) is not None
    assert (await RedisLedger(redis, keys).status()).state is RunState.OPEN


async def test_a_run_with_a_spill_trains_past_its_budget_and_the_spill_has_what_left(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], tmp_path: Path
):
    charge = 6000
    spill = {"buffer__spill": str(tmp_path / "spill"), "buffer__byte_budget": 9 * charge, "checkpoint__every_steps": 0, "checkpoint__every_seconds": 0.0}
    config = configured(make_config(stop__steps=16, **spill))
    producing(keys, charge=charge)
    await trained(config, redis)

    recording = open_storage(config.buffer, keys.run).spill
    assert recording is not None
    witness = {line.step: line for line in read_witness(config.run.folder / "witness.jsonl")}
    assert len(witness) == 16
    steps = recording.steps()
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    for step in steps:
        found = recording.read_step(step)
        assert (found.incarnation, found.digest) == (1, witness[step].digest)
        assert [header.seq for chunk in found.chunks for header in chunk.headers] == list(witness[step].seqs)
        assert all(payload for payloads in found.payloads for payload in payloads)
    about = recording.about()
    assert (about.run, about.settings) == (keys.run, config.buffer)
    status = await RedisLedger(redis, keys).status()
    assert status.bytes_used <= config.buffer.byte_budget
    with pytest.raises(RunExists, match="steps of an earlier run"):
        await trained(config, redis)
