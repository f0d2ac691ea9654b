"""A person's wish for a checkpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.contract import TrainedReply
from buffer.redis_ledger import RedisLedger
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.sentinel import Sentinel
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import identify
from protocol.keys import Keys


def test_a_wish_is_removed_once_it_is_answered_and_a_later_one_stays(tmp_path: Path):
    sentinel = Sentinel(tmp_path / "checkpoint")
    assert not sentinel.there()
    sentinel.answered(sentinel.asked())
    sentinel.ask()
    assert sentinel.there()
    asked = sentinel.asked()
    os.utime(tmp_path / "checkpoint" / "SAVE", ns=(asked + 1, asked + 1))
    sentinel.answered(asked)
    assert sentinel.there(), "made again while the checkpoint was written"
    sentinel.answered(sentinel.asked())
    assert not sentinel.there()


@pytest.mark.redis
async def test_a_file_and_a_signal_make_a_checkpoint_at_the_next_step(
    redis: Client, keys: Keys, make_config: Callable[..., dict[str, Any]], producing: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    config = validate(TrainerDaemonConfig, make_config(checkpoint__every_steps=0, checkpoint__keep=4, stop__steps=4), source="test")
    config.checkpoint_folder.mkdir(parents=True)
    wish = config.checkpoint_folder / "SAVE"
    wish.touch()
    real = RedisLedger.trained

    async def step_trained(self: RedisLedger, incarnation: int, step: int, *arguments: Any) -> TrainedReply:
        if step == 3:
            while wish.exists():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)
        return await real(self, incarnation, step, *arguments)

    monkeypatch.setattr(RedisLedger, "trained", step_trained)
    producing(keys)
    ledger = RedisLedger(redis, keys)
    async with asyncio.timeout(300):
        await run_trainer(config, ledger, redis, keys, asyncio.Event(), new_as=identify(config.run, config.model, config.data, config.rollout))
    assert [one.step for one in (await ledger.status()).checkpoints] == [1, 3, 4]
    assert not wish.exists()
