"""Pauses, the token clock and slow updates, on a real engine over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from producer.engine.embedded import weights, worker
from producer.engine.embedded.server import EmbeddedEngine

from .conftest import StartEngine
from .test_server import body, generating, get, go_on, post


async def test_retracted_requests_wait_first_and_answer_whole(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    running = [asyncio.create_task(post(session, engine, "/generate", body(100, rid=f"r{i}"))) for i in range(10)]
    await generating(engine, 80)
    assert await post(session, engine, "/pause_generation", {"mode": "in_place"}) == (200, {"message": "Generation paused successfully.", "status": "ok"})
    held = engine.counters.running
    assert await post(session, engine, "/flush_cache") == (400, "Flush cache failed.\n")
    assert (await post(session, engine, "/pause_generation", {"mode": "retract"}))[0] == 200
    assert (await get(session, engine, "/ready"))[0] == 503
    assert (held, engine.counters.running, engine.counters.queued, engine.counters.retracted) == (8, 0, 10, 8)
    assert "num_retracted_reqs" in (await get(session, engine, "/metrics"))[1]
    assert (await post(session, engine, "/flush_cache"))[0] == 200
    assert [request.rid for request in engine._worker._waiting][8:] == ["r8", "r9"]
    assert (await post(session, engine, "/abort_request", {"rid": "r3"}))[0] == 200
    assert engine.counters.retracted == 7
    go_on(engine)
    await post(session, engine, "/continue_generation")
    answers = {answer["meta_info"]["id"]: answer for _, answer in await asyncio.gather(*running)}
    assert answers["r3"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["r3"]["output_ids"]
    assert {len(answer["output_ids"]) for rid, answer in answers.items() if rid != "r3"} == {100}
    assert {rid for rid, answer in answers.items() if answer["meta_info"].get("num_retractions")} == {f"r{i}" for i in range(8) if i != 3}
    assert engine.counters.retracted == 0


async def test_long_contexts_come_back_in_several_prefills(engine: EmbeddedEngine, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch):
    running = [asyncio.create_task(post(session, engine, "/generate", body(60, ids=[1, 4 + i]))) for i in range(8)]
    await generating(engine, 160)
    await post(session, engine, "/pause_generation", {"mode": "retract"})
    before = engine.counters.prefills
    monkeypatch.setattr(worker, "_PREFILL_TOKENS", 60)
    go_on(engine)
    await post(session, engine, "/continue_generation")
    assert {len(answer["output_ids"]) for _, answer in await asyncio.gather(*running)} == {60}
    assert engine.counters.prefills - before >= 3


async def test_a_token_clock_spaces_steps_and_commands_do_not_wait_for_it(start_engine: StartEngine, session: aiohttp.ClientSession):
    """A lower bound only: steps never come closer than the clock allows."""
    async with start_engine(pace_s=0.05) as engine:
        began = time.monotonic()
        await post(session, engine, "/generate", body(11))
        assert time.monotonic() - began >= 9 * 0.05  # the first and the second token come with the first tick
    async with start_engine(pace_s=3600.0) as engine:
        running = asyncio.create_task(post(session, engine, "/generate", body(100)))
        await generating(engine, 2)
        async with asyncio.timeout(60):
            assert (await post(session, engine, "/pause_generation", {"mode": "abort"}))[0] == 200
            assert len((await running)[1]["output_ids"]) == 2


async def test_a_slow_engine_takes_as_many_times_as_long_to_apply(
    start_engine: StartEngine, session: aiohttp.ClientSession, model_b: Path, monkeypatch: pytest.MonkeyPatch
):
    real = weights.apply
    monkeypatch.setattr(weights, "apply", lambda model, staged: (time.sleep(0.05), real(model, staged)))
    async with start_engine(apply_delay_factor=10.0) as engine:
        assert (await post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:1"}))[0] == 200
        assert engine.counters.load_s >= 0.5


async def test_a_key_is_asked_of_everybody_but_probes(start_engine: StartEngine, session: aiohttp.ClientSession):
    async with start_engine(api_key="s3cret") as engine:
        for path, method in itertools.product(("/generate", "/pause_generation", "/begin_weight_update", "/model_info", "/nowhere"), ("GET", "POST")):
            for header in (
                {},
                {"Authorization": "Bearer other"},
                {"Authorization": "Basic s3cret"},
                {"Authorization": "s3cret"},
                {"Authorization": "Bearer é"},
            ):
                async with session.request(method, engine.url + path, json={}, headers=header) as answer:
                    assert (answer.status, await answer.json()) == (401, {"error": "Unauthorized"})
        for path in ("/health", "/health_generate", "/ready", "/metrics"):
            assert (await get(session, engine, path))[0] == 200
        async with session.post(engine.url + "/generate", json=body(2), headers={"Authorization": "bearer s3cret"}) as answer:
            assert answer.status == 200


async def test_a_salt_of_the_cache_is_accepted_and_there_is_no_cache(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    for _ in range(2):
        status, answer = await post(session, engine, "/generate", body(2, extra_key="1:0", cache_salt="1:0"))
        assert (status, answer["meta_info"]["cached_tokens"]) == (200, 0)
    _, server = await get(session, engine, "/server_info")
    assert (server["disable_radix_cache"], server["disable_overlap_schedule"]) == (True, True)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
async def test_who_answers_runs_before_who_decodes(engine: EmbeddedEngine):
    decoding = engine._worker._thread.native_id
    assert decoding is not None
    assert os.getpriority(os.PRIO_PROCESS, decoding) > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
