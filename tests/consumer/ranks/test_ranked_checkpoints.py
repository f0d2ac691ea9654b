"""Checkpoints of two real ranks on real Redis: whoever is killed at whatever edge, what comes back is bit by bit the run that nobody interrupted."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from buffer.witness import WitnessLine, read_witness
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import EXIT_TRY_AGAIN
from protocol.keys import Keys

pytestmark = [pytest.mark.redis, pytest.mark.faults, pytest.mark.timeout(1800)]
LAYOUT = "TEST_MEGATRON_LAYOUT"
"""Of `shimmed_megatron`, whose import takes seconds."""
Tables = Callable[..., dict[str, dict[str, Any]]]
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


def surviving(folder: Path) -> list[tuple[int, tuple[int, ...], str]]:
    """Step, groups and digest of the weights, of the newest incarnation that trained each step."""
    lines: dict[int, WitnessLine] = {line.step: line for line in read_witness(folder / "witness.jsonl")}
    return [(line.step, line.seqs, line.digest) for _, line in sorted(lines.items())]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


async def ended(process: asyncio.subprocess.Process, code: int) -> str:
    told = (await process.communicate())[1].decode()
    assert process.returncode == code, told
    return told


async def test_ranks_killed_while_a_checkpoint_is_written_lose_nothing_and_leave_nothing(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Start, meeting: dict[str, str]
):
    """Both parts of step 4 are written, and one rank is gone before it has said so; then both have said so, and rank 0 is gone before it has renamed."""
    changes = {"checkpoint__every_steps": 2, "stop__steps": 5}
    tables, unbroken = make_config(**changes), make_config(f"{keys.run}-u", **changes)
    file, folder, ledger = as_file(tables), Path(tables["run"]["dir"]), RedisLedger(redis, keys)
    producing(keys)
    first = await start(file, "--new", RANK="0", LOCAL_RANK="0", **meeting)
    other = await start(file, "--new", RANK="1", LOCAL_RANK="1", ROLLSTREAM_FAILPOINT="checkpoint.part_written:2", **meeting)
    _, told = await asyncio.gather(ended(other, -signal.SIGKILL), ended(first, EXIT_TRY_AGAIN))
    assert "rank 1 is gone" in told.splitlines()[-1]
    assert [one.step for one in (await ledger.status()).checkpoints] == [2]
    assert checkpoints(folder) == ["step-000002-1"], "who lives tidies up"

    await ended(await start(file, "--resume", "trainer.ranks=2", ROLLSTREAM_FAILPOINT="checkpoint.written"), -signal.SIGKILL)
    assert [one.step for one in (await ledger.status()).checkpoints] == [2]
    assert checkpoints(folder) == [".tmp-step-000004-2", "step-000002-1"]

    await ended(await start(file, "--resume", "trainer.ranks=2"), 0)
    assert checkpoints(folder) == ["step-000004-3", "step-000005-3"]
    assert [(one.step, one.incarnation) for one in (await ledger.status()).checkpoints] == [(4, 3), (5, 3)]

    producing(Keys(unbroken["run"]["name"]))
    await ended(await start(as_file(unbroken), "--new", "trainer.ranks=2"), 0)
    assert surviving(folder) == surviving(Path(unbroken["run"]["dir"]))
    assert len(surviving(folder)) == 5


async def test_megatron_ranks_resume_to_the_bits_of_an_unbroken_run_and_torch_goes_on_from_them(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Start, meeting: dict[str, str]
):
    """Two pipeline stages; one is killed after the optimizer's step 4."""
    backend = "tests.consumer.ranks.shimmed_megatron:ShimmedMegatron"
    changes = {"trainer__backend": backend, "checkpoint__every_steps": 2, "stop__steps": 5}
    tables, unbroken = make_config(**changes), make_config(f"{keys.run}-u", **changes)
    file, folder = as_file(tables), Path(tables["run"]["dir"])
    layout = {LAYOUT: json.dumps({"pp": 2})}
    producing(keys)
    first = await start(file, "--new", RANK="0", LOCAL_RANK="0", **meeting, **layout)
    other = await start(file, "--new", RANK="1", LOCAL_RANK="1", ROLLSTREAM_FAILPOINT="trainer.stepped:4", **meeting, **layout)
    await asyncio.gather(ended(other, -signal.SIGKILL), ended(first, EXIT_TRY_AGAIN))
    await ended(await start(file, "--resume", "trainer.ranks=2", **layout), 0)
    assert [line.step for line in read_witness(folder / "witness.jsonl") if line.incarnation == 2] == [3, 4, 5]

    producing(Keys(unbroken["run"]["name"]))
    await ended(await start(as_file(unbroken), "--new", "trainer.ranks=2", **layout), 0)
    assert surviving(folder) == surviving(Path(unbroken["run"]["dir"]))

    config = validate(TrainerDaemonConfig, tables | {"stop": {"steps": 6}, "trainer": {"lr": 1e-3, "warmup_steps": 2}}, source="test")
    await run_trainer(config, RedisLedger(redis, keys), redis, keys, asyncio.Event(), new_as=None)
    assert [step for step, _, _ in surviving(folder)] == [1, 2, 3, 4, 5, 6]
