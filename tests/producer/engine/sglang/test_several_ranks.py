"""Real servers of SGLang whose weights are split over two ranks: on one machine, and on two that are two hosts here. One test, as each start takes a while."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from deploy.weights_check import WeightsCheckConfig, check_run
from producer.engine import host
from producer.engine.node import run_node
from protocol.messages import EngineStatus, WeightServerStatus
from protocol.presence import Presence
from protocol.versions import Version
from tests.contract.served import interpreter
from tests.producer.engine.conftest import written_logprobs
from tests.producer.engine.hosting import Run
from weightsync.roles import WEIGHT_SERVER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]
PROMPT = [1, 7, 9]
WAIT_S = 600.0


def two_ranks(run: Run, **engine: Any) -> dict[str, Any]:
    kind = {"kind": "sglang", "device": "cpu", "python": interpreter(), "dtype": "float32", "slots": 4, "tp": 2, "max_length": 500}
    return {"engine": kind | engine, "weights": {"transport": "gloo" if "nodes" in engine else "store"}}


@contextlib.asynccontextmanager
async def weight_server(run: Run) -> AsyncIterator[None]:
    file = run.folder / "server.toml"
    sections = {"run": run.values["run"], "redis": run.values["redis"], "weights": run.values["weights"] | {"transport": "gloo"}}
    file.write_text("\n".join(f"[{name}]\n" + "\n".join(f"{key} = {value!r}" for key, value in section.items()) for name, section in sections.items()))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "deploy.cli", "weight-server", "-c", str(file))
    try:
        servers = Presence(run.client, run.keys, WEIGHT_SERVER, WeightServerStatus)
        async with asyncio.timeout(WAIT_S):
            while not await servers.members():
                await asyncio.sleep(0.1)
        yield
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def node_1(run: Run, sections: dict[str, Any], index: int) -> AsyncIterator[None]:
    stop = asyncio.Event()
    task = asyncio.create_task(run_node(run.config(**sections), index, 1, stop), name="node")
    try:
        yield
    finally:
        stop.set()
        await task


async def served(run: Run, version: Version, *, not_boot: str = "") -> list[EngineStatus]:
    def there(engines: list[EngineStatus]) -> bool:
        return len(engines) == 2 and all(one.version == version and one.boot_nonce != not_boot for one in engines)

    return await run.until(there)


async def generate(session: aiohttp.ClientSession, engine: EngineStatus, tokens: int, **more: Any) -> tuple[list[int], torch.Tensor, list[dict[str, Any]]]:
    """Ids, logprobs, spans."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | more
    async with session.post(f"{engine.url}/generate", json=body) as answer:
        told = await answer.json()
    meta = told["meta_info"]
    return told["output_ids"], torch.tensor([one[0] for one in meta["output_token_logprobs"]]), meta["weight_versions"]


async def test_engines_of_two_ranks_take_versions_by_files_and_by_a_group_and_the_nodes_of_one_begin_again_together(
    run: Run, model_a: Path, model_b: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.producer.engine.hosting.WAIT_S", WAIT_S)
    monkeypatch.setattr(host, "_REST_S", 0.1)
    own: Callable[[Path], Any] = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # noqa: E731 - a line
    before, after = own(model_a), own(model_b)
    await run.create()
    first = await run.publish(model_a)
    by_files, by_group = two_ranks(run), two_ranks(run, nodes=2, count=2)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await stack.enter_async_context(weight_server(run))
        await stack.enter_async_context(run.hosted(asyncio.Event(), **by_files | {"engine": by_files["engine"] | {"count": 2}}))
        await stack.enter_async_context(run.hosted(asyncio.Event(), index=1, **by_group))
        await stack.enter_async_context(node_1(run, by_group, 1))
        for engine in await served(run, first):
            ids, logprobs, spans = await generate(session, engine, 20)
            torch.testing.assert_close(logprobs, written_logprobs(before, PROMPT, ids), atol=1e-3, rtol=0)
            assert [span["version"] for span in spans] == [str(first)]

        running = [asyncio.create_task(generate(session, engine, 450)) for engine in await served(run, first)]
        await asyncio.sleep(0.3)
        second = await run.publish(model_b)
        engines = await served(run, second)
        assert [engine.transport for engine in engines] == ["store", "gloo"]
        for _, _, spans in await asyncio.gather(*running):
            assert [span["version"] for span in spans][-1] == str(second)
        for engine in engines:
            ids, logprobs, spans = await generate(session, engine, 20, extra_key="after")
            torch.testing.assert_close(logprobs, written_logprobs(after, PROMPT, ids), atol=1e-3, rtol=0)
            assert [span["version"] for span in spans] == [str(second)]
        config = run.config()
        rows = await check_run(WeightsCheckConfig(run=config.run, redis=config.redis, weights=config.weights), config.redis.url, lambda _: None)
        assert [row.finding.verdict.value for row in rows] == ["same", "same"]

        old = engines[1].boot_nonce
        os.killpg(_part(), signal.SIGKILL)
        _, again = await served(run, second, not_boot=old)
        ids, logprobs, _ = await generate(session, again, 20)
        torch.testing.assert_close(logprobs, written_logprobs(after, PROMPT, ids), atol=1e-3, rtol=0)


def _part() -> int:
    """The server of node 1, which leads its session."""
    (part,) = (child.pid for child in psutil.Process().children() if "--node-rank 1" in " ".join(child.cmdline()))
    return part
