"""The trainer as two real processes on real Redis: one of them killed, and resumed on another number of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from buffer.report import totals
from buffer.witness import read_witness
from consumer.checkpoint import checkpoints_on_disk, read_checkpoint
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import EXIT_TRY_AGAIN
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import Edge, TrainerStatus
from protocol.presence import Presence
from weightsync.channel import Channel
from weightsync.snapshot import TensorBytes

pytestmark = [pytest.mark.redis, pytest.mark.faults]
Tables = Callable[..., dict[str, dict[str, Any]]]
Process = asyncio.subprocess.Process
Start = Callable[..., Awaitable[Process]]


async def trained(config: TrainerDaemonConfig, client: Client, *, new: bool) -> None:
    """In this process, on one rank."""
    keys = Keys(config.run.name)
    identity = identify(config.run, config.model, config.data, config.rollout)
    await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity if new else None)


@pytest.mark.timeout(1200)
async def test_ranks_train_as_one_rank_does_and_a_killed_one_costs_nothing(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Start, meeting: dict[str, str]
):
    """Two ranks, one killed in step 3; then one rank; then two again; against one rank all the way."""
    tables = make_config(checkpoint__every_steps=2, stop__steps=6)
    file, folder = as_file(tables), Path(tables["run"]["dir"])
    ledger, presence = RedisLedger(redis, keys), Presence(redis, keys, "trainer", TrainerStatus)
    producing(keys, limit=4 * 2 + 2)  # two steps, and the first chunk of the third
    async with asyncio.timeout(1000):
        # As torchrun starts them. Rank 1 dies in the middle of step 3, while rank 0 waits for groups.
        first = await start(file, "--new", RANK="0", LOCAL_RANK="0", **meeting)
        other = await start(file, "--new", RANK="1", LOCAL_RANK="1", **meeting)
        while not ((here := await presence.members()) and here[0].trained == 2 and here[0].waiting_for is Edge.NO_GROUP):
            assert (first.returncode, other.returncode) == (None, None), (await first.communicate())[1].decode() + (await other.communicate())[1].decode()
            await asyncio.sleep(0.1)
        while [one.step for one in (await ledger.status()).checkpoints] != [2]:
            await asyncio.sleep(0.05)
        other.send_signal(signal.SIGKILL)
        told, _ = [text.decode() for _, text in await asyncio.gather(first.communicate(), other.communicate())]
        assert first.returncode == EXIT_TRY_AGAIN, told
        assert told.splitlines()[-1] == "rl-trainer: rank 1 is gone: the connection was closed"
        status = await ledger.status()
        assert (status.trained, status.leased) == (2, 2)
        producing(keys, engine=False)

        await trained(validate(TrainerDaemonConfig, tables | {"stop": {"steps": 4}}, source="test"), redis, new=False)

        # Started by rank 0.
        second = await start(file, "--resume", "trainer.ranks=2")
        told = (await second.communicate())[1].decode()
        assert second.returncode == 0, told

    witness, status = read_witness(folder / "witness.jsonl"), await ledger.status()
    assert [(line.incarnation, line.step) for line in witness] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    report = totals(await read_audit(folder / "audit.jsonl", redis, keys), witness, status)
    assert (report.groups_trained, report.groups_lost, report.groups_duplicated, report.disagreements) == (24, 0, 0, ())
    newest = await Channel(redis, keys).newest()
    assert newest is not None
    assert (str(newest.version), newest.digest) == ("3:6", witness[-1].digest), "what was published is whole"

    unbroken = validate(TrainerDaemonConfig, make_config(f"{keys.run}-u", checkpoint__every_steps=2, stop__steps=6), source="test")
    producing(Keys(unbroken.run.name))
    await trained(unbroken, redis, new=True)
    expected = read_witness(unbroken.run.folder / "witness.jsonl")
    assert [(one.step, one.seqs, one.tokens, one.masked) for one in witness] == [(one.step, one.seqs, one.tokens, one.masked) for one in expected]
    metrics, expected_metrics = (lines_of(path / "metrics.jsonl") for path in (folder, unbroken.run.folder))
    for found, line in zip(metrics, expected_metrics, strict=True):
        assert found.keys() == line.keys()
        for name in ("loss", "grad_norm", "entropy", "ratio_dev", "clip_fraction", "lr"):
            assert found[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name
        for name in ("reward", "reward_std", "groups", "rollouts", "tokens", "masked", "staleness", "group_staleness", "bias", "response_tokens_mean"):
            assert found[name] == line[name], name
    for found, line in zip(*(tensors_of(one, "step-000006") for one in (folder, unbroken.run.folder)), strict=True):
        assert found.keys() == line.keys()
        for tensor, values in line.items():
            np.testing.assert_allclose(numbers(found[tensor]), numbers(values), rtol=1e-4, atol=2e-6, err_msg=tensor)


def tensors_of(folder: Path, name: str) -> tuple[Mapping[str, TensorBytes], Mapping[str, TensorBytes]]:
    """Weights and optimizer of a run's newest checkpoint, whoever wrote it."""
    (path,) = (folder / "checkpoint").glob(f"{name}-*")
    (reference,) = (one for one in checkpoints_on_disk(folder / "checkpoint") if one.path == str(path))
    state = read_checkpoint(reference, folder=folder).state
    return state.weights, state.optimizer


