"""`rollstream replay`, `export` and `import` as commands, on a run that a real trainer with a torch-free backend has trained."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.contract import Blocked
from buffer.exchange import Export
from buffer.recording import Recording
from buffer.redis_ledger import RedisLedger
from buffer.replay import JournalReader, ReplayRange
from buffer.storage import Storage
from buffer.witness import read_witness
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.main import main as rl_trainer
from deploy.cli import main
from deploy.replay import _export_groups
from protocol.codec import digest, encode_group
from protocol.config import validate
from protocol.connection import Client, connect
from protocol.errors import EXIT_CONFIG, EXIT_FAULT, EXIT_TRY_AGAIN, RunEnded, RunMissing, Unavailable
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Span
from protocol.objects import object_store
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, wakeups
from weightsync.safetensors_file import write_tensors
from weightsync.snapshot import TensorBytes

pytestmark = pytest.mark.redis
STEPS = 4


@dataclass(frozen=True)
class Trained:
    """A run of four steps of two groups, with a checkpoint of the first."""

    folder: Path
    file: Path
    url: str
    keys: Keys
    digests: dict[int, str]

    def file_of(self, run: str) -> Path:
        """Another run's file, on the same data and model."""
        return write_file(self.folder, self.url, run)


def tables(folder: Path, url: str, run: str) -> dict[str, dict[str, Any]]:
    return {
        "run": {"name": run, "dir": str(folder / run), "seed": 3},
        "redis": {"url": url, "deadline_s": 60.0},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl")},
        "rollout": {"group_size": 2, "max_prompt_tokens": 8, "max_new_tokens": 8},
        "buffer": {"groups_per_step": 2, "chunk_groups": 1, "pipeline_depth": 1.0, "retention": 20},
        "weights": {"store": str(folder / "weights")},
        "trainer": {"backend": "tests.faults.chain_backend:ChainBackend"},
        "checkpoint": {"every_seconds": 0.0, "every_steps": 1, "keep": 10},
        "stop": {"steps": STEPS},
    }


def write_file(folder: Path, url: str, run: str) -> Path:
    path = folder / f"{run}.toml"
    sections = tables(folder, url, run).items()
    path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in sections))
    return path


def prepare(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "none"}')
    (folder / "model" / "tokenizer.json").write_text("{}")
    write_tensors(folder / "model" / "model.safetensors", {"chain": TensorBytes(dtype="U8", shape=(16,), data=bytes(16))}, durable=False)
    (folder / "rows.jsonl").write_text('{"prompt": "a", "label": "b"}\n')


def group_of(seq: int, version: Version) -> RolloutGroup:
    rollouts = tuple(
        Rollout(
            tokens=np.arange(4, dtype=np.int32) + seq,
            mask=np.array([0, 1, 1, 1], dtype=np.uint8),
            logprobs=np.array([0, -1, -1, -1], dtype=np.float32),
            spans=(Span(version=version, start=1, end=4),),
            reward=float(i),
        )
        for i in range(2)
    )
    return RolloutGroup(rollouts=rollouts)


async def produce(client: Client, keys: Keys) -> None:
    """Put groups of the newest version while there are slots, until the run ends."""
    ledger = RedisLedger(client, keys)
    async with wakeups(client, keys) as waker:
        asked = 0
        while True:
            mark = waker.mark(*Topic)
            try:
                status = await ledger.status()
                version = Version(status.incarnation, status.trained)
                answer = await ledger.reserve("p", f"r{asked}", 1, max_bytes=4000, served=version)
            except RunMissing:
                await waker.wait(*Topic, since=mark)
                continue
            except RunEnded:
                return
            if isinstance(answer, Blocked):
                await waker.wait(*Topic, since=mark, timeout_s=RECHECK_S)
                continue
            asked += 1
            (slot,) = answer.slots
            payload = encode_group(group_of(slot.seq, version))
            header = GroupHeader(
                seq=slot.seq,
                attempt=slot.attempt,
                token=slot.token,
                prompt_id="0",
                producer_id="p",
                group_size=2,
                lengths=(4, 4),
                trainable={version: 6},
                oldest=version,
                rewards=(0.0, 1.0),
                payload_bytes=len(payload),
                payload_digest=digest(payload),
            )
            await ledger.put(header, payload)


