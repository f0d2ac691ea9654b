"""The end of a run as others see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from protocol.config import validate
from protocol.connection import Client
from protocol.identity import identify
from protocol.keys import Keys
from protocol.messages import Edge, EngineId, EngineState, EngineStatus, TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import Topic, wakeups
from weightsync.registry import Registry

pytestmark = [pytest.mark.redis]


@pytest.mark.timeout(600)
async def test_a_trainer_that_waits_for_an_engine_that_starts_says_so_and_ends_once_it_serves(
    redis: Client, keys: Keys, make_config: Callable[..., dict[str, Any]], producing: Callable[..., Any]
):
    config = validate(TrainerDaemonConfig, make_config(stop__steps=2), source="test")
    producing(keys)
    registry, presence = Registry(redis, keys), Presence(redis, keys, "trainer", TrainerStatus)
    late = EngineStatus(engine_id=EngineId("late"), boot_nonce="n", url="http://127.0.0.1:9", kind="sglang", state=EngineState.STARTING)
    identity = identify(config.run, config.model, config.data, config.rollout)
    async with wakeups(redis, keys) as waker, asyncio.TaskGroup() as group:
        running = group.create_task(run_trainer(config, RedisLedger(redis, keys), redis, keys, asyncio.Event(), new_as=identity))
        while not ((here := await presence.members()) and here[0].waiting_for is Edge.NO_ACK):
            assert not running.done(), "it waits for the engine"
            mark = waker.mark(*Topic)
            await registry.beat(late, ttl_s=600.0)
            await waker.wait(*Topic, since=mark, timeout_s=0.2)
        assert here[0].trained == 2
        await registry.ack("late", "n", Version(1, 2))
        await running
