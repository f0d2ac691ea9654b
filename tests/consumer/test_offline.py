"""Training that takes nothing from a run: shadows, replays and recorded streams, on real Redis with a producer in the test and a model that fits in a page."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.contract import RunState
from buffer.exchange import ExportWriter, rows_of
from buffer.recording import RecordedGroup, RecordedStep, Recording, RecordingAbout
from buffer.redis_ledger import RedisLedger
from buffer.replay import JournalReader, ReplayRange
from buffer.storage import open_storage
from buffer.witness import read_witness
from consumer.advantages import ADVANTAGES, Advantages, Rewards, Starts, reinforce_pp, whole_step
from consumer.checkpoint import Progress
from consumer.config import StopConfig, TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.main import main
from consumer.modes import ReplayPlan, RunHandle, run_recorded, run_replay, run_shadow
from consumer.offline import OfflineParts, OfflineStep, OfflineTraining
from consumer.shelf import Shelf, own_folder
from consumer.stats import MetricsFile
from consumer.worker import Worker
from protocol.codec import encode_group
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import EXIT_CONFIG, ConfigError, IdentityMismatch, ReplayGap
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import TrainerStatus
from protocol.objects import object_store
from protocol.presence import Presence
from protocol.wakeups import Topic, wakeups

pytestmark = pytest.mark.redis
Tables = Callable[..., dict[str, dict[str, Any]]]


def configured(tables: dict[str, dict[str, Any]]) -> TrainerDaemonConfig:
    return validate(TrainerDaemonConfig, tables, source="test")


def identity_of(config: TrainerDaemonConfig) -> Any:
    return identify(config.run, config.model, config.data, config.rollout)


async def train(config: TrainerDaemonConfig, client: Client, *, new: bool = True) -> None:
    keys = Keys(config.run.name)
    await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity_of(config) if new else None)


async def handle(config: TrainerDaemonConfig, client: Client) -> RunHandle:
    keys = Keys(config.run.name)
    ledger = RedisLedger(client, keys)
    return RunHandle(client=client, keys=keys, ledger=ledger, settings=await ledger.join(identity_of(config)))


def digests(config: TrainerDaemonConfig) -> dict[int, str]:
    return {line.step: line.digest for line in read_witness(config.run.folder / "witness.jsonl")}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- shadow --------------------------------------------------------------------------------------------------------------------------------------


async def test_a_shadow_trains_the_same_groups_to_the_same_bits_takes_none_and_is_seen(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]
):
    config = configured(make_config(stop__steps=6, buffer__retention=50))
    presence = Presence(redis, keys, "shadow", TrainerStatus)
    ledger = RedisLedger(redis, keys)
    producer = producing(keys, limit=4 * 3)
    async with asyncio.timeout(300), wakeups(redis, keys) as waker, asyncio.TaskGroup() as group:
        group.create_task(train(config, redis), name="test:trainer")
        while (await _status(ledger, waker)).trained < 3:
            await waker.wait(Topic.SLOT, Topic.RUN)
        shadow = group.create_task(run_shadow(config, await handle(config, redis), asyncio.Event(), name="a", from_step=None), name="test:shadow")
        while not ((seen := await presence.members()) and seen[0].trained == 3):
            await waker.wait(Topic.SLOT, timeout_s=0.1)
        assert (seen[0].trainer_id, seen[0].incarnation, seen[0].step) == ("shadow-a", 1, 4)
        assert (await ledger.status()).readers == {"shadow-a": 4}
        assert producer.reached.is_set()
        producing(keys, engine=False)
        await shadow
    assert await presence.members() == []
    status = await ledger.status()
    assert (status.state, status.trained, status.incarnation) == (RunState.DRAINING, 6, 1)
    assert [seq for line in read_witness(config.run.folder / "witness.jsonl") for seq in line.seqs] == list(range(24))

    folder = config.run.folder / "shadow-a"
    lines = metrics(folder)
    assert {line["step"]: line["digest"] for line in lines} == digests(config)
    assert all(line["digest"] == line["recorded_digest"] for line in lines)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in metrics(config.run.folder)]
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-000004-1", "step-000006-1"]


async def test_a_critic_trains_beside_the_policy_and_resumes_from_files_to_the_bit(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]
):
    """A run; a shadow of it in two lives. In the first two steps versions advance and weights stay."""
    gae: dict[str, Any] = {"trainer__advantage": "gae", "critic__lr": 1e-3, "critic__warmup_steps": 2, "critic__whiten": True, "critic__lam": 0.95}
    config = configured(make_config(stop__steps=5, buffer__retention=50, **gae))
    producing(keys)
    await train(config, redis)
    lines, trained = metrics(config.run.folder), digests(config)
    assert [(line["critic_only"], line["version"]) for line in lines] == [(1, "1:1"), (1, "1:2"), (0, "1:3"), (0, "1:4"), (0, "1:5")]
    assert trained[1] == trained[2]
    assert len(set(trained.values())) == 4
    assert all(line["critic_grad_norm"] > 0 and line["value_loss"] > 0 for line in lines)
    for steps in (3, 5):
        shadow = configured(make_config(stop__steps=steps, buffer__retention=50, **gae))
        await run_shadow(shadow, await handle(config, redis), asyncio.Event(), name="critic", from_step=None)
    again = metrics(config.run.folder / "shadow-critic")
    assert {line["step"]: line["digest"] for line in again} == trained
    assert [line["value_loss"] for line in again] == [line["value_loss"] for line in lines]
    assert len(again) == 5, "no step was trained twice"


async def _status(ledger: RedisLedger, waker: Any) -> Any:
    from protocol.errors import RunMissing

    while True:
        try:
            return await ledger.status()
        except RunMissing:
            await waker.wait(Topic.RUN)


async def test_two_losses_on_identical_data_differ_in_weights_only(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config = configured(make_config(stop__steps=4, buffer__retention=50))
    producing(keys)
    await train(config, redis)
    other = configured(make_config(stop__steps=4, buffer__retention=50, loss__kind="trust_region"))
    await run_shadow(other, await handle(config, redis), asyncio.Event(), name="tr", from_step=None)
    mine, theirs = metrics(config.run.folder), metrics(config.run.folder / "shadow-tr")
    for name in ("step", "tokens", "reward", "masked", "staleness", "groups"):
        assert [line[name] for line in theirs] == [line[name] for line in mine]
    assert theirs[-1]["digest"] != theirs[-1]["recorded_digest"]


async def test_an_advantage_over_the_step_is_given_all_its_rollouts_at_once_in_a_run_and_in_a_shadow(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], *, monkeypatch: pytest.MonkeyPatch
):
    """Of two chunks a step. And the normaliser's constant comes from the configuration."""
    groups: list[int] = []

    @whole_step
    def watched(rewards: Rewards, starts: Starts) -> Advantages:
        groups.append(len(starts) - 1)
        return reinforce_pp(rewards, starts)

    monkeypatch.setitem(ADVANTAGES, "reinforce_pp", watched)
    config = configured(make_config(stop__steps=2, buffer__retention=50, trainer__advantage="reinforce_pp", loss__normaliser="constant"))
    producing(keys)
    await train(config, redis)
    assert groups == [4, 4]
    await run_shadow(config, await handle(config, redis), asyncio.Event(), name="same", from_step=None)
    assert groups == [4, 4, 4, 4]
    assert {line["step"]: line["digest"] for line in metrics(config.run.folder / "shadow-same")} == digests(config)