async def make_run(folder: Path, url: str, keys: Keys) -> None:
    config = validate(TrainerDaemonConfig, tables(folder, url, keys.run), source="test")
    client = connect(url, deadline_s=60.0)
    try:
        async with asyncio.timeout(300), asyncio.TaskGroup() as group:
            group.create_task(produce(client, keys))
            identity = identify(config.run, config.model, config.data, config.rollout)
            await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity)
    finally:
        await client.aclose()


def asked(url: str, keys: Keys, question: Callable[[RedisLedger], Any]) -> Any:
    """What `question` answers about a run."""

    async def ask() -> Any:
        client = connect(url, deadline_s=60.0)
        try:
            return await question(RedisLedger(client, keys))
        finally:
            await client.aclose()

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def trained(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder, keys = tmp_path_factory.mktemp("replayed"), Keys("t-replay-cli")
    prepare(folder)
    asyncio.run(make_run(folder, redis_url, keys))
    digests = {line.step: line.digest for line in read_witness(folder / keys.run / "witness.jsonl")}
    yield Trained(folder=folder, file=write_file(folder, redis_url, keys.run), url=redis_url, keys=keys, digests=digests)
    asked(redis_url, keys, lambda ledger: ledger.delete_run())


@pytest.fixture
def other(trained: Trained) -> Iterator[tuple[Path, Keys]]:
    """Another run in the same Redis, at its starting weights; it has no groups."""
    keys = Keys("t-replay-other")
    config = validate(TrainerDaemonConfig, tables(trained.folder, trained.url, keys.run), source="test")

    async def begin(ledger: RedisLedger) -> None:
        await ledger.create(identify(config.run, config.model, config.data, config.rollout), config.buffer)
        await ledger.attach(None, trainer_id="t")

    asked(trained.url, keys, begin)
    yield trained.file_of(keys.run), keys
    asked(trained.url, keys, lambda ledger: ledger.delete_run())


def test_steps_are_trained_again_and_compared_with_the_run(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-c", str(trained.file), "--steps", "2:3", "--train"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("step ")] == [
        f"step {step}: {trained.digests[step]}: the run's weights, bit by bit" for step in (2, 3)
    ]
    assert f"2 of 2 steps gave the run's weights; the recorded steps are over; see {trained.folder / trained.keys.run / 'replay-2-3'}" in told
    assert main(["replay", "-c", str(trained.file), "--steps", "2:3", "--train"]) == EXIT_CONFIG
    assert "holds an earlier replay" in capsys.readouterr().err


def test_a_dump_holds_the_steps_byte_for_byte_and_drives_a_trainer(trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["replay", "-c", str(trained.file), "--versions", "0:2", "--out", str(tmp_path / "dump")]) == 0
    assert f"3 of 3 steps, 1 to 3, are in {tmp_path / 'dump'}" in capsys.readouterr().out
    dump = Recording(object_store(str(tmp_path / "dump"), key="--out"))
    assert dump.steps() == [1, 2, 3]
    journal = asked(trained.url, trained.keys, lambda ledger: JournalReader(ledger, Storage()).read(2))
    assert (dump.read_step(2).chunks, dump.read_step(2).payloads) == (journal.chunks, journal.payloads)
    file = write_file(trained.folder, "", "t-recorded")
    assert rl_trainer(["-c", str(file), "--recorded", str(tmp_path / "dump")]) == 0
    lines = [json.loads(line) for line in (trained.folder / "t-recorded" / "recorded" / "metrics.jsonl").read_text().splitlines()]
    assert [line["digest"] for line in lines] == [trained.digests[step] for step in (1, 2, 3)]


def test_a_dump_into_a_file_is_refused_and_leaves_it(trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "groups.parquet").write_text("mine")
    assert main(["replay", "-c", str(trained.file), "--steps", "1", "--out", str(tmp_path / "groups.parquet")]) == EXIT_CONFIG
    assert "give a folder or a URL" in capsys.readouterr().err
    assert (tmp_path / "groups.parquet").read_text() == "mine"


@pytest.mark.parametrize("start", [0, 1])
def test_a_shadow_is_a_command_too(trained: Trained, start: int) -> None:
    """Step 0 is the starting weights."""
    assert rl_trainer(["-c", str(trained.file), "--shadow", f"from-{start}", "--from-step", str(start)]) == 0
    lines = [json.loads(line) for line in (trained.folder / trained.keys.run / f"shadow-from-{start}" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["digest"]) for line in lines] == [(step, trained.digests[step]) for step in range(start + 1, STEPS + 1)]


def test_times_choose_steps(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = asked(trained.url, trained.keys, lambda ledger: ledger.trained_step(3)).at
    assert main(["replay", "-c", str(trained.file), "--since", repr(at), "--until", "2999-01-01T00:00", "--out", str(tmp_path / "dump")]) == 0
    assert Recording(object_store(str(tmp_path / "dump"), key="--out")).steps()[-1] == STEPS
    assert main(["replay", "-c", str(trained.file), "--since", str(time.time() + 3600), "--out", str(tmp_path / "dump")]) == EXIT_FAULT
    assert "no step of 1 to 4 was trained in that time" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_groups_go_from_one_run_into_another(
    trained: Trained, other: tuple[Path, Keys], tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keys = other
    path = tmp_path / f"steps.{suffix}"
    assert main(["export", "-c", str(trained.file), "--steps", "1", "--out", str(path)]) == 0
    assert f"2 groups are in {path}" in capsys.readouterr().out
    assert main(["import", "-c", str(file), str(path)]) == EXIT_CONFIG
    assert "--as-version newest" in capsys.readouterr().err
    assert main(["import", "-c", str(file), str(path), "--as-version", "keep"]) == 0
    assert f"2 of 2 groups are in run '{keys.run}'" in capsys.readouterr().out

    assert main(["export", "-c", str(file), "--buffered", "--out", str(tmp_path / f"ready.{suffix}")]) == 0
    first, back = ([group.payload for group in Export(one).groups()] for one in (path, tmp_path / f"ready.{suffix}"))
    assert first == back
    assert asked(trained.url, keys, lambda ledger: ledger.status()).ready == 2, "an export takes nothing"


def test_an_export_of_a_run_that_goes_on_leaves_out_what_is_gone_and_says_how_many(
    trained: Trained, other: tuple[Path, Keys], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, keys = other
    steps, out = tmp_path / "steps.jsonl", tmp_path / "ready.jsonl"
    assert main(["export", "-c", str(trained.file), "--steps", "1", "--out", str(steps)]) == 0
    assert main(["import", "-c", str(file), str(steps), "--as-version", "keep"]) == 0
    ready = RedisLedger.ready

    async def and_one_leaves(ledger: RedisLedger, count: int) -> tuple[GroupHeader, ...]:
        headers = await ready(ledger, count)
        await ledger._client.delete(keys.payload(headers[0].seq, headers[0].attempt, headers[0].token))
        return headers

    monkeypatch.setattr(RedisLedger, "ready", and_one_leaves)
    assert main(["export", "-c", str(file), "--buffered", "--out", str(out)]) == 0
    assert f"1 groups are in {out}; 1 more were gone from the buffer before they were read" in capsys.readouterr().out
    assert len(list(Export(out).groups())) == 1


def test_an_export_that_is_stopped_writes_nothing_and_blames_no_configuration(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "groups.jsonl"

    async def stopped() -> None:
        stop = asyncio.Event()
        stop.set()
        await _export_groups(argparse.Namespace(config=str(trained.file), set=[], out=str(out), buffered=False), ReplayRange(), stop)

    with pytest.raises(Unavailable, match="is not written") as caught:
        asyncio.run(stopped())
    assert caught.value.exit_code == EXIT_TRY_AGAIN
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["replay", "--steps", "3:1", "--train"], EXIT_CONFIG, "begins after its end"),
        (["replay", "--steps", "3:9", "--train"], EXIT_FAULT, "steps 5 to 9 are not held; held are 1 to 4"),
        (["replay", "--since", "soon", "--train"], EXIT_CONFIG, "--since 'soon': expected a time"),
        (["replay", "--out", "x", "--dir", "y"], EXIT_CONFIG, "--from-step and --dir go with --train"),
        (["export", "--buffered", "--steps", "1", "--out", "a.jsonl"], EXIT_CONFIG, "--buffered: groups that are READY belong to no step"),
        (["export", "--out", "a.csv"], EXIT_CONFIG, "ends in .parquet or .jsonl"),
        (["import", "none.jsonl"], EXIT_CONFIG, "none.jsonl: no such file"),
    ],
)
def test_what_cannot_be_done_is_said(trained: Trained, words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words[0], "-c", str(trained.file), *words[1:]]) == code
    assert told in capsys.readouterr().err
