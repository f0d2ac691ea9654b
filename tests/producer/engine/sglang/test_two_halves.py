"""Real servers of SGLang, one that reads prompts and one that writes, as one engine. One test, as a start takes a while."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from producer.engine.client import EngineClient, Outcome, open_session
from producer.engine.generation import ABORTED, Sampling
from producer.engine.key import ADMIN_VARIABLE, VARIABLE
from protocol.messages import EngineStatus
from protocol.versions import Version
from tests.contract.served import interpreter
from tests.producer.engine.conftest import written_logprobs
from tests.producer.engine.hosting import Run

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
PROMPTS = [[1, 7, 9], [1, 5, 6, 8, 4, 4, 10], list(range(4, 20)) * 6]
LONG = 380


def halves() -> dict[str, Any]:
    kind = {"kind": "sglang", "device": "cpu", "python": interpreter(), "dtype": "float32", "slots": 4, "max_length": 500, "tp": 1, "prefill": 1}
    return {"engine": kind, "weights": {"transport": "store", "pause_mode": "in_place"}}


async def written(client: EngineClient, engine: EngineStatus, prompt: list[int], tokens: int, rid: str) -> Outcome:
    """Without a salt: what another version remembers of this prompt would be used."""
    return await client.attempt(engine.url, prompt, sampling=Sampling(max_new_tokens=tokens, ignore_eos=True), rid=rid, deadline_s=120)


def check(outcome: Outcome, prompt: list[int], model: Any, version: Version, tokens: int | None = None) -> None:
    """Every token of `version`, with the logprob that its weights give after all that came before."""
    piece = outcome.piece
    assert piece is not None, outcome.problem
    assert [span.version for span in piece.spans] == [version]
    assert tokens is None or len(piece.output_ids) == tokens
    torch.testing.assert_close(torch.tensor(piece.logprobs), written_logprobs(model, prompt, list(piece.output_ids)), atol=1e-3, rtol=0)


async def test_one_server_reads_prompts_and_one_writes_and_a_version_counts_once_both_serve_it(
    run: Run, model_a: Path, model_b: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tests.producer.engine.hosting.WAIT_S", 600.0)
    monkeypatch.setenv(VARIABLE, "key")
    monkeypatch.setenv(ADMIN_VARIABLE, "admin")
    before, after = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (model_a, model_b))
    await run.create()
    first = await run.publish(model_a)
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        whole, streamed = (EngineClient(session, "key", admin_key="admin", stream=stream) for stream in (False, True))
        await stack.enter_async_context(run.hosted(asyncio.Event(), **halves()))
        engine = await run.serving(first)
        for client in (whole, streamed):
            answers = await asyncio.gather(*(written(client, engine, prompt, 20, f"a{at}") for at, prompt in enumerate(PROMPTS)))
            for answer, prompt in zip(answers, PROMPTS, strict=True):
                check(answer, prompt, before, first, 20)

        under_way = [asyncio.create_task(written(streamed, engine, PROMPTS[0], LONG, f"b{at}")) for at in range(9)]
        await asyncio.sleep(0.5)
        second = await run.publish(model_b)
        cut = 0
        for outcome in await asyncio.gather(*under_way):
            assert outcome.fault is None or outcome.fault.nobodys, outcome.problem
            if outcome.piece is not None and len(outcome.piece.output_ids):
                cut += outcome.piece.finish_reason == ABORTED
                check(outcome, PROMPTS[0], before, first)
        assert cut, "what ran has ended with what it had, and whoever asked goes on from there"
        engine = await run.serving(second)
        assert engine.transport == "store"
        for client in (whole, streamed):
            answers = await asyncio.gather(*(written(client, engine, prompt, 20, f"c{at}") for at, prompt in enumerate(PROMPTS)))
            for answer, prompt in zip(answers, PROMPTS, strict=True):
                check(answer, prompt, after, second, 20)

        leaving = [asyncio.create_task(written(streamed, engine, PROMPTS[0], LONG, f"d{at}")) for at in range(6)]
        await run.until(lambda engines: engines[0].running > 0)
        for task in leaving:
            task.cancel()
        await run.until(lambda engines: not engines[0].running + engines[0].queued)
        check(await written(whole, engine, PROMPTS[1], 5, "e"), PROMPTS[1], after, second, 5)
