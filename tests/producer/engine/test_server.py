from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from producer.engine.embedded.server import EmbeddedEngine
from protocol.errors import ConfigError
from weightsync.control import EngineControl

from .conftest import StartEngine

LAYOUTS: Mapping[str, Any] = json.loads(Path(__file__).with_name("layouts.json").read_text())
"""Keys and types of answers of SGLang 0.5.23; a list holds the distinct layouts of its items."""
PROMPT = [1, 7, 9, 17]


def layout(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: layout(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for kind in map(layout, value):
            kinds += [kind] if kind not in kinds else []
        return kinds
    return {type(None): "null", bool: "bool", int: "int", float: "float", str: "str"}[type(value)]


async def post(session: aiohttp.ClientSession, engine: EmbeddedEngine, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.post(engine.url + path, json={} if body is None else body) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if answer.content_type == "application/json" else raw.decode()


async def get(session: aiohttp.ClientSession, engine: EmbeddedEngine, path: str) -> tuple[int, Any]:
    async with session.get(engine.url + path) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw) if answer.content_type == "application/json" else raw.decode()


def body(tokens: int = 4, *, ids: Any = None, **options: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True} | options.pop("params", {})
    return {"input_ids": ids or PROMPT, "sampling_params": params, "return_logprob": True} | options


def check_layout(found: tuple[int, Any], name: str) -> None:
    expected = copy.deepcopy(LAYOUTS[name])
    status, answer = found
    seen = layout(answer)
    for side in (seen, expected["body"]):
        if "meta_info" in side:  # null without a cached token, both there
            assert side["meta_info"].pop("cached_tokens_details") in ("null", {"device": "int", "host": "int"})
    assert (status, seen) == (expected["status"], expected["body"])


async def generating(engine: EmbeddedEngine, tokens: int) -> None:
    """Return once the engine has written so many tokens, or a step's more. It writes no others until `go_on`; commands are carried out."""
    worker = engine._worker
    due = type(worker)._due

    def held() -> bool:
        if worker.counters.generated_tokens < tokens:
            return due(worker)
        time.sleep(0.002)
        return False

    worker._due = held  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        while engine.counters.generated_tokens < tokens:
            await asyncio.sleep(0)


def go_on(engine: EmbeddedEngine) -> None:
    engine._worker.__dict__.pop("_due", None)


async def test_answers_have_the_keys_and_types_of_sglang(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_b: Path):
    everything = body(logprob_start_len=0, top_logprobs_num=2)
    check_layout(await post(session, engine, "/generate", everything), "generate_all_logprobs")
    check_layout(await post(session, engine, "/generate", body(return_text_in_logprobs=True)), "generate_text_in_logprobs")
    stopped = body(400, params={"ignore_eos": False, "stop_token_ids": list(range(21))})
    check_layout(await post(session, engine, "/generate", stopped), "generate_stopped")
    check_layout(await post(session, engine, "/generate", body(5000)), "error")
    check_layout(await post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:1"}), "update")
    running = asyncio.create_task(post(session, engine, "/generate", body(300)))
    await generating(engine, 60)
    check_layout(await post(session, engine, "/pause_generation", {"mode": "in_place"}), "pause")
    check_layout(await post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:2"}), "update_not_flushed")
    check_layout(await post(session, engine, "/continue_generation", {}), "continue")
    assert (await post(session, engine, "/abort_request", {"abort_all": True}))[0] == 200
    check_layout(await running, "generate_aborted")


async def test_keys_come_in_sglangs_order(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    _, answer = await post(session, engine, "/generate", body(logprob_start_len=0, top_logprobs_num=2))
    assert list(answer) == list(LAYOUTS["generate_all_logprobs"]["body"])
    assert list(answer["meta_info"]) == list(LAYOUTS["generate_all_logprobs"]["body"]["meta_info"])


async def test_a_seeded_request_is_repeatable(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    answers = [(await post(session, engine, "/generate", body(20, params={"sampling_seed": 3})))[1]["output_ids"] for _ in range(2)]
    assert answers[0] == answers[1]


async def test_a_caller_who_goes_away_frees_its_slot(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    task = asyncio.create_task(post(session, engine, "/generate", body(500)))
    await generating(engine, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(60):
        await engine.until_idle()
    assert engine.counters.generated_tokens < 500
    go_on(engine)
    assert await post(session, engine, "/flush_cache") == (200, (await get(session, engine, "/flush_cache"))[1])


async def test_it_says_what_it_is_and_how_it_is(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path):
    await post(session, engine, "/generate", body(6, params={"n": 2}))
    _, model = await get(session, engine, "/model_info")
    assert (model["model_path"], model["is_generation"], model["model_type"]) == (str(model_a), True, "qwen3")
    assert (await get(session, engine, "/get_model_info"))[1] == model
    _, server = await get(session, engine, "/server_info")
    assert (server["max_running_requests"], server["context_length"], server["max_total_num_tokens"]) == (8, 512, 4096)
    assert (server["dtype"], server["tp_size"]) == ("float32", 1)
    assert server["internal_states"][0]["generated_tokens"] == 12
    for path in ("/health", "/health_generate", "/ready"):
        assert await get(session, engine, path) == (200, "")
    _, metrics = await get(session, engine, "/metrics")
    assert f'sglang:generation_tokens_total{{model_name="{model_a}"}} 13.0' in metrics
    for name in ("num_running_reqs", "num_queue_reqs", "num_paused_reqs", "num_retracted_reqs", "token_usage", "gen_throughput", "cache_hit_rate"):
        assert f"\nsglang:{name}{{" in metrics


async def test_a_full_queue_answers_503(start_engine: StartEngine, session: aiohttp.ClientSession):
    """Whoever waits for a pause to end is not in it yet."""
    async with start_engine(slots=1, max_queued=1) as engine:
        running = asyncio.create_task(post(session, engine, "/generate", body(500)))
        await generating(engine, 5)
        waiting = [asyncio.create_task(post(session, engine, "/generate", body(2))) for _ in range(2)]
        done, held = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert [task.result()[0] for task in done] == [503]
        async with session.post(engine.url + "/generate", json=body(2, stream=True)) as answer:
            event = json.loads((await answer.text()).splitlines()[0].removeprefix("data: "))
        assert (answer.status, event["error"]["code"]) == (200, 503)
        go_on(engine)
        assert [(await task)[0] for task in held] == [200]
        await running
        await post(session, engine, "/pause_generation", {"mode": "in_place"})
        waiting = [asyncio.create_task(post(session, engine, "/generate", body(2))) for _ in range(2)]
        _, held = await asyncio.wait(waiting, timeout=0.1)
        assert len(held) == 2
        await post(session, engine, "/continue_generation", {})
        assert [(await task)[0] for task in held] == [200, 200]


async def test_a_stream_and_a_request_at_the_door_end_when_the_decoding_thread_does(
    start_engine: StartEngine, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    async with start_engine(pace_s=0.05) as engine:
        async with session.post(engine.url + "/generate", json=body(500, stream=True)) as answer:
            await answer.content.readline()
            monkeypatch.setattr(engine._model, "decode", None)
            *_, last, mark = (line for line in (await answer.text()).splitlines() if line)
        assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["status_code"] == 500
        assert mark == "data: [DONE]"
    monkeypatch.undo()
    async with start_engine() as engine:
        engine.shut()
        held = [asyncio.create_task(post(session, engine, "/generate", body(2, stream=stream))) for stream in (False, True)]
        while len(engine._live) < 2:
            await asyncio.sleep(0)
        engine._worker.failure = RuntimeError("gone")
        engine._fail()
        (status, _), (stream_status, text) = await held[0], await held[1]
        assert (status, stream_status, '"code":500' in text or '"status_code":500' in text) == (500, 200, True)


async def test_a_probe_is_served_before_all_that_wait_and_by_a_full_queue_too(start_engine: StartEngine, session: aiohttp.ClientSession):
    """The reconciler's own probe, so that both sides mean the same ids."""
    async with start_engine(slots=1, max_queued=4) as engine:
        finished: list[str] = []

        async def ask(rid: str, tokens: int) -> None:
            await post(session, engine, "/generate", body(tokens, rid=rid))
            finished.append(rid)

        async def probe() -> None:
            assert set(await EngineControl(session, engine.url).probe(deadline_s=60)) == {"1:0"}
            finished.append("probe")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("running", 200))
            await generating(engine, 5)
            for i in range(4):
                tasks.create_task(ask(f"waiting-{i}", 20))
            while engine.counters.queued < 4:
                await asyncio.sleep(0)
            assert (await post(session, engine, "/generate", body(2)))[0] == 503
            tasks.create_task(probe())
            while engine.counters.queued < 5:
                await asyncio.sleep(0)
            go_on(engine)
        assert finished[:2] == ["running", "probe"]


async def test_a_taken_port_is_a_configuration_error_that_names_it(start_engine: StartEngine):
    async with start_engine() as engine:
        port = int(engine.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*choose another engine.port"):
            async with start_engine(port=port):
                raise AssertionError


async def test_when_the_decoding_thread_ends_callers_and_host_are_told(
    start_engine: StartEngine, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
):
    async with start_engine() as engine:
        running = asyncio.create_task(post(session, engine, "/generate", body(500)))
        await generating(engine, 5)
        monkeypatch.setattr(engine._model, "decode", None)
        go_on(engine)
        assert (await running)[0] == 500
        with pytest.raises(Exception, match="decoding thread ended"):
            await engine.failed()
        assert (await post(session, engine, "/generate", body(2)))[0] == 500
        assert (await post(session, engine, "/pause_generation", {"mode": "in_place"}))[0] == 500
        assert (await get(session, engine, "/health"))[0] == 503


async def test_closing_ends_what_is_running(start_engine: StartEngine, session: aiohttp.ClientSession):
    async with start_engine() as engine:
        running = asyncio.create_task(post(session, engine, "/generate", body(500)))
        await generating(engine, 5)
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "abort"
