"""An engine that shares its device with a trainer, driven by the code that does it in a run: it lets go, and is of use again after an update.

What is freed differs: on a CPU SGLang drops keys and values and keeps its weights, the embedded engine frees both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from producer.engine.turns import AWAY, DeviceTurns
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.wakeups import wakeups
from weightsync.registry import Registry
from weightsync.turns import Holder, Turn, Turns

from .conftest import Models
from .engine import LONG, PROMPT, Engine, Running, asking

ENGINE, BOOT = EngineId("e"), "b"


@contextlib.asynccontextmanager
async def sharing(engine: Engine, redis: Client, keys: Keys, turns: Turns) -> AsyncIterator[Registry]:
    """The engine takes turns while the context is open; it has the first."""
    registry, device = Registry(redis, keys), DeviceTurns(turns, ENGINE, BOOT)
    await registry.beat(EngineStatus(engine_id=ENGINE, boot_nonce=BOOT, url=engine.url, kind="sglang", state=EngineState.STARTING), ttl_s=600.0)
    await device.begin()
    following = asyncio.create_task(device.follow(asyncio.Event().wait, control=engine.control, registry=registry), name="following")
    try:
        yield registry
    finally:
        following.cancel()
        await asyncio.wait({following})
        await device.end()
        if not following.cancelled():
            following.result()


async def test_it_lets_go_in_the_trainers_turn_and_serves_the_newest_version_after_it(
    engine: Engine, models: Models, tolerance: float, redis: Client, keys: Keys
):
    ledger = RedisLedger(redis, keys)
    await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=8, dataset="d", tokenizer="t"), BufferConfig())
    incarnation = (await ledger.attach(None, trainer_id="t")).incarnation
    async with wakeups(redis, keys) as waker:
        turns = Turns(redis, keys, waker)
        async with sharing(engine, redis, keys, turns) as registry, asyncio.timeout(900):
            for number in (1, 2):
                running = Running(engine, asking(LONG, rid=f"long-{number}"))
                running.task = asyncio.create_task(running.follow(), name="running")
                await running.written(5)
                await turns.move(incarnation, Turn.TRAIN)
                await turns.taken(Holder.TRAINER, "t", "b")
                ended = await running.answer()
                assert ended["meta_info"]["finish_reason"]["type"] == "abort"
                assert len(ended["output_ids"]) == len(ended["meta_info"]["output_token_logprobs"]) >= 5
                (away,) = await registry.engines()
                assert (away.state, away.reason) == (EngineState.UNFIT, AWAY)
                assert (await turns.read()).holders == {"trainer:t"}
                assert not await engine.control.ready()
                assert (await engine.version()).startswith("away:")
                early = asyncio.create_task(engine.generate(asking(4, rid=f"early-{number}")), name="early")
                await turns.give(Holder.TRAINER, "t", "b")
                await turns.move(incarnation, Turn.GENERATE)
                await turns.taken(Holder.ENGINE, ENGINE, BOOT)
                while not await engine.control.ready():
                    await asyncio.sleep(0.05)
                assert (await early)["meta_info"]["weight_version"].startswith("away:"), "nobody takes what it writes now for a version's"
                model = (models.b, models.a)[number % 2 == 0]
                await engine.control.update_from_disk(str(model), f"1:{number}", deadline_s=120)
                assert await engine.control.flush_cache()
                answer = await engine.generate(asking(8, sampling={"temperature": 0.0}))
                assert answer["meta_info"]["weight_version"] == f"1:{number}"
                own = models.written(model, PROMPT, answer["output_ids"])
                written = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
                assert max(abs(a - b) for a, b in zip(written, own.tolist(), strict=True)) < tolerance
