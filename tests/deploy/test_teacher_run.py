"""A small real run that is taught: `rollstream up` with producers that ask a live teacher, to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers
from aiohttp import web

from deploy.summary import read_summary
from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine
from tests.deploy.test_up_transports import up, write_run
from tests.producer.engine.conftest import write_model

STEPS, STEP_ROLLOUTS = 12, 16
Scored = list[tuple[list[int], int]]
"""Tokens of a rollout up to the last sampled one, and how many of them were sampled, in the order in which they were scored."""


@contextlib.asynccontextmanager
async def overheard(url: str, scored: Scored) -> AsyncIterator[str]:
    """A server before the one at `url`, which writes down what it is asked to score."""
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            asked: dict[str, Any] = await request.json()
            if "return_text_in_logprobs" not in asked:
                scored.append((asked["input_ids"], len(asked["input_ids"]) - 1 - asked["logprob_start_len"]))
            async with session.post(url + request.path, json=asked) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

        app = web.Application()
        app.router.add_post("/generate", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


def logprobs(model: Any, ids: list[int], count: int) -> torch.Tensor:
    """[count, V]: of the last `count` tokens, given all before each."""
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)[-1 - count : -1]
    return found


def sampled_divergence(policy: Any, teacher: Any, scored: Scored) -> float:
    """Mean of `log(policy / teacher)` over the sampled tokens: what the loss says of a step without staleness."""
    apart = []
    for ids, count in scored:
        tokens = torch.tensor(ids[-count:])[:, None]
        apart.append((logprobs(policy, ids, count) - logprobs(teacher, ids, count)).gather(1, tokens))
    return float(torch.cat(apart).mean())


def exact_divergence(policy: Any, teacher: Any, scored: Scored) -> float:
    """Mean `KL(policy || teacher)` of the next token over the same contexts."""
    found = []
    for ids, count in scored:
        p, q = logprobs(policy, ids, count), logprobs(teacher, ids, count)
        found.append((p.exp() * (p - q)).sum(-1))
    return float(torch.cat(found).mean())


@pytest.mark.demo
@pytest.mark.timeout(900)
async def test_a_live_teachers_logprobs_reach_the_loss_and_the_policy_comes_nearer_to_it(tmp_path: Path):
    path = write_run(tmp_path, {}, {"pipeline_depth": 0.0})
    text = path.read_text().replace("steps = 6", f"steps = {STEPS}").replace("lr = 0.001", 'lr = 0.01\nwarmup_steps = 0\nadvantage = "none"')
    teacher_path = write_model(tmp_path / "teacher", seed=2)
    scored: Scored = []
    async with (
        EmbeddedEngine(load(str(teacher_path), slots=16), weight_version="teacher", seed=1) as engine,
        overheard(engine.url, scored) as url,
    ):
        path.write_text(f'{text}[loss]\nkind = "distillation"\n[teacher]\nurls = ["{url}"]\n')
        await asyncio.to_thread(up, path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["staleness"]["max"]) == (STEPS, 0, 0)
    assert len(scored) >= STEPS * STEP_ROLLOUTS
    steps: list[dict[str, Any]] = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (last,) = (tmp_path / "run" / "checkpoint").glob(f"step-{STEPS:06d}-*/model")
    start, teacher, trained = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (tmp_path / "model", teacher_path, last)
    )
    first = scored[:STEP_ROLLOUTS]  # nothing runs ahead
    assert steps[0]["tokens"] == sum(count for _, count in first)
    assert steps[0]["loss"] == pytest.approx(sampled_divergence(start, teacher, first), abs=1e-3)
    assert steps[0]["loss"] > 0.5
    assert exact_divergence(trained, teacher, scored) < 0.8 * exact_divergence(start, teacher, scored)
    assert sum(step["loss"] for step in steps[-6:]) / 6 < 0.8 * sum(step["loss"] for step in steps[:3]) / 3
