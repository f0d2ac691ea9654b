"""`rollstream runs fork` on real training: both runs go on to their ends, nothing is lost or trained twice in either, and the first is left as it was."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import pytest_asyncio

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from buffer.report import RunTotals, totals
from buffer.witness import WitnessLine, read_witness
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from deploy.cli import main
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import TrainerStatus
from protocol.presence import Presence
from tests.consumer.conftest import Producer, Sampler, save_model, serve_newest

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def sampler(model_path: Path) -> Sampler:
    return Sampler(model_path)


@pytest.fixture(autouse=True)
def denormals() -> Any:
    """A backend flushes denormal numbers in the thread that makes it; other tests want theirs."""
    import torch

    yield
    torch.set_flush_denormal(False)


class Runs:
    """Runs of one Redis, each with a producer and an engine while the test lasts. 4 groups a step, a checkpoint every second step."""

    def __init__(self, client: Client, url: str, folder: Path, *, model: Path, sampler: Sampler, group: asyncio.TaskGroup) -> None:
        self.client, self.url, self._folder, self._model, self._sampler, self._group = client, url, folder, model, sampler, group
        self._tasks: list[asyncio.Task[None]] = []
        (folder / "prompts.jsonl").write_text('{"prompt": "1+2=", "label": "3"}\n')

    def config(self, run: str, steps: int) -> TrainerDaemonConfig:
        tables = {
            "run": {"name": run, "dir": str(self._folder / run), "seed": 1},
            "redis": {"url": self.url, "deadline_s": 60.0},
            "model": {"path": str(self._model)},
            "data": {"path": str(self._folder / "prompts.jsonl")},
            "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_new_tokens": 8},
            "buffer": {"groups_per_step": 4, "chunk_groups": 2, "pipeline_depth": 1.0, "max_staleness": 1000},
            "weights": {"store": str(self._folder / "weights")},
            "trainer": {"lr": 1e-3, "warmup_steps": 2},
            "checkpoint": {"every_seconds": 0.0, "every_steps": 2},
            "stop": {"steps": steps},
        }
        return validate(TrainerDaemonConfig, tables, source="test")

    def produce(self, run: str) -> None:
        keys = Keys(run)
        self._start(Producer(self.client, keys, self._sampler).run(), f"test:producer {run}")
        self._start(serve_newest(self.client, keys), f"test:engine {run}")

    async def train(self, run: str, steps: int, *, new: bool = False, stop: asyncio.Event | None = None) -> None:
        config = self.config(run, steps)
        identity = identify(config.run, config.model, config.data, config.rollout)
        keys = Keys(run)
        await run_trainer(config, RedisLedger(self.client, keys), self.client, keys, stop or asyncio.Event(), new_as=identity if new else None)

    async def fork(self, source: str, target: str, *options: str) -> None:
        words = ["runs", "fork", source, target, "--redis", self.url, "--from-dir", str(self._folder / source), *options]
        assert await asyncio.to_thread(main, words) == 0

    async def totals(self, run: str) -> RunTotals:
        folder = self._folder / run
        events = await read_audit(folder / "audit.jsonl", self.client, Keys(run))
        return totals(events, read_witness(folder / "witness.jsonl"), await RedisLedger(self.client, Keys(run)).status())

    def witness(self, run: str) -> list[WitnessLine]:
        return read_witness(self._folder / run / "witness.jsonl")

    async def contents(self, run: str) -> dict[str, object]:
        """Every key and file of the run, but for the clock that each look moves."""
        found: dict[str, object] = {str(path): (path.read_bytes(), path.stat().st_ino) for path in sorted((self._folder / run).rglob("*")) if path.is_file()}
        for pattern in (Keys(run).key("*"), Keys(run).payload(0, 0, "").replace("0:0:", "*")):
            async for key in self.client.scan_iter(match=pattern):
                found[key.decode()] = await self.client.dump(key)
        state = await self.client.hgetall(Keys(run).state)
        found[Keys(run).state] = {name: value for name, value in state.items() if name not in (b"clock", b"seen")}
        return found

    def _start(self, work: Any, name: str) -> None:
        self._tasks.append(self._group.create_task(work, name=name))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []


@pytest_asyncio.fixture
async def runs(redis: Client, redis_url: str, tmp_path: Path, model_path: Path, sampler: Sampler) -> AsyncIterator[Runs]:
    async with asyncio.TaskGroup() as group:
        found = Runs(redis, redis_url, tmp_path, model=model_path, sampler=sampler, group=group)
        yield found
        found.end()


def assert_whole(found: RunTotals, *, steps: int) -> None:
    assert (found.steps_trained, found.groups_lost, found.groups_duplicated, found.disagreements) == (steps, 0, 0, ())
    assert found.groups_trained == 4 * steps


async def test_a_fork_goes_on_from_an_earlier_checkpoint_and_leaves_the_other_run_byte_for_byte(
    runs: Runs, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first, second = keys.run, f"{keys.run}-b"
    runs.produce(first)
    await runs.train(first, 7, new=True)
    runs.end()
    before = await runs.contents(first)
    await runs.fork(first, second, "--step", "6")
    assert await runs.contents(first) == before
    said = capsys.readouterr().out
    assert f"{second}: goes on from step 6 of {first}" in said
    assert f"--resume --set redis.url={runs.url} --set run.name={second} --set run.dir={tmp_path / second}" in said

    status = await RedisLedger(runs.client, Keys(second)).status()
    assert (status.trained, status.incarnation, status.state.value, [one.step for one in status.checkpoints]) == (6, 2, "open", [6])
    assert status.checkpoints[0].path == str(tmp_path / second / "checkpoint" / "step-000006-1")
    runs.produce(first)
    runs.produce(second)
    await runs.train(second, 10)
    await runs.train(first, 9)
    assert_whole(await runs.totals(first), steps=9)
    assert_whole(await runs.totals(second), steps=10)
    mine = {line.step: line for line in runs.witness(first) if line.incarnation == 1}
    fork = {line.step: line for line in runs.witness(second) if line.incarnation == 3}
    assert (fork[7].seqs, fork[7].digest, fork[7].fork_step) == (mine[7].seqs, mine[7].digest, 6), "what it trains again is the same, to the bit"
    assert sorted(fork) == [7, 8, 9, 10]
    metrics = (tmp_path / second / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 10


async def test_a_live_run_is_forked_while_it_trains_and_both_end_whole(runs: Runs, keys: Keys):
    first, second = keys.run, f"{keys.run}-b"
    runs.produce(first)
    presence = Presence(runs.client, Keys(first), "trainer", TrainerStatus)
    stop = asyncio.Event()
    async with asyncio.timeout(500), asyncio.TaskGroup() as group:
        group.create_task(runs.train(first, 100_000, new=True, stop=stop), name="test:trainer")
        while not ((members := await presence.members()) and members[0].trained >= 6):
            await asyncio.sleep(0.02)
        await runs.fork(first, second)
        runs.produce(second)
        at = (await RedisLedger(runs.client, Keys(second)).status()).trained
        await runs.train(second, at + 6)
        stop.set()
    assert at >= 4
    assert_whole(await runs.totals(first), steps=runs.witness(first)[-1].step)
    assert_whole(await runs.totals(second), steps=at + 6)


@pytest.mark.parametrize("after", ["taken", "folder", "checkpoint", "record"])
async def test_what_cannot_be_forked_is_refused_and_leaves_nothing(runs: Runs, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str], after: str):
    first, second = keys.run, f"{keys.run}-b"
    runs.produce(first)
    await runs.train(first, 3, new=True)
    runs.end()
    words, code, told = [second, "--from-dir", str(tmp_path / first)], 2, ""
    match after:
        case "taken":
            words, told = [first, "--dir", str(tmp_path / second)], "exists already"
        case "folder":
            (tmp_path / second).mkdir()
            (tmp_path / second / "notes.txt").write_text("mine")
            told = "is there already"
        case "checkpoint":
            words, told = [*words, "--step", "1"], "--step 1: run"
        case _:
            (tmp_path / first / "audit.jsonl").unlink()
            told = "does not tell run"
    files = sorted(tmp_path.iterdir())
    assert await asyncio.to_thread(main, ["runs", "fork", first, *words, "--redis", runs.url]) == code
    assert told in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == files
    assert [key async for key in runs.client.scan_iter(match=f"*{second}*")] == []