def numbers(tensor: TensorBytes) -> Any:
    return np.frombuffer(tensor.data, np.float32)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, the last line of each step."""
    return list({line["step"]: line for line in map(orjson.loads, path.read_bytes().splitlines())}.values())


@pytest.mark.timeout(1200)
async def test_a_rank_that_raises_ends_all_with_its_message_and_those_that_rank_0_started_die_with_it(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Start, meeting: dict[str, str]
):
    tables = make_config(trainer__backend="tests.consumer.ranks.reducing_backend:ReducingBackend", checkpoint__every_steps=2, stop__steps=6)
    file, ledger = as_file(tables), RedisLedger(redis, keys)
    producing(keys)
    async with asyncio.timeout(1000):
        # Rank 0 waits for it in a collective.
        first = await start(file, "--new", RANK="0", LOCAL_RANK="0", **meeting)
        other = await start(file, "--new", RANK="1", LOCAL_RANK="1", TEST_RANK_RAISES="1", **meeting)
        told, said = [text.decode() for _, text in await asyncio.gather(first.communicate(), other.communicate())]
        assert (first.returncode, other.returncode) == (1, 1), told + said
        assert told.splitlines()[-1] == "rl-trainer: rank 1: ValueError: no such luck here"
        assert "no such luck here" in said
        assert (await ledger.status()).trained == 2

        second = await start(file, "--resume", "trainer.ranks=2", ROLLSTREAM_FAILPOINT="trainer.accumulated:3")
        told = (await second.communicate())[1].decode()  # to the end of what both write
        assert second.returncode == -signal.SIGKILL, told
    status = await ledger.status()
    assert status.incarnation == 2
    assert status.trained in (1, 3), "in the step after that of the checkpoint, or of none if rank 1 was faster"


@pytest.mark.timeout(1200)
async def test_torchrun_starts_ranks_and_starts_them_again_when_one_is_killed(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Start
):
    tables = make_config(trainer__backend="tests.consumer.ranks.reducing_backend:ReducingBackend", checkpoint__every_steps=2, stop__steps=6)
    ledger, presence = RedisLedger(redis, keys), Presence(redis, keys, "trainer", TrainerStatus)
    config = validate(TrainerDaemonConfig, tables, source="test")
    assert await ledger.create(identify(config.run, config.model, config.data, config.rollout), config.buffer)
    producing(keys, limit=4 * 2 + 2)  # two steps, and the first chunk of the third
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    async with asyncio.timeout(1000):
        running = await start(as_file(tables), "--resume", launcher=launcher)
        while not ((here := await presence.members()) and here[0].trained == 2 and here[0].waiting_for is Edge.NO_GROUP):
            assert running.returncode is None, (await running.communicate())[1].decode()
            await asyncio.sleep(0.1)
        os.kill(here[0].pid, signal.SIGKILL)
        producing(keys, engine=False)
        told = (await running.communicate())[1].decode()
        assert running.returncode == 0, told
    status, witness = await ledger.status(), read_witness(Path(tables["run"]["dir"]) / "witness.jsonl")
    assert (status.trained, status.incarnation) == (6, 2)
    assert [line.step for line in witness if line.incarnation == 2][-1] == 6
