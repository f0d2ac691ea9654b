from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from producer.engine.embedded.server import EmbeddedEngine
from protocol.errors import ConfigError
from weightsync.control import EngineControl

from .conftest import EOS, StartEngine, written_logprobs

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
    async with session.post(engine.url + path, json=body) as answer:
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
    """Yields to the loop until the engine has written so many tokens."""
    async with asyncio.timeout(20):
        while engine.counters.generated_tokens < tokens:
            await asyncio.sleep(0)


async def test_answers_have_the_keys_and_types_of_sglang(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    everything = body(logprob_start_len=0, top_logprobs_num=2)
    check_layout(await post(session, engine, "/generate", everything), "generate_all_logprobs")
    check_layout(await post(session, engine, "/generate", body(return_text_in_logprobs=True)), "generate_text_in_logprobs")
    stopped = body(400, params={"ignore_eos": False, "stop_token_ids": list(range(21))})
    check_layout(await post(session, engine, "/generate", stopped), "generate_stopped")
    check_layout(await post(session, engine, "/generate", body(5000)), "error")


async def test_keys_come_in_sglangs_order(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    _, answer = await post(session, engine, "/generate", body(logprob_start_len=0, top_logprobs_num=2))
    assert list(answer) == list(LAYOUTS["generate_all_logprobs"]["body"])
    assert list(answer["meta_info"]) == list(LAYOUTS["generate_all_logprobs"]["body"]["meta_info"])


async def test_without_return_logprob_there_are_none(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    _, answer = await post(session, engine, "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert not [key for key in answer["meta_info"] if "logprob" in key]


async def test_concurrent_requests_get_the_models_own_logprobs(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path):
    requests = [body(5 + i, ids=[1, 4 + i, *range(4, 4 + i)], rid=f"r{i}") for i in range(16)]
    answers = await asyncio.gather(*(post(session, engine, "/generate", one) for one in requests))
    own = AutoModelForCausalLM.from_pretrained(model_a)
    for one, (status, answer) in zip(requests, answers, strict=True):
        assert (status, answer["meta_info"]["id"]) == (200, one["rid"])
        logprobs, tokens, texts = zip(*answer["meta_info"]["output_token_logprobs"], strict=True)
        assert list(tokens) == answer["output_ids"]
        assert set(texts) == {None}
        torch.testing.assert_close(torch.tensor(logprobs), written_logprobs(own, one["input_ids"], list(tokens)), atol=1e-4, rtol=0)


async def test_n_and_lists_answer_with_a_list(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    status, answers = await post(session, engine, "/generate", body(3, params={"n": 4}))
    assert (status, len(answers)) == (200, 4)
    _, answers = await post(session, engine, "/generate", body(ids=[[1, 5], [1, 6, 7]], params={"n": 1}, return_prompt_token_ids=True))
    assert [answer["prompt_token_ids"] for answer in answers] == [[1, 5], [1, 6, 7]]
    _, answers = await post(session, engine, "/generate", {"text": ["12=", "3"], "sampling_params": {"max_new_tokens": 1}})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [3, 1]


async def test_the_end_token_and_stop_strings_end_a_response_and_are_not_in_its_text(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    seen = set()
    for seed in range(12):
        params = {"ignore_eos": False, "stop": ["1", "="], "sampling_seed": seed, "temperature": 2.0}
        _, answer = await post(session, engine, "/generate", body(200, params=params))
        reason = answer["meta_info"]["finish_reason"]
        assert reason["type"] == "stop"
        seen.add(reason["matched"])
        if reason["matched"] == EOS:
            assert answer["output_ids"][-1] == EOS
        assert not {"1", "="} & set(answer["text"])
    assert seen > {EOS} or seen >= {"1", "="}
    params = {"stop": ["1", "="], "no_stop_trim": True, "sampling_seed": 0, "temperature": 2.0}
    _, answer = await post(session, engine, "/generate", body(200, params=params))
    assert answer["text"][-1] in "1="


async def test_a_seeded_request_is_repeatable(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    answers = [(await post(session, engine, "/generate", body(20, params={"sampling_seed": 3})))[1]["output_ids"] for _ in range(2)]
    assert answers[0] == answers[1]


async def test_what_is_not_json_or_not_supported_is_a_400_with_sglangs_error(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    async with session.post(engine.url + "/generate", data=b"{") as answer:
        assert answer.status == 400
        assert "not JSON" in (await answer.json())["error"]["message"]
    for path, wrong in [
        ("/generate", body(stream=True)),
        ("/pause_generation", {"mode": "nap"}),
        ("/abort_request", {"rid": 3}),
    ]:
        status, answer = await post(session, engine, path, wrong)
        assert status == 400
        assert set(answer) == {"error"}
    status, answer = await post(session, engine, "/generate", body(2, ids=[[1], [2]], rid=["x", "x"]))
    assert (status, answer["error"]["message"]) == (400, "Duplicate request ID detected: x")


async def test_paused_in_place_nothing_is_written_and_new_requests_wait(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    running = asyncio.create_task(post(session, engine, "/generate", body(200)))
    await generating(engine, 20)
    check_layout(await post(session, engine, "/pause_generation", {"mode": "in_place"}), "pause")
    written = engine.counters.generated_tokens
    late = asyncio.create_task(post(session, engine, "/generate", body(3)))
    assert (await get(session, engine, "/ready"))[0] == 503
    assert (await get(session, engine, "/health"))[0] == 200
    assert engine.counters.generated_tokens == written
    assert not late.done()
    check_layout(await post(session, engine, "/continue_generation", {}), "continue")
    assert (await get(session, engine, "/ready"))[0] == 200
    (_, first), (_, second) = await running, await late
    assert len(first["output_ids"]) == 200
    assert len(second["output_ids"]) == 3
    assert engine.counters.paused_s > 0


async def test_paused_by_abort_running_requests_answer_with_what_they_have(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path):
    running = [asyncio.create_task(post(session, engine, "/generate", body(200, rid=f"r{i}"))) for i in range(10)]
    await generating(engine, 40)
    await post(session, engine, "/pause_generation", {})
    own, partial = AutoModelForCausalLM.from_pretrained(model_a), 0
    for answer in await asyncio.gather(*running):
        if answer[1]["output_ids"]:
            partial += 1
            check_layout(answer, "generate_aborted")
            tokens = answer[1]["output_ids"]
            logprobs = torch.tensor([entry[0] for entry in answer[1]["meta_info"]["output_token_logprobs"]])
            torch.testing.assert_close(logprobs, written_logprobs(own, PROMPT, tokens), atol=1e-4, rtol=0)
        assert answer[1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert partial == 8  # two waited for a slot
    await post(session, engine, "/continue_generation")
    assert len((await post(session, engine, "/generate", body(3)))[1]["output_ids"]) == 3


async def test_abort_request_ends_those_whose_id_starts_so(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    running = {rid: asyncio.create_task(post(session, engine, "/generate", body(200, rid=rid))) for rid in ("a-1", "a-2", "b-1")}
    await generating(engine, 30)
    assert await post(session, engine, "/abort_request", {"rid": "a-"}) == (200, "")
    assert await post(session, engine, "/abort_request", {"rid": "nobody"}) == (200, "")
    assert await post(session, engine, "/abort_request", {"rid": ""}) == (200, "")
    kinds = {rid: (await task)[1]["meta_info"]["finish_reason"]["type"] for rid, task in running.items()}
    assert kinds == {"a-1": "abort", "a-2": "abort", "b-1": "length"}


async def test_a_caller_who_goes_away_frees_its_slot(engine: EmbeddedEngine, session: aiohttp.ClientSession):
    task = asyncio.create_task(post(session, engine, "/generate", body(500)))
    await generating(engine, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(10):
        await engine.until_idle()
    assert engine.counters.generated_tokens < 500
    assert await post(session, engine, "/flush_cache") == (200, (await get(session, engine, "/flush_cache"))[1])


async def test_an_update_in_place_splits_a_running_request_exactly(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_a: Path, model_b: Path):
    running = asyncio.create_task(post(session, engine, "/generate", body(150)))
    await generating(engine, 25)
    await post(session, engine, "/pause_generation", {"mode": "in_place"})
    split = engine.counters.generated_tokens
    update = {"model_path": str(model_b), "weight_version": "1:1", "flush_cache": False}
    check_layout(await post(session, engine, "/update_weights_from_disk", update), "update")
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == "1:1"
    await post(session, engine, "/continue_generation", {})
    _, answer = await running
    meta = answer["meta_info"]
    assert meta["weight_version"] == "1:1"
    assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": split}, {"version": "1:1", "start": split, "end": 150}]
    logprobs = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    old, new = (written_logprobs(AutoModelForCausalLM.from_pretrained(path), PROMPT, answer["output_ids"]) for path in (model_a, model_b))
    torch.testing.assert_close(logprobs[:split], old[:split], atol=1e-4, rtol=0)
    assert (logprobs[split] - old[split]).abs() > 1e-3
    assert (logprobs[split:] - new[split:]).abs().max() > 1e-3  # the cache of the old tokens is the old weights'
    _, fresh = await post(session, engine, "/generate", body(20))
    own = written_logprobs(AutoModelForCausalLM.from_pretrained(model_b), PROMPT, fresh["output_ids"])
    torch.testing.assert_close(torch.tensor([entry[0] for entry in fresh["meta_info"]["output_token_logprobs"]]), own, atol=1e-4, rtol=0)


async def test_an_update_that_asks_for_a_flush_it_cannot_have_fails_after_the_weights_changed(
    engine: EmbeddedEngine, session: aiohttp.ClientSession, model_b: Path
):
    """As SGLang does: tokens carry the new version, and the engine's own word stays behind."""
    running = asyncio.create_task(post(session, engine, "/generate", body(150)))
    await generating(engine, 10)
    await post(session, engine, "/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(model_b), "weight_version": "1:1", "flush_cache": True}
    check_layout(await post(session, engine, "/update_weights_from_disk", update), "update_not_flushed")
    assert await post(session, engine, "/flush_cache") == (400, "Flush cache failed.\n")
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == "1:0"
    await post(session, engine, "/continue_generation", {})
    assert [span["version"] for span in (await running)[1]["meta_info"]["weight_versions"]] == ["1:0", "1:1"]


async def test_an_update_without_a_pause_waits_for_running_requests_and_holds_new_ones(engine: EmbeddedEngine, session: aiohttp.ClientSession, model_b: Path):
    running = asyncio.create_task(post(session, engine, "/generate", body(100)))
    await generating(engine, 10)
    update = asyncio.create_task(post(session, engine, "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "1:1"}))
    assert (await running)[1]["meta_info"]["weight_versions"] == [{"version": "1:0", "start": 0, "end": 100}]
    assert (await update)[0] == 200
    assert (await post(session, engine, "/generate", body(2)))[1]["meta_info"]["weight_version"] == "1:1"


async def test_weights_that_do_not_fit_leave_the_old_ones_in_service(engine: EmbeddedEngine, session: aiohttp.ClientSession, tmp_path: Path):
    status, answer = await post(session, engine, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "1:1"})
    assert (status, answer["success"]) == (400, False)
    assert "no safetensors files" in answer["message"]
    assert (await get(session, engine, "/model_info"))[1]["weight_version"] == "1:0"
    assert (await post(session, engine, "/generate", body(2)))[1]["meta_info"]["weight_version"] == "1:0"


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
    async with start_engine(slots=1, max_queued=1) as engine:
        await post(session, engine, "/pause_generation", {"mode": "in_place"})
        waiting = [asyncio.create_task(post(session, engine, "/generate", body(2))) for _ in range(3)]
        done, held = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        assert [task.result()[0] for task in done] == [503]
        await post(session, engine, "/continue_generation", {})
        assert [(await task)[0] for task in held] == [200, 200]


async def test_a_probe_is_served_before_all_that_wait_and_by_a_full_queue_too(start_engine: StartEngine, session: aiohttp.ClientSession):
    """The reconciler's own probe, so that both sides mean the same ids."""
    async with start_engine(slots=1, max_queued=4) as engine:
        finished: list[str] = []

        async def ask(rid: str, tokens: int) -> None:
            await post(session, engine, "/generate", body(tokens, rid=rid))
            finished.append(rid)

        async def probe() -> None:
            assert set(await EngineControl(session, engine.url).probe(deadline_s=20)) == {"1:0"}
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