async def test_a_shadow_goes_on_from_its_own_checkpoint_or_begins_at_a_registered_one(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]
):
    config = configured(make_config(stop__steps=8, buffer__retention=50))
    producing(keys)
    await train(config, redis)
    run = await handle(config, redis)
    short = configured(make_config(stop__steps=3, buffer__retention=50))
    await run_shadow(short, run, asyncio.Event(), name="a", from_step=None)
    await run_shadow(config, run, asyncio.Event(), name="a", from_step=None)
    assert {line["step"]: line["digest"] for line in metrics(config.run.folder / "shadow-a")} == digests(config)
    assert [line["step"] for line in metrics(config.run.folder / "shadow-a")] == list(range(1, 9)), "no step was trained twice"

    await run_shadow(config, run, asyncio.Event(), name="late", from_step=4)
    lines = metrics(config.run.folder / "shadow-late")
    assert {line["step"]: line["digest"] for line in lines} == {step: one for step, one in digests(config).items() if step > 4}
    with pytest.raises(ConfigError, match=r"no checkpoint of step 3 to start from; registered are 4, 8"):
        await run_shadow(config, run, asyncio.Event(), name="none", from_step=3)
    with pytest.raises(ConfigError, match=r"--shadow 'a/b'"):
        await run_shadow(config, run, asyncio.Event(), name="a/b", from_step=None)


