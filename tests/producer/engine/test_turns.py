"""An engine on the trainer's device: real Redis, a real host with the embedded engine, and a trainer of the test's that takes its turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from producer.engine.hosted import EngineFault
from producer.engine.turns import AWAY, DeviceTurns
from protocol.errors import ConfigError, SampleFailed
from protocol.messages import EngineId, EngineState
from protocol.wakeups import wakeups
from weightsync.control import EngineControl
from weightsync.turns import Holder, Turn, Turns

from .conftest import written_logprobs
from .hosting import WAIT_S, Run, ask


async def test_an_engine_lets_go_in_the_trainers_turns_and_comes_back_with_the_newest_version(
    run: Run, session: aiohttp.ClientSession, model_a: Path, model_b: Path
):
    from transformers import AutoModelForCausalLM

    run.values |= {"placement": {"layout": "colocated"}, "rollout": {"max_prompt_tokens": 20, "max_new_tokens": 400}}
    run.values["engine"]["pace_s"] = 0.2  # the long request takes over a minute, if nobody ends it
    await run.create()
    stop = asyncio.Event()
    async with wakeups(run.client, run.keys) as waker, run.hosted(stop) as task:
        turns = Turns(run.client, run.keys, waker)
        first = await run.publish(model_a)
        engine = await run.serving(first)
        assert (await turns.read()).holders == {f"engine:{engine.engine_id}"}
        long = asyncio.ensure_future(ask(session, engine, "long", tokens=400))
        async with asyncio.timeout(WAIT_S):
            while not (await run.registry.engines())[0].generated_tokens:
                await asyncio.sleep(0.01)
        await turns.move(first.incarnation, Turn.TRAIN)
        async with asyncio.timeout(WAIT_S):
            await turns.taken(Holder.TRAINER, "t", "b")
        (away,) = await run.registry.engines()
        assert (away.state, away.reason) == (EngineState.UNFIT, AWAY)
        control = EngineControl(session, engine.url)
        assert not await control.ready()
        checksums = await control.weights_checksum(deadline_s=WAIT_S)
        assert len(set(dict(checksums["ranks"][0]["checksums"]).values())) == 1, "nothing of its weights is left"
        early = asyncio.ensure_future(ask(session, engine, "early"))
        second = await run.publish(model_b)
        await turns.give(Holder.TRAINER, "t", "b")
        await turns.move(second.incarnation, Turn.GENERATE)
        engine = await run.serving(second)
        with pytest.raises(SampleFailed, match="away:"):  # it came before the weights did, and nobody takes what it got for a version's
            await early
        answer = await ask(session, engine, "after")
        assert {span.version for span in answer.spans} == {second}
        kept = await long
        assert kept.finish_reason == "abort"
        assert {span.version for span in kept.spans} == {first}
        for written, model in ((kept, model_a), (answer, model_b)):
            own = written_logprobs(AutoModelForCausalLM.from_pretrained(model), [1, 7, 9], written.output_ids.tolist())
            assert abs(written.logprobs - own.numpy()).max() < 1e-4
        stop.set()
        await task
        assert (await turns.read()).holders == frozenset()


async def test_an_answer_that_nobody_understands_ends_a_life_of_the_engine_and_not_its_host(run: Run, session: aiohttp.ClientSession):
    async def answer(_: web.Request) -> web.Response:
        return web.json_response([1])

    app = web.Application()
    app.router.add_post("/pause_generation", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        control = EngineControl(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
        device = DeviceTurns(Turns(run.client, run.keys, run.waker), EngineId("e0"), "b1")
        with pytest.raises(EngineFault, match=r"cannot take turns: .*expected a JSON object"):
            await device._between_turns(control, run.registry)
    finally:
        await runner.cleanup()


async def test_an_engine_does_not_start_in_the_trainers_turn_and_can_be_stopped_meanwhile(run: Run, model_a: Path):
    run.values["placement"] = {"layout": "colocated"}
    await run.create()
    stop = asyncio.Event()
    async with wakeups(run.client, run.keys) as waker:
        turns = Turns(run.client, run.keys, waker)
        version = await run.publish(model_a)
        await turns.move(version.incarnation, Turn.TRAIN)
        async with run.hosted(stop) as task:
            await asyncio.sleep(1.5)
            assert await run.registry.engines() == []
            stop.set()
            async with asyncio.timeout(WAIT_S):
                await task
        await turns.move(version.incarnation, Turn.GENERATE)
        again = asyncio.Event()
        async with run.hosted(again):
            await run.serving(version)
            again.set()


async def test_an_engine_of_the_evaluations_own_takes_no_turns(run: Run, model_a: Path):
    run.values |= {"placement": {"layout": "colocated"}, "eval": {"engines": 1}}
    config = run.config()
    assert [config.shares_device(index) for index in range(2)] == [True, False]


async def test_servers_of_others_do_not_take_turns(run: Run):
    run.values["placement"] = {"layout": "colocated"}
    run.values["engine"] = {"kind": "external", "urls": ["http://127.0.0.1:9"]}
    with pytest.raises(ConfigError, match="use another layout"):
        async with run.hosted(asyncio.Event()) as task:
            await task
