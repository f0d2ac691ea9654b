"""Ending requests: by id, all of them, and those that wait."""

from __future__ import annotations

import asyncio

from producer.engine.client import EngineClient, Sampling
from protocol.versions import Version

from .engine import LONG, PROMPT, Engine, asking


async def kinds(*running: object) -> list[str]:
    return [(await one.answer())["meta_info"]["finish_reason"]["type"] for one in running]  # type: ignore[attr-defined]


async def test_an_abort_ends_the_request_of_that_id_and_those_whose_ids_begin_with_it(engine: Engine):
    """So ids must not begin with one another: the project's end in a dot."""
    async with engine.running(1, rid="b-1") as (first,), engine.running(1, rid="b-11") as (longer,), engine.running(1, rid="c-1") as (other,):
        assert await engine.post("/abort_request", {"rid": "b-1"}) == (200, "")
        assert await kinds(first, longer) == ["abort", "abort"]
        written = other.tokens
        await other.written(written + 20)
        assert other.tokens >= written + 20


async def test_an_abort_of_an_id_that_nobody_has_ends_nothing(engine: Engine):
    """Also where ids begin with it."""
    async with engine.running(1, rid="a-1") as (one,):
        for nobody in ({"rid": "a-"}, {"rid": "zzz"}, {"rid": ""}, {"rid": None}, {}):
            assert await engine.post("/abort_request", nobody) == (200, "")
        written = one.tokens
        await one.written(written + 20)
        assert one.tokens >= written + 20


async def test_all_can_be_ended(engine: Engine):
    async with engine.running(3) as running:
        await engine.control.abort_all()
        assert await kinds(*running) == ["abort"] * 3


async def test_what_is_no_abort_is_a_400(engine: Engine):
    for wrong in ({"rid": 3}, {"rid": ["a"]}, {"abort_all": "all"}, [1]):
        status, body = await engine.post("/abort_request", wrong)
        assert (status, body["object"]) == (400, "error")
    assert (await engine.post("/abort_request", raw=b"")).status == 400


async def test_no_abort_reaches_what_waits_for_a_pause_to_end(engine: Engine):
    await engine.post("/pause_generation", {"mode": "in_place"})
    late = asyncio.create_task(engine.generate(asking(3, rid="late")))
    _, waiting = await asyncio.wait({late}, timeout=0.2)
    assert waiting
    await engine.post("/abort_request", {"rid": "late"})
    await engine.post("/abort_request", {"abort_all": True})
    await engine.post("/continue_generation")
    answer = await late
    assert (answer["meta_info"]["finish_reason"]["type"], len(answer["output_ids"])) == ("length", 3)


async def test_what_was_paused_in_place_is_ended_once_it_goes_on(engine: Engine):
    async with engine.running(1, rid="held") as (one,):
        await engine.post("/pause_generation", {"mode": "in_place"})
        await engine.post("/abort_request", {"rid": "held"})
        await engine.post("/continue_generation")
        assert await kinds(one) == ["abort"]


async def test_what_was_retracted_is_ended_with_tokens_it_had(engine: Engine):
    """With fewer words: it is known only to the side that waits for its answer, which may lack the newest of its tokens."""
    async with engine.running(1, rid="back", seen=60) as (one,):
        await engine.post("/pause_generation", {"mode": "retract"})
        await engine.post("/abort_request", {"rid": "back"})
        answer = await one.answer()
        meta = answer["meta_info"]
        assert (meta["finish_reason"]["type"], meta["finish_reason"].get("status_code")) == ("abort", None)
        written = len(answer["output_ids"])
        assert 0 < written == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert meta["weight_versions"] == [{"version": "1:0", "start": 0, "end": written}]


async def test_the_projects_client_keeps_what_an_abort_left(engine: Engine):
    """Of a whole answer to a request that was retracted, real engines give every fiftieth token at most: it goes on from there."""
    for stream in (False, True):
        client = EngineClient(engine.session, engine.setup.api_key, stream=stream)
        asked = asyncio.create_task(
            client.generate(
                engine.url, PROMPT, sampling=Sampling(max_new_tokens=LONG, ignore_eos=True), rid=f"client-{stream}", deadline_s=120, assumed=Version(1, 0)
            )
        )
        async with engine.running(1, seen=110):
            await engine.post("/pause_generation", {"mode": "retract"})
            await engine.post("/abort_request", {"abort_all": True})
            kept = await asked
        assert kept.finish_reason == "abort"
        assert 50 <= len(kept.output_ids) == len(kept.logprobs) < LONG
        assert [(str(span.version), span.start, span.end) for span in kept.spans] == [("1:0", 0, len(kept.output_ids))]


async def test_a_caller_who_goes_away_frees_its_slot(engine: Engine):
    """Long before it would have been over: one as long that was asked for just before still writes."""
    async with engine.running(1) as (other,):
        asked = asyncio.create_task(engine.generate(asking(LONG, rid="gone")))
        assert await engine.decodes(2, before_the_end_of=other)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert await engine.decodes(1, before_the_end_of=other)