async def test_a_shadow_that_comes_too_late_is_told_what_is_left(redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any]):
    config = configured(make_config(stop__steps=9))
    producing(keys)
    await train(config, redis)
    with pytest.raises(ReplayGap, match=r"step 1, the next for shadow-a, has left .*--from-step \(registered are 8, 9\)"):
        await run_shadow(config, await handle(config, redis), asyncio.Event(), name="a", from_step=None)


# -- what a stream may do ------------------------------------------------------------------------------------------------------------------------


async def test_a_run_that_goes_back_takes_its_shadow_along_only_where_the_groups_differ(
    redis: Client, make_config: Tables, producing: Callable[..., Any], *, make_backend: Callable[..., Any], tmp_path: Path
):
    """The same steps again are passed over; another step 4 means going back to the checkpoint after step 2, and training 3 and the new 4, 5."""
    config = configured(make_config(stop__steps=6, buffer__retention=50))
    keys = Keys(config.run.name)
    producing(keys)
    await train(config, redis)
    reader = JournalReader(RedisLedger(redis, keys), open_storage(config.buffer, keys.run))
    steps = {step: await reader.read(step) for step in range(1, 7)}

    def again(step: int, *, of: int, incarnation: int) -> RecordedStep:
        """Step `of` under the number `step`."""
        chunks = tuple(dataclasses.replace(chunk, step=step) for chunk in steps[of].chunks)
        return dataclasses.replace(steps[of], step=step, incarnation=incarnation, chunks=chunks, digest="")

    first = [*(steps[i] for i in range(1, 6)), *(dataclasses.replace(steps[i], incarnation=2) for i in (3, 4)), again(4, of=6, incarnation=3)]
    second = [steps[3], again(4, of=6, incarnation=3), again(5, of=5, incarnation=3)]
    begun: list[int] = []

    async def source(start: int) -> AsyncGenerator[RecordedStep, None]:
        begun.append(start)
        for step in first if len(begun) == 1 else second:
            yield step

    every_two = config.checkpoint.model_copy(update={"every_steps": 2})
    trained: list[OfflineStep] = []
    async with Worker() as worker:
        backend = await worker.call(make_backend, **config.trainer.model_dump())
        shelf = Shelf(tmp_path / "shelf", config=every_two, trainer=config.trainer, model_path=config.model_folder)
        file = MetricsFile(tmp_path / "metrics.jsonl")
        parts = OfflineParts(backend=backend, worker=worker, shelf=shelf, metrics=file, blobs=None)
        training = OfflineTraining(source, Progress(), trainer=config.trainer, stop=StopConfig(), parts=parts, on_step=trained.append)
        assert await training.run(asyncio.Event()) == "the recorded steps are over"
        file.close()
    assert begun == [1, 3]
    assert [(step.step, step.incarnation) for step in trained] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (3, 1), (4, 3), (5, 3)]
    assert trained[5].digest == trained[2].digest, "from the checkpoint after step 2, to the bit"
    assert trained[6].digest != trained[3].digest
    assert shelf.kept() == [(4, 3), (5, 3)], "checkpoints of the line that was given up are gone"


