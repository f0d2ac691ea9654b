"""An adapter trained by real processes on real Redis: on two ranks, then by one, then on two again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.witness import read_witness
from consumer.config import TrainerDaemonConfig
from protocol.config import validate
from protocol.connection import Client
from protocol.keys import Keys
from tests.consumer.ranks.test_ranked_trainer import lines_of, numbers, tensors_of, trained
from weightsync.channel import Channel

pytestmark = pytest.mark.redis
Tables = Callable[..., dict[str, dict[str, Any]]]


@pytest.mark.timeout(900)
async def test_an_adapter_goes_on_on_one_rank_and_on_two_again_as_if_one_had_trained_it_all(
    redis: Client, keys: Keys, make_config: Tables, as_file: Callable[..., Path], producing: Callable[..., Any], start: Callable[..., Awaitable[Any]]
):
    changes = {"lora__rank": 3, "loss__kl_coef": 0.05, "trainer__lr": 1e-2, "stop__steps": 5}
    tables = make_config(**changes)
    file, folder = as_file(tables), Path(tables["run"]["dir"])
    producing(keys)
    async with asyncio.timeout(800):
        for how, steps in (("--new", 2), ("", 4), ("--resume", 5)):
            if how:
                process = await start(file, how, "trainer.ranks=2", f"stop.steps={steps}")
                told = (await process.communicate())[1].decode()
                assert process.returncode == 0, told
            else:
                await trained(validate(TrainerDaemonConfig, tables | {"stop": {"steps": steps}}, source="test"), redis, new=False)
    witness, newest = read_witness(folder / "witness.jsonl"), await Channel(redis, keys).newest()
    assert [(line.incarnation, line.step) for line in witness] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5)]
    assert newest is not None
    assert (str(newest.version), newest.digest, newest.kind) == ("3:5", witness[-1].digest, "full"), "merged"

    unbroken = validate(TrainerDaemonConfig, make_config(f"{keys.run}-u", **changes), source="test")
    producing(Keys(unbroken.run.name))
    await trained(unbroken, redis, new=True)
    for found, line in zip(*(lines_of(path / "metrics.jsonl") for path in (folder, unbroken.run.folder)), strict=True):
        for name in ("loss", "grad_norm", "entropy", "ratio_dev", "lr"):
            assert found[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), name
    for found, expected in zip(*(tensors_of(one, "step-000005") for one in (folder, unbroken.run.folder)), strict=True):
        assert found.keys() == expected.keys()
        for tensor, values in expected.items():
            np.testing.assert_allclose(numbers(found[tensor]), numbers(values), rtol=1e-3, atol=5e-6, err_msg=tensor)
