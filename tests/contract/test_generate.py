"""Whole responses: what is asked, what ends them, and what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import EOS, Models
from .engine import PROMPT, Engine, asking
from .served import CONTEXT

GREEDY = {"temperature": 0.0}


async def greedy(engine: Engine, tokens: int = 60, **sampling: Any) -> dict[str, Any]:
    return await engine.generate(asking(tokens, sampling=GREEDY | sampling))


def text_of(models: Models, ids: list[int], *, special: bool = False) -> str:
    """By the tokenizer; ids beyond it count as its first token."""
    known = [token if token < models.tokenizer.get_vocab_size() else 0 for token in ids]
    return str(models.tokenizer.decode(known, skip_special_tokens=not special))


def unmatched(answer: dict[str, Any]) -> tuple[str, Any]:
    reason = answer["meta_info"]["finish_reason"]
    return reason["type"], reason.get("matched")


async def test_a_greedy_response_takes_the_likeliest_token_each_time(engine: Engine, models: Models):
    answer = await greedy(engine, 40)
    assert answer["output_ids"] == models.logprobs(models.a, PROMPT, answer["output_ids"]).argmax(dim=-1).tolist()
    assert (await greedy(engine, 40))["output_ids"] == answer["output_ids"]


async def test_it_says_how_long_it_is_and_what_wrote_it(engine: Engine, models: Models):
    answer = await greedy(engine, 12)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (len(PROMPT), 12, 0)
    assert len(answer["output_ids"]) == meta["output_token_logprobs_length"] == 12
    assert (meta["weight_version"], meta["weight_versions"]) == ("1:0", [{"version": "1:0", "start": 0, "end": 12}])
    assert answer["text"] == text_of(models, answer["output_ids"])
    assert set(meta) >= {"id", "cached_tokens", "e2e_latency"}
    assert 0 <= meta["cached_tokens"] < len(PROMPT)


async def test_the_id_is_the_one_that_was_given_or_one_of_its_own(engine: Engine):
    assert (await engine.generate(asking(1, rid="mine")))["meta_info"]["id"] == "mine"
    first, second = [(await engine.generate(asking(1)))["meta_info"]["id"] for _ in range(2)]
    assert first
    assert first != second


async def test_samples_of_one_prompt_differ_and_come_as_a_list(engine: Engine):
    answers = await engine.generate(asking(20, sampling={"n": 3}, rid="shared"))
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    ids = [answer["meta_info"]["id"] for answer in answers]
    assert len(set(ids)) == 3
    assert not [rid for rid in ids if rid.startswith("shared")]


async def test_a_list_of_prompts_is_answered_by_a_list_in_their_order(engine: Engine):
    body = asking(2, ids=[[5, 6], [7, 8, 9]], sampling=GREEDY, return_prompt_token_ids=True)
    answers = await engine.generate(body | {"rid": ["x", "y"]})
    assert [answer["prompt_token_ids"] for answer in answers] == [[5, 6], [7, 8, 9]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    assert [answer["meta_info"]["id"] for answer in await engine.generate(body | {"rid": "z"})] == ["z_0", "z_1"]
    assert len(await engine.generate(asking(1, ids=[[5]]))) == 1


async def test_text_is_read_by_the_models_own_tokenizer(engine: Engine, models: Models):
    told = await engine.generate({"text": "the lazy dog", "sampling_params": GREEDY | {"max_new_tokens": 6, "ignore_eos": True}})
    given = await engine.generate(asking(6, ids=models.tokenizer.encode("the lazy dog").ids, sampling=GREEDY))
    assert told["output_ids"] == given["output_ids"]


async def test_requests_at_once_do_not_disturb_each_other(engine: Engine):
    bodies = [asking(30, ids=[10 + i, *range(30, 31 + i)], sampling=GREEDY) for i in range(12)]
    together = await asyncio.gather(*(engine.generate(body) for body in bodies))
    alone = [await engine.generate(body) for body in bodies[:3]]
    assert [answer["output_ids"] for answer in together[:3]] == [answer["output_ids"] for answer in alone]


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine: Engine, models: Models, *, keep: bool):
    """It may begin and end within tokens; all tokens are there, and of the text what is before it, or up to its end."""
    free = await greedy(engine)
    ids, whole = free["output_ids"], free["text"]
    start = 3
    stop = whole[start : start + 4]
    answer = await greedy(engine, stop=["never written", stop], no_stop_trim=keep)
    assert unmatched(answer) == ("stop", stop)
    length = next(i for i in range(1, len(ids)) if stop in text_of(models, ids[:i]))
    assert answer["output_ids"] == ids[:length]
    at = whole.index(stop)
    assert answer["text"] == whole[: at + len(stop) if keep else at]
    assert answer["meta_info"]["weight_versions"][-1]["end"] == answer["meta_info"]["completion_tokens"] == length


async def test_a_special_token_can_be_a_stop_string_by_its_name_though_the_text_has_none(engine: Engine, models: Models):
    every = await asyncio.gather(*(engine.generate(asking(60, ids=[first], sampling=GREEDY)) for first in range(10, 42)))
    found = [(i, answer["output_ids"].index(1)) for i, answer in enumerate(every) if 1 in answer["output_ids"][1:]]
    assert found, "no response has the token <|start|>: choose other prompts"
    (first, at), free = (10 + found[0][0], found[0][1]), every[found[0][0]]
    answer = await engine.generate(asking(60, ids=[first], sampling=GREEDY | {"stop": "<|start|>"}))
    assert unmatched(answer) == ("stop", "<|start|>")
    assert answer["output_ids"] == free["output_ids"][: at + 1]
    assert answer["text"] == text_of(models, answer["output_ids"])
    shown = await engine.generate(asking(60, ids=[first], sampling=GREEDY | {"stop": "<|start|>", "skip_special_tokens": False}))
    assert shown["text"] == text_of(models, answer["output_ids"][:-1], special=True)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_token_ends_a_response_and_is_among_its_tokens(engine: Engine, models: Models, *, keep: bool):
    ids = (await greedy(engine))["output_ids"]
    answer = await greedy(engine, stop_token_ids=[ids[5]], ignore_eos=False, no_stop_trim=keep)
    length = ids.index(ids[5]) + 1
    assert unmatched(answer) == ("stop", ids[5])
    assert answer["output_ids"] == ids[:length]
    assert answer["text"] == text_of(models, ids[: length if keep else length - 1])


async def test_the_end_token_ends_a_response_unless_it_is_ignored_and_stop_tokens_with_it(engine: Engine):
    hot = {"ignore_eos": False, "temperature": 2.0}
    answers = await asyncio.gather(*(engine.generate(asking(250, ids=[30 + i], sampling=hot)) for i in range(16)))
    ended = [answer["output_ids"] for answer in answers if unmatched(answer) == ("stop", EOS)]
    assert ended
    assert all(ids.index(EOS) == len(ids) - 1 for ids in ended)
    answer = await engine.generate(asking(60, sampling={"stop_token_ids": list(range(200)), "temperature": 2.0}))
    assert unmatched(answer) == ("length", None)


async def test_of_a_stop_string_and_a_stop_token_in_one_token_the_string_is_named(engine: Engine):
    free = await greedy(engine, 1)
    answer = await greedy(engine, stop=[free["text"]], stop_token_ids=free["output_ids"], ignore_eos=False)
    assert unmatched(answer) == ("stop", free["text"])


async def test_the_last_token_that_fits_may_be_the_one_that_stops(engine: Engine):
    ids = (await greedy(engine, 8))["output_ids"]
    at = ids.index(ids[4])
    assert unmatched(await greedy(engine, at + 1, stop_token_ids=[ids[4]], ignore_eos=False)) == ("stop", ids[4])
    assert unmatched(await greedy(engine, at, stop_token_ids=[ids[4]], ignore_eos=False)) == ("length", None)


async def test_no_token_and_one_token_can_be_asked_for(engine: Engine):
    none = await greedy(engine, 0)
    assert (none["output_ids"], none["text"], none["meta_info"]["finish_reason"]) == ([], "", {"type": "length", "length": 0})
    assert none["meta_info"]["weight_versions"] == [{"version": "1:0", "start": 0, "end": 0}]
    assert (await greedy(engine, 1))["output_ids"] == (await greedy(engine, 2))["output_ids"][:1]


async def test_a_response_may_fill_the_context_but_for_its_end(engine: Engine):
    """SGLang keeps the last two tokens of the context to itself: a response that asked for them ends as one that reached its length."""
    prompt = [7] * (CONTEXT - 10)
    for asked, least in ((8, 8), (10, 8), (None, 8)):
        body = asking(1, ids=prompt, return_logprob=False)
        body["sampling_params"]["max_new_tokens"] = asked
        answer = await engine.generate(body)
        assert least <= len(answer["output_ids"]) <= 10
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": len(answer["output_ids"])}


async def test_without_a_limit_it_is_128_tokens(engine: Engine):
    answer = await engine.generate({"input_ids": PROMPT, "sampling_params": {"ignore_eos": True}})
    assert len(answer["output_ids"]) == 128
    assert not [key for key in answer["meta_info"] if "logprob" in key]


async def test_keys_that_nobody_knows_are_ignored(engine: Engine):
    assert (await engine.generate(asking(2, sampling=GREEDY, of_tomorrow=3)))["output_ids"] == (await greedy(engine, 2))["output_ids"]


def value_error(body: Any) -> bool:
    return set(body) == {"error"} and bool(body["error"]["message"])


def sampling_error(body: Any) -> bool:
    return set(body) == {"error"} and isinstance(body["error"], str)


def type_error(body: Any) -> bool:
    """By SGLang or by its web framework, whichever sees it first."""
    return sampling_error(body) if "error" in body else form_error(body)


def form_error(body: Any) -> bool:
    return (body["object"], body["type"], body["code"]) == ("error", "Bad Request", 400) and bool(body["message"])


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        ({"input_ids": None}, value_error),
        ({"input_ids": []}, value_error),
        ({"input_ids": [7] * CONTEXT}, value_error),
        ({"input_ids": [7] * (CONTEXT - 3)}, value_error),
        ({"logprob_start_len": 5}, value_error),
        ({"return_hidden_states": True}, value_error),
        ({"lora_path": "none"}, value_error),
        ({"rid": 3}, form_error),
        ({"return_logprob": "yes"}, type_error),
        ({"stream": "yes"}, type_error),
        ({"input_ids": [[5], [6]], "rid": ["x", "x"]}, value_error),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else None,
)  # fmt: skip
async def test_a_request_that_cannot_be_served_is_a_400_and_the_next_one_is_served(engine: Engine, changed: dict[str, Any], shape: Any):
    status, body = await engine.post("/generate", asking(8) | changed)
    assert (status, shape(body)) == (400, True), body
    assert len((await greedy(engine, 2))["output_ids"]) == 2


@pytest.mark.parametrize(
    ("sampling", "shape"),
    [
        ({"max_new_tokens": -1}, value_error),
        ({"max_new_tokens": CONTEXT}, value_error),
        ({"temperature": -1}, value_error),
        ({"top_p": 0}, value_error),
        ({"top_p": 1.5}, value_error),
        ({"top_k": 0}, value_error),
        ({"stop": [f"{i:03}" for i in range(33)]}, value_error),
        ({"temperature": "hot"}, sampling_error),
        ({"stop": 3}, sampling_error),
        ({"stop_token_ids": 3}, sampling_error),
        ({"stop_token_ids": ["a"]}, sampling_error),
        ({"of_tomorrow": 1}, sampling_error),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else None,
)
async def test_sampling_that_makes_no_sense_is_a_400(engine: Engine, sampling: dict[str, Any], shape: Any):
    status, body = await engine.post("/generate", asking(8, sampling=sampling))
    assert (status, shape(body)) == (400, True), body


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'"x"', b""])
async def test_what_is_no_json_object_is_a_400(engine: Engine, raw: bytes):
    status, body = await engine.post("/generate", raw=raw)
    assert (status, form_error(body)) == (400, True), body