async def test_a_stream_with_a_hole_is_refused_and_a_stop_ends_at_a_step_with_a_checkpoint(
    redis: Client, make_config: Tables, producing: Callable[..., Any], *, make_backend: Callable[..., Any], tmp_path: Path
):
    config = configured(make_config(stop__steps=3, buffer__retention=50))
    keys = Keys(config.run.name)
    producing(keys)
    await train(config, redis)
    reader = JournalReader(RedisLedger(redis, keys), open_storage(config.buffer, keys.run))
    steps = [await reader.read(step) for step in (1, 3)]
    stop = asyncio.Event()

    async def holed(_start: int) -> AsyncGenerator[RecordedStep, None]:
        for step in steps:
            yield step

    async def endless(start: int) -> AsyncGenerator[RecordedStep, None]:
        if start == 1:
            yield steps[0]
        await asyncio.Event().wait()
        raise AssertionError

    async with Worker() as worker:
        backend = await worker.call(make_backend, **config.trainer.model_dump())
        shelf = Shelf(tmp_path / "shelf", config=config.checkpoint, trainer=config.trainer, model_path=config.model_folder)
        file = MetricsFile(tmp_path / "metrics.jsonl")
        parts = OfflineParts(backend=backend, worker=worker, shelf=shelf, metrics=file, blobs=None)
        with pytest.raises(ReplayGap, match=r"step 3 follows step 1: what is between is missing"):
            await OfflineTraining(holed, Progress(), trainer=config.trainer, stop=StopConfig(), parts=parts).run(asyncio.Event())
        training = OfflineTraining(endless, Progress(), trainer=config.trainer, stop=StopConfig(), parts=parts, on_step=lambda _: stop.set())
        async with asyncio.timeout(100):
            assert await training.run(stop) == "signal"
        file.close()
    assert (training.progress.step, shelf.kept()) == (1, [(1, 1)])


def test_two_processes_never_train_in_one_folder(tmp_path: Path):
    with own_folder(tmp_path / "a"), pytest.raises(ConfigError, match="another process trains in"), own_folder(tmp_path / "a"):
        raise AssertionError


# -- replay --------------------------------------------------------------------------------------------------------------------------------------


async def test_a_replay_from_the_checkpoint_before_gives_the_weights_of_the_run_bit_by_bit_from_redis_and_from_the_spill(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], *, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = configured(make_config(stop__steps=8, checkpoint__keep=4, checkpoint__every_steps=2, buffer__spill=str(tmp_path / "spill")))
    producing(keys)
    await train(config, redis)
    run = await handle(config, redis)
    reader = JournalReader(run.ledger, open_storage(run.settings, keys.run))
    held = await reader.steps(ReplayRange())
    assert held == list(range(1, 9))
    before = await run.ledger.status()
    for first, last in ((3, 6), (1, 2)):
        done: list[OfflineStep] = []
        plan = ReplayPlan(folder=config.run.folder / f"replay-{first}-{last}")
        if first > 1:
            reason = await run_replay(config, run, range(first, last + 1), asyncio.Event(), plan=plan, on_step=done.append)
        else:
            reason = await run_replay(config, run, [1, 2], asyncio.Event(), plan=plan, on_step=done.append)
        assert reason == "the recorded steps are over"
        assert {step.step: step.digest for step in done} == {step: one for step, one in digests(config).items() if first <= step <= last}
        assert all(step.same for step in done)
    after = await run.ledger.status()
    assert dataclasses.replace(after, readers={}, sequence=0) == dataclasses.replace(before, readers={}, sequence=0)
    with pytest.raises(ConfigError, match="holds an earlier replay"):
        await run_replay(config, run, [1], asyncio.Event(), plan=ReplayPlan(folder=config.run.folder / "replay-1-2"), on_step=done.append)
    assert "will not be the run's" not in caplog.text
    await run_replay(config, run, [4], asyncio.Event(), plan=ReplayPlan(folder=tmp_path / "b", from_step=0), on_step=done.append)
    assert "step 4 is trained on the weights of step 0, not of step 3: the weights will not be the run's" in caplog.text
    assert not done[-1].same
    only = dataclasses.replace(run, ledger=_OneCheckpoint(redis, keys))
    with pytest.raises(ConfigError, match=r"no checkpoint of step 4 to start from; registered are 2"):
        await run_replay(config, only, [5], asyncio.Event(), plan=ReplayPlan(folder=tmp_path / "r"), on_step=done.append)


class _OneCheckpoint(RedisLedger):
    """As if only that of step 2 were registered."""

    async def status(self) -> Any:
        status = await super().status()
        return dataclasses.replace(status, checkpoints=tuple(one for one in status.checkpoints if one.step == 2))


