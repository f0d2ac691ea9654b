"""What SGLang really answered is understood by whoever asks it: control of weights, and generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from producer.engine.client import EngineClient, Generation, Sampling
from protocol.errors import ApplyFailed, SampleAborted, SampleFailed
from protocol.versions import Version
from tests.sglang.replay import ANSWERS, Replay
from weightsync.buckets import Bucket
from weightsync.control import EngineControl
from weightsync.dialect import dialect

OLD = " (0.5.17)"
BUCKET = Bucket(names=("w",), dtypes=("float32",), shapes=((2,),), offsets=(0,), nbytes=8, digest="d")


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as one:
        yield one


# -- control -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "answer", "call", "result"),
    [
        ("/pause_generation", "pause", lambda c: c.pause("in_place"), None),
        ("/continue_generation", "continue", lambda c: c.resume(), None),
        ("/ready", "ready in a pause", lambda c: c.ready(), False),
        ("/ready", f"ready{OLD}", lambda c: c.ready(), False),
        ("/abort_request", "abort", lambda c: c.abort_all(), None),
        ("/flush_cache", "flush", lambda c: c.flush_cache(), True),
        ("/flush_cache", "flush while busy", lambda c: c.flush_cache(), False),
        ("/update_weights_from_disk", "update from disk", lambda c: c.update_from_disk("/models/b", "1:1", deadline_s=5), None),
        ("/begin_weight_update", "begin", lambda c: c.begin_session(), True),
        ("/begin_weight_update", f"begin{OLD}", lambda c: c.begin_session(), False),
        ("/end_weight_update", "end", lambda c: c.end_session(), None),
        ("/model_info", "model info", lambda c: c.weight_version(), "1:0"),
        ("/generate", "generate", lambda c: c.probe(deadline_s=5), None),
        ("/destroy_weights_update_group", "destroy group", lambda c: c.destroy_group("g"), None),
        (
            "/update_weights_from_distributed",
            "last update from distributed",
            lambda c: c.update_from_distributed(BUCKET, group="g", version="1:5", deadline_s=5),
            None,
        ),
    ],
)
async def test_control_takes_every_answer_for_what_it_is(
    session: aiohttp.ClientSession, path: str, answer: str, call: Callable[[EngineControl], Awaitable[Any]], result: Any
):
    async with Replay({path: answer}).serving() as server:
        control = EngineControl(session, server.url)
        if path == "/generate":
            with pytest.raises(ApplyFailed, match="a probe for one token"):  # four tokens: not what it asked for
                await call(control)
        else:
            assert await call(control) == result
        assert [asked for asked, _ in server.asked][-1] == path


@pytest.mark.parametrize(
    ("path", "answer", "call", "words"),
    [
        (
            "/update_weights_from_disk",
            "update from disk, cache not flushed",
            lambda c: c.update_from_disk("/models/b", "1:2", deadline_s=5),
            r"answered 400: Weights were updated, but the cache was not flushed",
        ),
        (
            "/update_weights_from_tensor",
            "update from tensor without a session",
            lambda c: c.update_from_tensor(["p"], load_format=None, version=None, deadline_s=5),
            r"answered 400: .* must run between begin_weight_update\(\) and end_weight_update\(\)",
        ),
        ("/generate", "generate beyond the context", lambda c: c.probe(deadline_s=5), r"answered 400: Requested token count exceeds"),
    ],
)
async def test_a_refusal_reaches_people_in_the_servers_words(
    session: aiohttp.ClientSession, path: str, answer: str, call: Callable[[EngineControl], Awaitable[Any]], words: str
):
    async with Replay({path: answer}).serving() as server:
        with pytest.raises(ApplyFailed, match=words):
            await call(EngineControl(session, server.url))


@pytest.mark.parametrize(
    ("answer", "sessions", "spans", "safe_retract"), [("server info", True, True, "retract"), (f"server info{OLD}", False, False, "abort")]
)
async def test_what_it_can_do_is_read_from_its_settings(session: aiohttp.ClientSession, answer: str, sessions: bool, spans: bool, safe_retract: str):
    """The old one does not say whether it shares prefixes: taken for one that does."""
    async with Replay({"/server_info": answer}).serving() as server:
        known = await EngineControl(session, server.url).dialect()
    assert (known.sessions, known.spans, known.prefix_cache, known.overlap) == (sessions, spans, True, True)
    assert known.pause_mode("retract") == safe_retract
    assert (known.ranks, known.replicas) == (1, 1)


@pytest.mark.parametrize(
    ("told", "known"), [({"tp_size": 4, "dp_size": 1}, (4, 1)), ({"tp_size": 1, "dp_size": 2}, (1, 2)), ({}, (1, 1)), ({"tp_size": None}, (1, 1))]
)
def test_ranks_and_replicas_are_read_from_its_settings(told: dict[str, Any], known: tuple[int, int]):
    found = dialect(ANSWERS["server info"]["body"] | {"tp_size": 1, "dp_size": 1} | told if told else {})
    assert (found.ranks, found.replicas) == known


async def test_every_body_says_that_it_is_json(session: aiohttp.ClientSession):
    async with Replay({"/generate": "generate", "/pause_generation": "pause", "/abort_request": "abort"}).serving() as server:
        client = EngineClient(session)
        await client.generate(server.url, [1], sampling=Sampling(max_new_tokens=8), rid="r", deadline_s=5, assumed=Version(1, 0))
        await client.abort(server.url, "r")
        await EngineControl(session, server.url).pause("abort")
        assert server.content_types == ["application/json"] * 3


async def test_a_group_is_joined_and_checksums_are_read_by_rank(session: aiohttp.ClientSession):
    async with Replay({"/init_weights_update_group": "init group", "/server_info": "server info", "/weights_checker": "checksum"}).serving() as server:
        control = EngineControl(session, server.url)
        await control.init_group(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo", deadline_s=5)
        found = await control.weights_checksum(deadline_s=5)
    (rank,) = found["ranks"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in rank["checksums"], "fused: no name of a published tensor"


# -- generation --------------------------------------------------------------------------------------------------------------------------------


async def generate(session: aiohttp.ClientSession, answer: str, *, stream: bool = False, most: int = 8, **known: Any) -> tuple[Generation, dict[str, Any]]:
    async with Replay({"/generate": answer}).serving() as server:
        client = EngineClient(session, stream=stream)
        found = await client.generate(server.url, [10, 20, 30, 40, 50], sampling=Sampling(max_new_tokens=most), rid="r", deadline_s=5, **known)
        return found, server.asked[-1][1]


def spans(found: Generation) -> list[tuple[str, int, int]]:
    return [(str(span.version), span.start, span.end) for span in found.spans]


async def test_tokens_logprobs_and_versions_come_through_as_they_were(session: aiohttp.ClientSession):
    found, _ = await generate(session, "generate", assumed=Version(1, 0))
    recorded = ANSWERS["generate"]["body"]
    assert found.output_ids.tolist() == recorded["output_ids"]
    assert found.logprobs.tolist() == pytest.approx([entry[0] for entry in recorded["meta_info"]["output_token_logprobs"]])
    assert (spans(found), found.finish_reason) == ([("1:0", 0, 4)], "length")


@pytest.mark.parametrize(("lag", "expected"), [(0, [("1:0", 0, 3), ("1:1", 3, 5)]), (1, [("1:0", 0, 4), ("1:1", 4, 5)])])
async def test_the_version_of_a_token_is_its_spans_and_not_that_of_the_end(session: aiohttp.ClientSession, lag: int, expected: list[Any]):
    """`weight_version` is what was served when the request finished."""
    found, _ = await generate(session, "generate over an update in place", assumed=Version(1, 0), span_lag=lag)
    assert spans(found) == expected


@pytest.mark.parametrize("assumed", [Version(1, 0), Version(1, 3)])
async def test_without_spans_all_tokens_are_of_the_version_acked_before(session: aiohttp.ClientSession, assumed: Version):
    found, _ = await generate(session, f"generate{OLD}", assumed=assumed)
    assert spans(found) == [(str(assumed), 0, 4)]
    assert found.text == "", "a server without a tokenizer answers ids, and no text"


async def test_a_stream_that_repeats_itself_is_read_once_and_its_versions_come_with_the_end(session: aiohttp.ClientSession):
    """Each event has all tokens so far, and only the last one spans."""
    first, last = ANSWERS["stream"]["events"]
    assert "weight_versions" not in first["meta_info"]
    found, asked = await generate(session, "stream", stream=True, assumed=Version(1, 0))
    assert asked["stream"] is True
    assert found.output_ids.tolist() == last["output_ids"]
    assert spans(found) == [("1:0", 0, 3), ("1:1", 3, 5)]


async def test_what_was_ended_on_purpose_comes_with_the_tokens_it_has(session: aiohttp.ClientSession):
    found, _ = await generate(session, "generate aborted", assumed=Version(1, 4))
    assert (found.finish_reason, len(found.output_ids), len(found.logprobs), spans(found)) == ("abort", 4, 4, [("1:4", 0, 4)])


async def test_who_waited_out_a_pause_and_met_older_keys_is_asked_again(session: aiohttp.ClientSession):
    """Its salt names the version before the update, and four tokens of its prompt came from the cache."""
    with pytest.raises(SampleAborted, match="may be older"):
        await generate(session, "generate after waiting out a pause", assumed=Version(1, 0), prefix_cache=True)
    found, _ = await generate(session, "generate after waiting out a pause", assumed=Version(1, 1), prefix_cache=True)
    assert spans(found) == [("1:1", 0, 4)]


async def test_a_prompt_beyond_the_context_fails_the_sample_in_the_servers_words(session: aiohttp.ClientSession):
    with pytest.raises(SampleFailed, match="maximum context length of 2048"):
        await generate(session, "generate beyond the context", assumed=Version(1, 0))


async def test_nothing_is_asked_for_that_a_server_refuses_or_that_costs_it_more(session: aiohttp.ClientSession):
    """Masks, hidden states and experts need flags of the server; logprobs of the prompt and of other tokens are not used."""
    _, asked = await generate(session, "generate", assumed=Version(1, 0))
    assert set(asked) == {"input_ids", "sampling_params", "return_logprob", "rid", "extra_key"}
