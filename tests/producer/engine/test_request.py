from __future__ import annotations

from typing import Any

import pytest

from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import BadRequest, Limits, parse


@pytest.fixture
def limits(served: SlotModel) -> Limits:
    return Limits(context_length=32, vocabulary=21, tokenizer=served.tokenizer)


def test_one_prompt_is_one_request_with_sglangs_defaults(limits: Limits):
    (request,), listed = parse({"input_ids": [1, 5], "sampling_params": {"max_new_tokens": 3}}, limits)
    assert not listed
    assert (request.ids, request.sampling.temperature, request.return_logprob, request.logprob_start) == ([1, 5], 1.0, False, -1)
    assert request.rid


def test_text_is_tokenised(limits: Limits):
    (request,), _ = parse({"text": "12=", "sampling_params": {"max_new_tokens": 3}}, limits)
    assert request.ids == [5, 6, 17]


def test_lists_and_n_make_one_request_a_response_in_order(limits: Limits):
    params = [{"max_new_tokens": 1, "n": 2}, {"max_new_tokens": 2}]
    requests, listed = parse({"input_ids": [[1], [2, 3]], "rid": "r", "sampling_params": params}, limits)
    assert listed
    assert [request.ids for request in requests] == [[1], [1], [2, 3]]
    assert requests[2].rid == "r_1"
    assert len({request.rid for request in requests}) == 3
    assert not [request.rid for request in requests[:2] if request.rid.startswith("r_")]
    assert [request.sampling.max_new_tokens for request in requests] == [1, 1, 2]


def test_keys_that_ask_for_nothing_are_accepted(limits: Limits):
    body = {
        "input_ids": [1],
        "stream": False,
        "lora_path": None,
        "priority": 3,
        "cache_salt": "x",
        "of_tomorrow": 1,
        "sampling_params": {"max_new_tokens": 1, "min_p": 0.0, "regex": None},
    }
    assert len(parse(body, limits)[0]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stream": "yes"}, "stream must be true or false"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob is not supported"),
        ({"return_hidden_states": True}, "return_hidden_states is not supported"),
        ({"lora_path": 7}, "lora_path must be the name"),
        ({"text": "1"}, "Either text, input_ids"),
        ({"input_ids": None}, "Either text, input_ids"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": "12"}, "input_ids must be a list"),
        ({"input_ids": [[]]}, "no tokens"),
        ({"input_ids": [21]}, "from 0 to 20"),
        ({"input_ids": [-1]}, "from 0 to 20"),
        ({"input_ids": [True]}, "from 0 to 20"),
        ({"input_ids": [1] * 32}, "longer than the model's context length \\(32 tokens\\)"),
        ({"rid": 7}, "rid must be a string"),
        ({"return_logprob": 1}, "return_logprob must be true or false"),
        ({"logprob_start_len": 9, "return_logprob": True}, "higher than the number of input tokens, 2"),
        ({"sampling_params": []}, "0 entries for 1 prompts"),
        ({"sampling_params": "greedy"}, "sampling_params must be an object"),
        ({"sampling_params": {"temp": 1}}, "unknown field `temp`"),
        ({"sampling_params": {"min_new_tokens": 2}}, "sampling_params.min_new_tokens is not supported"),
        ({"sampling_params": {"frequency_penalty": 0.5}}, "sampling_params.frequency_penalty is not supported"),
        ({"sampling_params": {"temperature": -1}}, "temperature must be a non-negative finite number, got -1"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature must be a number"),
        ({"sampling_params": {"top_p": 0}}, "top_p must be in"),
        ({"sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
        ({"sampling_params": {"stop": ["1"] * 33}}, "at most 32 stop strings are allowed, got 33"),
        ({"input_ids": [[1], [2]], "rid": ["x", "x"]}, r"Duplicate request IDs detected within the request: \['x'\]"),
        ({"sampling_params": {"max_new_tokens": 31}}, "exceeds the model's maximum context length of 32 tokens. You requested a total of 33 tokens"),
        ({"sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"sampling_params": {"stop": [""]}}, "stop must be"),
        ({"sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids must be"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_as_asked_is_refused_by_name(limits: Limits, change: dict[str, Any], message: str):
    body = {"input_ids": [1, 5], "sampling_params": {"max_new_tokens": 3}} | change
    with pytest.raises(BadRequest, match=message):
        parse(body, limits)


def test_a_body_that_is_no_object_is_refused(limits: Limits):
    with pytest.raises(BadRequest, match="must be a JSON object"):
        parse([1], limits)


def test_no_limit_is_what_the_context_has_room_for(limits: Limits):
    (request,), _ = parse({"input_ids": [1, 5], "sampling_params": {"max_new_tokens": None}}, limits)
    assert request.sampling.max_new_tokens == 30


def test_what_is_wrong_is_said_in_the_shape_of_who_would_see_it_first(limits: Limits):
    for wrong, keys in (
        ([1], {"object", "message", "type", "param", "code"}),
        ({"input_ids": [1], "rid": 7}, {"object", "message", "type", "param", "code"}),
        ({"input_ids": [1], "sampling_params": {"top_p": 2}}, {"error"}),
        ({"input_ids": [1], "sampling_params": {"top_p": "x"}}, {"error"}),
    ):
        with pytest.raises(BadRequest) as caught:
            parse(wrong, limits)
        assert set(caught.value.body) == keys