# -- recorded streams ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline_config(make_config: Tables) -> Callable[..., TrainerDaemonConfig]:
    """A run without Redis."""
    return lambda name, **changes: configured(make_config(name, redis__url="", **changes))


@pytest.mark.parametrize("form", ["recording", "parquet", "jsonl"])
async def test_recorded_steps_drive_a_trainer_without_redis_to_the_weights_of_the_run(
    redis: Client, make_config: Tables, producing: Callable[..., Any], *, offline_config: Any, tmp_path: Path, form: str
):
    config = configured(make_config(stop__steps=4, buffer__retention=50))
    keys = Keys(config.run.name)
    producing(keys)
    await train(config, redis)
    run = await handle(config, redis)
    about = RecordingAbout(run=keys.run, identity=identity_of(config), settings=run.settings)
    reader = JournalReader(run.ledger, open_storage(run.settings, keys.run))
    steps = [await reader.read(step) for step in range(1, 5)]
    where = tmp_path / ("dump" if form == "recording" else f"dump.{form}")
    if form == "recording":
        recording = Recording(object_store(str(where), key="--out"))
        recording.describe(about)
        for step in steps:
            recording.write_step(step)
    else:
        with ExportWriter(where, about) as export:
            for step in steps:
                export.write(list(rows_of(step)))
    offline = offline_config("offline")
    await run_recorded(offline, str(where), asyncio.Event())
    assert {line["step"]: line["digest"] for line in metrics(offline.run.folder / "recorded")} == digests(config)


async def test_loose_groups_train_in_steps_of_b_and_a_second_life_goes_on(sampler: Any, header_of: Any, offline_config: Any, tmp_path: Path):
    config = offline_config("loose", stop__steps=2)
    recording = Recording(object_store(str(tmp_path / "groups"), key="--rollout-only"))
    recording.describe(RecordingAbout(run="other", identity=identity_of(config), settings=config.buffer))
    groups = []
    for seq in range(13):
        one = sampler.group(seq)
        payload = encode_group(one)
        groups.append(RecordedGroup(header=header_of(one, seq=seq, attempt=1, token="t", payload=payload), payload=payload))
    recording.write_groups(groups[:7])
    recording.write_groups(groups[5:])
    await run_recorded(config, str(tmp_path / "groups"), asyncio.Event())
    await run_recorded(offline_config("loose", stop__steps=10), str(tmp_path / "groups"), asyncio.Event())
    await run_recorded(offline_config("whole", stop__steps=10), str(tmp_path / "groups"), asyncio.Event())
    lines, whole = (metrics(tmp_path / name / "recorded") for name in ("loose", "whole"))
    assert [(line["step"], line["groups"], line["masked"]) for line in lines] == [(1, 4, 0), (2, 4, 0), (3, 4, 0)]
    assert [line["digest"] for line in lines] == [line["digest"] for line in whole], "a second life goes on to the same bits"
    assert all(set(line["staleness"]) == {str(line["step"] - 1)} for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)


async def test_what_is_no_recording_or_of_another_tokenizer_is_refused(offline_config: Any, tmp_path: Path):
    config = offline_config("loose")
    with pytest.raises(ReplayGap, match=r"is no recording: it has no about\.json"):
        await run_recorded(config, str(tmp_path / "nothing"), asyncio.Event())
    recording = Recording(object_store(str(tmp_path / "other"), key="--out"))
    identity = identity_of(config)
    recording.describe(RecordingAbout(run="r", identity=dataclasses.replace(identity, tokenizer="x"), settings=config.buffer))
    with pytest.raises(IdentityMismatch, match=r"recorded with another tokenizer than that of model.path"):
        await run_recorded(config, str(tmp_path / "other"), asyncio.Event())
    recording.describe(RecordingAbout(run="r", identity=identity, settings=config.buffer))
    with pytest.raises(ConfigError, match=r"has no whole step: fewer groups than buffer.groups_per_step"):
        await run_recorded(config, str(tmp_path / "other"), asyncio.Event())


def test_from_step_goes_with_resume_or_shadow(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as raised:
        main(["-c", "run.toml", "--recorded", "x", "--from-step", "4"])
    assert raised.value.code == EXIT_CONFIG
    assert "--from-step goes with --resume or --shadow" in capsys.readouterr().err
