"""The trainer takes turns with an engine on one device: never both, and the same weights as on a device of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from buffer.redis_ledger import RedisLedger
from buffer.witness import read_witness
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.device import shared_device
from consumer.torch_backend import TorchBackend
from protocol.config import validate
from protocol.connection import Client
from protocol.errors import ConfigError
from protocol.identity import identify
from protocol.keys import Keys
from protocol.wakeups import wakeups
from weightsync.turns import Holder, Turn, Turns, renew

Tables = Callable[..., dict[str, dict[str, Any]]]


def configured(tables: dict[str, dict[str, Any]]) -> TrainerDaemonConfig:
    config = validate(TrainerDaemonConfig, tables, source="test")
    config.check()
    return config


async def trained(config: TrainerDaemonConfig, client: Client, *, new: bool = True) -> None:
    keys = Keys(config.run.name)
    identity = identify(config.run, config.model, config.data, config.rollout)
    await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity if new else None)


class Memory:
    """Whose memory lies on the one device, as those know who put it there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = self.trainer = False
        self.turns = 0
        calls = {name: getattr(TorchBackend, name) for name in ("onload", "offload", "accumulate", "finish_step")}

        def watched(name: str) -> Callable[..., Any]:
            @functools.wraps(calls[name])
            def call(backend: TorchBackend, *args: Any) -> Any:
                if name == "offload":
                    self.trainer = False
                else:
                    assert not self.engine, f"{name} while the engine has the device"
                    self.trainer = self.trainer or name == "onload"
                    assert self.trainer, f"{name} off the device"
                return calls[name](backend, *args)

            return call

        for name in calls:
            monkeypatch.setattr(TorchBackend, name, watched(name))

    async def follow(self, turns: Turns) -> None:
        """An engine: it has the device in its turns."""
        while True:
            await turns.taken(Holder.ENGINE, "e0", "b1")
            assert not self.trainer
            self.engine = True
            self.turns += 1
            async with asyncio.TaskGroup() as group:
                renewing = group.create_task(renew(turns, Holder.ENGINE, "e0", "b1"))
                await turns.until(Holder.ENGINE, mine=False)
                await asyncio.sleep(0.05)  # letting go takes a while
                self.engine = False
                renewing.cancel()
            await turns.give(Holder.ENGINE, "e0", "b1")


@pytest.mark.redis
async def test_trainer_and_engine_have_the_device_one_after_the_other_and_the_weights_are_those_of_a_device_of_its_own(
    redis: Client, keys: Keys, make_config: Tables, producing: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    alone, shared = Keys(f"{keys.run}-b"), keys
    producing(alone)
    await trained(configured(make_config(alone.run, stop__steps=5, buffer__pipeline_depth=0.0)), redis)
    memory = Memory(monkeypatch)
    config = configured(make_config(stop__steps=3, buffer__pipeline_depth=0.0, placement__layout="colocated"))
    producing(shared)
    async with asyncio.timeout(300), wakeups(redis, shared) as waker:
        turns = Turns(redis, shared, waker)
        following = asyncio.create_task(memory.follow(turns))
        await trained(config, redis)
        again = configured(make_config(stop__steps=5, buffer__pipeline_depth=0.0, placement__layout="colocated"))
        await trained(again, redis, new=False)
        standing = await turns.read()
        assert (standing.turn, standing.number) == (Turn.GENERATE, 10), "two turns a step"
        following.cancel()
    assert memory.turns >= 5
    first, second = (read_witness(config.run.folder.with_name(name.run) / "witness.jsonl") for name in (alone, shared))
    assert [(line.step, line.seqs, line.digest) for line in first] == [(line.step, line.seqs, line.digest) for line in second]


def test_taking_turns_with_generation_ahead_is_refused(make_config: Tables):
    with pytest.raises(ConfigError, match="pipeline_depth = 0"):
        configured(make_config(placement__layout="colocated", buffer__pipeline_depth=1.0))


async def test_a_backend_that_cannot_let_go_of_a_device_is_refused():
    class Bound:
        accumulate = finish_step = abandon_step = snapshot = capture = restore = None

    with pytest.raises(ConfigError, match="Bound has no offload and onload"):
        async with shared_device(None, None, Bound(), None, incarnation=1, trainer_id="t"):
            pass
