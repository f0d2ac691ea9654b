"""Streamed responses: the same as whole ones, piece by piece. Here each event repeats what came before; `test_with_keys.py` has the other way."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import LONG, PROMPT, Engine, asking

GREEDY = {"temperature": 0.0}
TIMES = ("_ts", "_time", "latency", "throughput", "cached_tokens", "id", "_wait")


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """What does not depend on when, and where, it was written; logprobs without the noise of batches."""
    meta = {key: value for key, value in answer["meta_info"].items() if not any(part in key for part in TIMES)}
    for key in ("output_token_logprobs", "input_token_logprobs"):
        meta[key] = [[None if entry[0] is None else round(entry[0], 3), *entry[1:]] for entry in meta.get(key, [])]
    return answer | {"meta_info": meta}


async def test_the_last_event_is_what_would_have_been_answered_whole(engine: Engine):
    body = asking(40, sampling=GREEDY, logprob_start_len=0, return_prompt_token_ids=True, return_text_in_logprobs=True)
    whole, events = await engine.generate(body), await engine.events(body)
    assert lasting(events[-1]) == lasting(whole)


async def test_each_event_has_all_so_far_and_only_the_last_one_ends_it(engine: Engine):
    events = await engine.events(asking(200, sampling=GREEDY, logprob_start_len=0, return_prompt_token_ids=True))
    final, middle = events[-1], events[:-1]
    assert len(middle) > 5
    before = 0
    for event in middle:
        ids, meta = event["output_ids"], event["meta_info"]
        assert len(ids) > before
        before = len(ids)
        assert ids == final["output_ids"][:before]
        assert final["text"].startswith(event["text"])
        assert meta["output_token_logprobs"] == final["meta_info"]["output_token_logprobs"][:before]
        assert meta["input_token_logprobs"] == final["meta_info"]["input_token_logprobs"]
        assert (meta["finish_reason"], meta["completion_tokens"], meta["output_token_logprobs_length"]) == (None, before, before)
        assert (meta["weight_version"], "weight_versions" in meta) == ("1:0", False)
        assert (meta["prompt_tokens"], event["prompt_token_ids"]) == (len(PROMPT), PROMPT)
    assert final["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
    assert final["meta_info"]["weight_versions"] == [{"version": "1:0", "start": 0, "end": 200}]


async def test_no_event_shows_half_a_character(engine: Engine):
    """The end may: nothing comes that could complete it."""
    for event in (await engine.events(asking(120)))[:-1]:
        assert not event["text"].endswith("\ufffd")


async def test_what_may_become_a_stop_string_is_held_back(engine: Engine):
    whole = (await engine.generate(asking(60, sampling=GREEDY)))["text"]
    stop = whole[3:9]
    *middle, final = await engine.events(asking(60, sampling=GREEDY | {"stop": stop}))
    assert final["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert final["text"] == whole[:3]
    assert all(whole[:3].startswith(event["text"]) for event in middle)


@pytest.mark.parametrize("body", [asking(6, ids=[[5], [6, 7]], rid=["x", "y"], sampling=GREEDY), asking(6, sampling={"n": 2})], ids=["list", "n"])
async def test_the_events_of_several_say_which_one_they_are_of(engine: Engine, body: dict[str, Any]):
    events = await engine.events(body)
    finals = {event["index"]: event for event in events if event["meta_info"]["finish_reason"]}
    assert sorted(finals) == [0, 1]
    for event in events:
        final = finals[event["index"]]
        assert event["meta_info"]["id"] == final["meta_info"]["id"]
        assert event["output_ids"] == final["output_ids"][: len(event["output_ids"])]
    if "rid" in body:
        assert [finals[i]["meta_info"]["id"] for i in range(2)] == body["rid"]


async def test_nothing_at_all_can_be_streamed(engine: Engine):
    (only,) = await engine.events(asking(0))
    assert (only["output_ids"], only["text"], only["meta_info"]["finish_reason"]) == ([], "", {"type": "length", "length": 0})


@pytest.mark.parametrize("wrong", [asking(5000), asking(4, sampling={"temperature": -1}), {"sampling_params": {}}], ids=["long", "cold", "empty"])
async def test_what_cannot_be_served_is_told_in_the_stream(engine: Engine, wrong: dict[str, Any]):
    """Its status was sent before anybody looked at the request."""
    (only,) = await engine.events(wrong)
    assert set(only) == {"error"}
    assert (only["error"]["code"], only["error"]["retryable"]) == (400, False)
    assert only["error"]["message"]
    status, _ = await engine.post("/generate", raw=b'{"stream": true,')
    assert status == 400


async def test_a_reader_who_hangs_up_ends_the_request(engine: Engine):
    """Long before it would have been over: one as long that was asked for just before still writes."""
    async with engine.running(1) as (other,):
        async with engine.stream(asking(LONG)) as stream:
            async for event in stream:
                if len(event["output_ids"]) > 10:
                    break
            assert await engine.decodes(2, before_the_end_of=other)
        assert await engine.decodes(1, before_the_end_of=other)


async def test_an_aborted_stream_ends_with_what_there_is(engine: Engine):
    async with engine.running(1, rid="cut") as (one,):
        await engine.post("/abort_request", {"rid": "cut"})
        answer = await one.answer()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == answer["meta_info"]["weight_versions"][-1]["end"] > 0
