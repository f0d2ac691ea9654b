"""What an engine says of itself, and what it does not know."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import ApplyFailed

from .conftest import Models
from .engine import SOON, Engine, asking
from .served import CONTEXT, SLOTS


async def test_it_says_which_model_it_serves(engine: Engine, models: Models):
    info = (await engine.get("/model_info")).body
    assert (info["model_path"], info["is_generation"], info["weight_version"]) == (str(models.a), True, "1:0")
    assert (info["model_type"], info["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert set(info) >= {"served_model_name", "tokenizer_path"}
    assert (await engine.get("/get_model_info")).body == info
    assert await engine.control.weight_version() == "1:0"


async def test_it_says_how_it_was_started(engine: Engine):
    info = dict(await engine.control.server_info())
    assert (info["tp_size"], info["dtype"], info["device"]) == (1, engine.setup.dtype, "cpu")
    assert info["max_running_requests"] == SLOTS
    assert info["max_total_num_tokens"] >= SLOTS * CONTEXT
    assert (info["context_length"], type(info["disable_radix_cache"]), type(info["disable_overlap_schedule"])) == (CONTEXT, bool, bool)
    assert info["version"]
    assert (await engine.get("/get_server_info")).status == 200


async def test_it_is_ready_and_alive_and_says_so_without_a_body(engine: Engine):
    for path in ("/ready", "/health", "/health_generate"):
        assert (await engine.get(path)).status == 200
    assert await engine.control.ready()


async def test_a_probe_names_the_version_it_was_written_by(engine: Engine):
    assert set(await engine.control.probe(deadline_s=120)) == {"1:0"}


async def test_one_without_lora_takes_no_adapter_and_says_what_to_set(engine: Engine):
    assert (await engine.control.server_info())["enable_lora"] in (None, False)
    assert await engine.control.adapters() == ()
    with pytest.raises(ApplyFailed, match="--enable-lora"):
        await engine.control.load_adapter("rollstream-x-1-0", "/nowhere", deadline_s=10)
    status, body = await engine.post("/generate", asking(1, lora_path="rollstream-x-1-0"))
    assert (status, "--enable-lora" in body["error"]["message"], "rollstream-x-1-0" in body["error"]["message"]) == (400, True, True)


async def test_the_figures_that_pacing_reads_are_there(engine: Engine):
    async with engine.running(2):
        text = (await engine.get("/metrics")).body
    names = {line.partition("{")[0] for line in text.splitlines() if line.startswith("sglang:")}
    assert names >= {f"sglang:{name}" for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "gen_throughput")}
    assert names >= {"sglang:prompt_tokens_total", "sglang:generation_tokens_total"}


@pytest.mark.parametrize("path", ["/update_weights", "/begin_session", "/nothing"])
async def test_what_it_does_not_know_is_not_found(engine: Engine, path: str):
    """By this, what an older engine lacks is known."""
    for method in ("GET", "POST"):
        assert await engine.ask(method, path, {}) == (404, {"detail": "Not Found"})


async def test_what_is_asked_in_the_wrong_way_is_not_allowed(engine: Engine):
    for method, path in (
        ("GET", "/generate"),
        ("GET", "/begin_weight_update"),
        ("GET", "/pause_generation"),
        ("POST", "/model_info"),
        ("POST", "/server_info"),
    ):
        assert await engine.ask(method, path) == (405, {"detail": "Method Not Allowed"})


async def test_an_idle_cache_is_flushed_and_one_in_use_is_not_until_it_is_idle(engine: Engine):
    for method in ("GET", "POST"):
        status, text = await engine.ask(method, "/flush_cache")
        assert (status, text.startswith("Cache flushed.")) == (200, True)
    assert await engine.control.flush_cache()
    async with engine.running(1, tokens=SOON) as (one,):
        await engine.control.pause("in_place")
        assert await engine.post("/flush_cache") == (400, "Flush cache failed.\n")
        assert not await engine.control.flush_cache()
        waiting = asyncio.create_task(engine.control.flush_cache(deadline_s=120, patience_s=100))
        await asyncio.wait({waiting}, timeout=0.3)
        assert not waiting.done()
        await engine.control.resume()
        assert await waiting
        assert len((await one.answer())["output_ids"]) == SOON
