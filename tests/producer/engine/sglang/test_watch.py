from __future__ import annotations

import asyncio
import contextlib
import doctest
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault
from producer.engine.sglang import progress, watch
from producer.engine.sglang.watch import Watch

SETTINGS = EngineConfig(progress_seconds=0.05, probe_seconds=60.0)


class Staged:
    """An engine that says what a test wants it to say."""

    def __init__(self) -> None:
        self.tokens, self.running, self.version = 0, 0, "boot:1"
        self.writes = True
        self.probes = self.given_up = self.looks = self.asked = 0
        self.metrics_status = 200

    async def metrics(self, _: web.Request) -> web.Response:
        self.looks += 1
        text = f'sglang:num_running_reqs 0{self.running}\nsglang:num_queue_reqs 0\nsglang:realtime_tokens_total{{mode="decode"}} {self.tokens}\n'
        return web.Response(text=text, status=self.metrics_status)

    async def model_info(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response({"weight_version": self.version})

    async def generate(self, _: web.Request) -> web.Response:
        self.probes += 1
        if not self.writes:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1
        self.tokens += 1
        return web.json_response({"output_ids": [1], "meta_info": {"weight_version": self.version}})

    async def done(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})


@contextlib.asynccontextmanager
async def watched(**settings: Any) -> AsyncIterator[tuple[Staged, Desk, Watch, web.AppRunner]]:
    engine = Staged()
    app = web.Application()
    app.add_routes([web.get("/metrics", engine.metrics), web.get("/model_info", engine.model_info), web.post("/generate", engine.generate)])
    app.add_routes([web.post(path, engine.done) for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk")])
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            desk = Desk(session)
            yield engine, desk, Watch(url, desk, SETTINGS.model_copy(update=settings), capacity=4), runner
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "_LOOK_S", 0.02)


def test_the_states_of_progress_hold():
    assert doctest.testmod(progress) == (0, 4)


async def verdict(watching: Watch, deadline_s: float = 100.0) -> str:
    with pytest.raises(EngineFault) as caught:
        async with asyncio.timeout(deadline_s):
            await watching.run()
    return str(caught.value)


async def goes_on(watching: Watch, until: Callable[[], bool]) -> None:
    """It finds no fault at least until then."""
    running = asyncio.create_task(watching.run(), name="watch")
    async with asyncio.timeout(100):
        while not until():
            if running.done():
                running.result()
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_an_engine_that_writes_nothing_for_a_while_and_nothing_when_asked_hangs():
    async with watched(probe_seconds=2.0) as (engine, _, watching, _):
        engine.running, engine.writes = 2, False
        assert "no new token for 0.05 s, and none within 2 s when asked for one" in await verdict(watching)
        assert engine.probes == 1


async def test_an_idle_one_is_asked_too_and_lives_on_what_it_writes():
    async with watched() as (engine, _, watching, _):
        await goes_on(watching, lambda: engine.probes > 1)
        await watching.until_idle()  # a look after the last token
        assert watching.figures.generated_tokens == engine.tokens
        assert watching.idle


async def test_one_that_writes_is_never_asked(monkeypatch: pytest.MonkeyPatch):
    """A token between two looks, which lie two thirds of the time apart that it may be quiet."""
    async with watched(progress_seconds=0.3) as (engine, _, watching, _):
        engine.writes = False

        def clock() -> float:
            engine.tokens = engine.looks
            return 0.2 * engine.looks

        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=clock))
        await goes_on(watching, lambda: engine.looks >= 20)
        assert engine.probes == 0


async def test_tokens_of_others_while_it_is_asked_speak_for_it():
    async with watched() as (engine, _, watching, _):
        engine.writes = False

        async def write_once_asked() -> None:
            while True:
                await asyncio.sleep(0.02)
                engine.tokens += engine.probes

        writing = asyncio.create_task(write_once_asked())
        await goes_on(watching, lambda: engine.given_up >= 1)
        writing.cancel()


async def test_one_that_we_have_paused_is_not_asked():
    async with watched(probe_seconds=0.2) as (engine, desk, watching, _):
        control = desk.reconciling(watching._url)
        engine.writes = False
        await control.pause("in_place")
        assert desk.paused
        await goes_on(watching, lambda: engine.looks >= 20)
        assert engine.probes == 0
        await control.resume()
        assert not desk.busy_with_weights
        await verdict(watching)


async def test_one_that_is_gone_is_known_to_be():
    async with watched() as (_, _, watching, runner):
        await watching._look()
        await runner.cleanup()
        assert "nobody listens there any more" in await verdict(watching)


@pytest.mark.parametrize("told", ["boot:1", "1:1", "1:9"], ids=["base weights", "an older version", "another run's"])
async def test_one_that_serves_what_it_was_not_given_is_another_engine_now(told: str):
    async with watched(progress_seconds=60.0) as (engine, desk, watching, _):
        control = desk.reconciling(watching._url)
        await goes_on(watching, lambda: engine.looks >= 3)  # nothing was given to it yet
        for version in ("1:1", "1:2"):
            await control.update_from_disk("/m", version, deadline_s=60)
            engine.version = version
            asked = engine.asked
            await goes_on(watching, lambda asked=asked: engine.asked > asked + 1)
        engine.version = told
        assert f"served 1:2 and now says {told!r}" in await verdict(watching)


async def test_one_without_metrics_is_judged_by_what_it_writes_alone():
    async with watched() as (engine, _, watching, _):
        engine.metrics_status = 404
        await goes_on(watching, lambda: engine.probes > 1)
        assert not watching.idle
