"""kill -9 of the real daemon in the middle of a step, and what comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from buffer.report import totals
from buffer.witness import read_witness
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import Edge, TrainerStatus
from protocol.presence import Presence

pytestmark = [pytest.mark.redis, pytest.mark.faults, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


async def start(file: Path, how: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "consumer.main", "-c", str(file), how, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=asyncio.subprocess.PIPE
    )


async def test_a_killed_trainer_resumes_with_the_same_batches_to_the_same_bits(
    redis: Client, keys: Keys, make_config: Callable[..., dict[str, Any]], as_file: Callable[..., Path], producing: Callable[..., Any]
):
    tables = make_config()
    file, folder = as_file(tables), Path(tables["run"]["dir"])
    ledger, presence = RedisLedger(redis, keys), Presence(redis, keys, "trainer", TrainerStatus)
    producing(keys, limit=4 * 6 + 2)  # six steps, and the first chunk of the seventh
    async with asyncio.timeout(700):
        first = await start(file, "--new")
        while not ((here := await presence.members()) and here[0].trained == 6 and here[0].waiting_for is Edge.NO_GROUP):
            assert first.returncode is None, (await first.communicate())[1].decode()
            await asyncio.sleep(0.1)
        while [one.step for one in (await ledger.status()).checkpoints] != [4]:
            await asyncio.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        await first.communicate()
        half_written = folder / "checkpoint" / ".tmp-step-000006-1"
        half_written.mkdir()
        unregistered = folder / "checkpoint" / "step-000006-1"
        unregistered.mkdir()

        producing(keys, engine=False)
        second = await start(file, "--resume")
        told = (await second.communicate())[1].decode()
        assert second.returncode == 0, told

    witness = read_witness(folder / "witness.jsonl")
    assert [(line.incarnation, line.step) for line in witness] == [(1, s) for s in range(1, 7)] + [(2, s) for s in range(5, 11)]
    by_step = {(line.incarnation, line.step): (line.seqs, line.tokens, line.digest) for line in witness}
    assert by_step[2, 5] == by_step[1, 5], "the same batch to the same bits"
    assert by_step[2, 6] == by_step[1, 6]
    assert not half_written.exists()
    assert not unregistered.exists()
    status = await ledger.status()
    report = totals(await read_audit(folder / "audit.jsonl", redis, keys), witness, status)
    assert (report.groups_trained, report.groups_lost, report.groups_duplicated, report.disagreements) == (40, 0, 0, ())
    assert status.trained == 10

    unbroken = Keys(f"{keys.run}-u")
    config = validate(TrainerDaemonConfig, make_config(unbroken.run), source="test")
    producing(unbroken)
    identity = identify(config.run, config.model, config.data, config.rollout)
    await run_trainer(config, RedisLedger(redis, unbroken), redis, unbroken, asyncio.Event(), new_as=identity)
    expected = read_witness(config.run.folder / "witness.jsonl")
    survived = [line for line in witness if line.incarnation == 2 or line.step <= 4]
    assert [(line.step, line.seqs, line.digest) for line in survived] == [(line.step, line.seqs, line.digest) for line in expected]
