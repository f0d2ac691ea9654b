"""The three ways to pause: what running requests keep, what new ones do meanwhile, and that nothing is lost or written twice."""

from __future__ import annotations

import asyncio

import pytest
import torch

from weightsync.dialect import PauseMode

from .conftest import Models
from .engine import LONG, PROMPT, SOON, Engine, asking

KEEPING: tuple[PauseMode, ...] = ("in_place", "retract")
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


def logged(answer: dict) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


@pytest.mark.parametrize("mode", KEEPING)
async def test_a_paused_request_goes_on_where_it_was(engine: Engine, models: Models, tolerance: float, mode: PauseMode):
    async with engine.running(2, tokens=SOON) as running:
        assert await engine.post("/pause_generation", {"mode": mode}) == (200, PAUSED)
        assert await engine.post("/continue_generation") == (200, CONTINUED)
        for one in running:
            answer = await one.answer()
            meta = answer["meta_info"]
            assert meta["finish_reason"] == {"type": "length", "length": SOON}
            assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": SOON}]
            assert meta["num_retractions"] == (mode == "retract")
            own = models.written(models.a, PROMPT, answer["output_ids"])
            torch.testing.assert_close(logged(answer), own, atol=2 * tolerance, rtol=0)


@pytest.mark.parametrize("mode", KEEPING)
async def test_while_paused_nothing_is_written_and_new_requests_wait(engine: Engine, mode: PauseMode):
    async with engine.running(1) as (one,):
        await engine.post("/pause_generation", {"mode": mode})
        assert (await engine.get("/ready")).status == 503
        assert not await engine.control.ready()
        late = asyncio.create_task(engine.generate(asking(3)))
        assert await engine.version() == "1:0"
        _, waited = await asyncio.wait({late}, timeout=0.3)
        written = one.tokens
        _, waited = await asyncio.wait({late}, timeout=0.3)
        assert waited
        assert one.tokens == written
        await engine.post("/continue_generation")
        assert (await engine.get("/ready")).status == 200
        await one.written(written + 20)
        assert one.tokens >= written + 20
        assert len((await late)["output_ids"]) == 3


async def test_a_pause_by_abort_answers_running_requests_with_what_they_have(engine: Engine, models: Models, tolerance: float):
    async with engine.running(3) as running:
        whole = asyncio.create_task(engine.generate(asking(LONG, ids=[9, *PROMPT], rid="whole")))
        await running[0].written(40)
        assert await engine.post("/pause_generation", {}) == (200, PAUSED)
        answers = [(PROMPT, await one.answer()) for one in running] + [([9, *PROMPT], await whole)]
        for prompt, answer in answers:
            meta = answer["meta_info"]
            assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert 0 < len(answer["output_ids"]) < LONG
            assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": len(answer["output_ids"])}]
            own = models.written(models.a, prompt, answer["output_ids"])
            torch.testing.assert_close(logged(answer), own, atol=tolerance, rtol=0)
        late = asyncio.create_task(engine.generate(asking(3)))
        assert (await engine.get("/ready")).status == 503
        await engine.post("/continue_generation")
        assert len((await late)["output_ids"]) == 3


async def test_a_pause_may_follow_another_and_the_stronger_one_counts(engine: Engine):
    async with engine.running(1, tokens=SOON) as (one,):
        await engine.post("/pause_generation", {"mode": "in_place"})
        assert (await engine.post("/flush_cache")).status == 400
        await engine.post("/pause_generation", {"mode": "retract"})
        assert (await engine.post("/flush_cache")).status == 200
        await engine.post("/continue_generation")
        answer = await one.answer()
        assert (len(answer["output_ids"]), answer["meta_info"]["num_retractions"]) == (SOON, 1)


async def test_to_continue_what_is_not_paused_changes_nothing(engine: Engine):
    for _ in range(2):
        assert await engine.post("/continue_generation") == (200, CONTINUED)
    assert len((await engine.generate(asking(3)))["output_ids"]) == 3


async def test_a_pause_of_an_unknown_kind_pauses_nothing(engine: Engine):
    for wrong in ({"mode": "nap"}, {"mode": 3}, [1]):
        status, body = await engine.post("/pause_generation", wrong)
        assert (status, body["object"]) == (400, "error")
    assert (await engine.get("/ready")).status == 200


async def test_a_pause_with_nothing_running_holds_what_comes(engine: Engine):
    for mode in ("in_place", "retract", "abort"):
        await engine.post("/pause_generation", {"mode": mode})
        late = asyncio.create_task(engine.generate(asking(2)))
        _, waiting = await asyncio.wait({late}, timeout=0.2)
        assert waiting
        await engine.post("/continue_generation")
        assert len((await late)["output_ids"]) == 2
