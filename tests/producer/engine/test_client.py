from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from producer.engine.client import ABORTED, EngineClient, Fault, Outcome, Sampling, open_session
from producer.engine.embedded.server import EmbeddedEngine
from producer.engine.sglang.ports import held_port
from protocol.errors import EngineUnavailable, SampleAborted, SampleFailed
from protocol.messages import Span
from protocol.versions import Version

from .test_server import generating

SAMPLING = Sampling(max_new_tokens=3)
Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


def good(tokens: int = 3) -> dict[str, Any]:
    """What SGLang answers, as far as the client reads it."""
    ids = [5 + i for i in range(tokens)]
    return {
        "text": "abc",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "length", "length": tokens},
            "weight_version": "1:4",
            "weight_versions": [{"version": "1:3", "start": 0, "end": 1}, {"version": "1:4", "start": 1, "end": tokens}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        },
    }


class StagedServer:
    """A real HTTP server that answers `/generate` with whatever is staged, and remembers what was asked."""

    def __init__(self) -> None:
        self.answer: Any = good()
        self.status = 200
        self.handler: Handler | None = None
        self.bodies: list[Any] = []
        self.aborted: list[str] = []
        self.url = ""

    async def generate(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(await http.json())
        if self.handler is not None:
            return await self.handler(http)
        raw = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        return web.Response(body=raw, status=self.status, content_type="application/json")

    async def abort(self, http: web.Request) -> web.Response:
        self.aborted.append((await http.json())["rid"])
        return web.Response()


@pytest_asyncio.fixture
async def staged() -> AsyncIterator[StagedServer]:
    server, app = StagedServer(), web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort_request", server.abort)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.fixture
def client(session: aiohttp.ClientSession) -> EngineClient:
    return EngineClient(session)


def ask(client: EngineClient, server: Any, **options: Any) -> Awaitable[Any]:
    return client.generate(server.url, [1, 2], **({"sampling": SAMPLING, "rid": "r-1", "deadline_s": 60.0} | options))


async def test_an_answer_becomes_arrays_and_spans(client: EngineClient, staged: StagedServer):
    generation = await ask(client, staged)
    assert generation.output_ids.tolist() == [5, 6, 7]
    assert (generation.output_ids.dtype, generation.logprobs.dtype) == (np.int32, np.float32)
    assert generation.logprobs.tolist() == [-0.5] * 3
    assert generation.spans == (Span(version=Version(1, 3), start=0, end=1), Span(version=Version(1, 4), start=1, end=3))
    assert (generation.finish_reason, generation.text, generation.weight_version) == ("length", "abc", Version(1, 4))


async def test_only_what_differs_from_the_defaults_is_asked_for(client: EngineClient, staged: StagedServer):
    await ask(client, staged)
    full = Sampling(max_new_tokens=3, temperature=0.5, top_p=0.9, top_k=5, stop=("x",), stop_token_ids=(7,), ignore_eos=True)
    await ask(client, staged, sampling=full)
    plain, rich = staged.bodies
    assert plain == {"input_ids": [1, 2], "rid": "r-1.", "return_logprob": True, "sampling_params": {"max_new_tokens": 3, "temperature": 1.0}}
    assert rich["sampling_params"] == {
        "max_new_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["x"], "stop_token_ids": [7], "ignore_eos": True,
    }  # fmt: skip


async def test_without_spans_all_tokens_count_as_the_version_acked_before(client: EngineClient, staged: StagedServer):
    del staged.answer["meta_info"]["weight_versions"]
    generation = await ask(client, staged, assumed=Version(1, 2))
    assert generation.spans == (Span(version=Version(1, 2), start=0, end=3),)
    assert generation.weight_version == Version(1, 2)
    with pytest.raises(SampleFailed, match="no version was acked"):
        await ask(client, staged)


def change(**fields: Any) -> dict[str, Any]:
    """A good answer with fields of it or of its meta_info replaced."""
    answer = good()
    for key, value in fields.items():
        (answer if key in answer else answer["meta_info"])[key] = value
    return answer


def entries(*logprobs: Any) -> list[Any]:
    return [[logprob, 5 + i, None] for i, logprob in enumerate(logprobs)]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "not JSON"),
        (b"<html>502</html>", "not JSON"),
        (b'{"output_ids": [1', "not JSON"),
        (b'{"text": NaN}', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([], "answer: expected dict, got list"),
        ({}, "meta_info: expected dict, got nothing"),
        (change(output_ids=None), "output_ids: expected list"),
        (change(output_ids=[]), "0 tokens, expected 1 to 3"),
        (good(4), "4 tokens, expected 1 to 3"),
        (change(output_ids=[5, 6, "7"]), "expected token ids"),
        (change(output_ids=[5, 6, -7]), "expected token ids"),
        (change(output_ids=[5, 6, 1 << 40]), "expected token ids"),
        (change(output_token_logprobs=None), "output_token_logprobs: expected list, got nothing"),
        (change(output_token_logprobs=entries(-1.0, -1.0)), "2 entries for 3 tokens"),
        (change(output_token_logprobs=entries(-1.0, None, -1.0)), r"output_token_logprobs\[1\]"),
        (change(output_token_logprobs=entries(-1.0, "x", -1.0)), r"output_token_logprobs\[1\]"),
        (change(output_token_logprobs=[[-1.0, 9, None]] * 3), r"output_token_logprobs\[0\]"),
        (change(output_token_logprobs=[-1.0] * 3), r"output_token_logprobs\[0\]"),
        (change(output_token_logprobs=entries(-1.0, 0.7, -1.0)), "outside"),
        (change(output_token_logprobs=entries(-1.0, -1e39, -1.0)), "outside"),
        (change(finish_reason=None), "finish_reason: expected dict"),
        (change(finish_reason={"type": "tired"}), "expected stop, length or abort"),
        (change(finish_reason={"type": "abort", "message": "Aborted"}, output_token_logprobs=entries(-1.0)), "1 entries for 3 tokens"),
        (change(text=None), "text: expected str"),
        (change(weight_versions=[]), "cover 0 of 3 tokens"),
        (change(weight_versions=[{"version": "1:3", "start": 0, "end": 2}]), "cover 2 of 3 tokens"),
        (change(weight_versions=[{"version": "1:3", "start": 1, "end": 3}]), "expected to go on from 0"),
        (change(weight_versions=[{"version": "1:3", "start": 0, "end": 0}]), "expected to go on from 0"),
        (change(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "got 'default', expected \"incarnation:n\""),
        (change(weight_versions=[{"version": "boot:c0ffee", "start": 0, "end": 3}]), "boot:c0ffee"),
        (change(weight_versions=["1:3"]), "expected an object"),
    ],
)
async def test_nothing_that_must_not_be_trained_on_gets_through(client: EngineClient, staged: StagedServer, answer: Any, message: str):
    staged.answer = answer
    with pytest.raises(SampleFailed, match=message):
        await ask(client, staged)


ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


async def test_a_response_that_was_ended_on_purpose_comes_as_far_as_it_came_and_one_that_failed_does_not(client: EngineClient, staged: StagedServer):
    staged.answer = change(finish_reason=ABORT)
    generation = await ask(client, staged)
    assert generation.finish_reason == ABORTED
    assert generation.output_ids.tolist() == [5, 6, 7]
    assert generation.logprobs.tolist() == [-0.5] * 3
    assert [span.version for span in generation.spans] == [Version(1, 3), Version(1, 4)]
    staged.answer = change(finish_reason={"type": "abort", "message": "not finite", "status_code": 500, "err_type": "InternalServerError"})
    with pytest.raises(SampleFailed, match="not finite"):
        await ask(client, staged)


async def test_one_that_was_ended_before_its_first_token_is_empty(client: EngineClient, staged: StagedServer):
    staged.answer = {"text": "", "output_ids": [], "meta_info": {"finish_reason": ABORT, "weight_version": "1:4"}}
    generation = await ask(client, staged)
    assert (len(generation.output_ids), generation.spans, generation.finish_reason) == (0, (), ABORTED)


@pytest.mark.parametrize(("matched", "kept"), [(7, 7), ("###", "###"), (None, None), (["x"], None)])
async def test_what_stopped_it_is_told(client: EngineClient, staged: StagedServer, matched: Any, kept: Any):
    staged.answer = change(finish_reason={"type": "stop", "matched": matched})
    assert (await ask(client, staged)).matched == kept


async def test_no_request_is_aborted_with_another_whose_id_begins_alike(client: EngineClient, staged: StagedServer):
    """SGLang aborts by prefix."""
    await ask(client, staged, rid="r-1")
    await ask(client, staged, rid="r-10")
    await client.abort(staged.url, "r-1")
    short, long = (body["rid"] for body in staged.bodies)
    assert staged.aborted == [short]
    assert not long.startswith(short)


# -- versions, salts and keys ------------------------------------------------------------------------------------------------------------------


async def test_a_request_is_salted_with_the_version_acked_before_it(client: EngineClient, staged: StagedServer):
    await ask(client, staged, assumed=Version(1, 3))
    await ask(client, staged)
    assert [body.get("extra_key") for body in staged.bodies] == ["1:3", None]


@pytest.mark.parametrize(
    ("salt", "cached", "prefix_cache", "refused"),
    [
        (Version(1, 3), 7, True, False),  # it began under its own salt; the update came in its middle
        (Version(1, 2), 7, True, True),  # it waited out an update, and found keys that the version before had computed
        (Version(1, 2), None, True, True),  # not told, so perhaps
        (Version(1, 2), 0, True, False),  # it waited out an update and computed everything itself
        (Version(1, 2), 7, False, False),  # siblings of one call share a prompt; nothing outlives it
    ],
)
async def test_an_answer_that_may_rest_on_older_keys_is_asked_for_again(
    client: EngineClient, staged: StagedServer, salt: Version, cached: int | None, prefix_cache: bool, refused: bool
):
    staged.answer["meta_info"]["cached_tokens"] = cached
    if not refused:
        assert len((await ask(client, staged, assumed=salt, prefix_cache=prefix_cache)).output_ids) == 3
        return
    with pytest.raises(SampleAborted, match="may be older"):
        await ask(client, staged, assumed=salt, prefix_cache=prefix_cache)


RECORDED_SPANS = [
    # as answered by 0.5.23 over in-place updates, with the overlap scheduler: the first token of each later span was sampled by the weights before
    ([("1:0", 0, 261), ("1:1", 261, 300)], 1, [("1:0", 0, 262), ("1:1", 262, 300)]),
    ([("1:0", 0, 278), ("1:1", 278, 1000)], 1, [("1:0", 0, 279), ("1:1", 279, 1000)]),
    # without it, and over retractions, the boundary is exact
    ([("1:0", 0, 270), ("1:1", 270, 1000)], 0, [("1:0", 0, 270), ("1:1", 270, 1000)]),
    # what never had a token of its own is no version of this response
    ([("1:0", 0, 9), ("1:1", 9, 10)], 1, [("1:0", 0, 10)]),
    ([("1:0", 0, 4), ("1:1", 4, 5), ("1:2", 5, 8)], 1, [("1:0", 0, 5), ("1:1", 5, 6), ("1:2", 6, 8)]),
    ([("1:0", 0, 8)], 1, [("1:0", 0, 8)]),
    ([("1:0", 0, 4), ("1:1", 4, 6), ("1:2", 6, 8)], 3, [("1:0", 0, 7), ("1:1", 7, 8)]),
]


@pytest.mark.parametrize(("wire", "lag", "expected"), RECORDED_SPANS)
async def test_tokens_of_the_step_under_way_are_the_older_versions(client: EngineClient, staged: StagedServer, wire: list[Any], lag: int, expected: list[Any]):
    length = wire[-1][2]
    staged.answer = good(length)
    staged.answer["meta_info"]["weight_versions"] = [{"version": version, "start": start, "end": end} for version, start, end in wire]
    generation = await ask(client, staged, sampling=Sampling(max_new_tokens=1000), span_lag=lag)
    assert [(str(span.version), span.start, span.end) for span in generation.spans] == expected


async def test_an_old_answer_is_the_assumed_versions_whatever_it_finished_with(client: EngineClient, staged: StagedServer):
    """0.5.17 names only the version it finished with."""
    del staged.answer["meta_info"]["weight_versions"]
    staged.answer["meta_info"] |= {"weight_version": "1:9", "cached_tokens": 4}
    generation = await ask(client, staged, assumed=Version(1, 2), prefix_cache=True, span_lag=1)
    assert generation.spans == (Span(version=Version(1, 2), start=0, end=3),)


async def test_rounding_above_zero_is_taken_as_zero(client: EngineClient, staged: StagedServer):
    staged.answer = change(output_token_logprobs=entries(-1.0, 1e-6, -1.0))
    assert (await ask(client, staged)).logprobs.max() == 0


@pytest.mark.parametrize(("status", "error"), [(400, SampleFailed), (404, SampleFailed), (500, SampleFailed), (503, EngineUnavailable)])
async def test_an_error_status_is_told_with_the_engines_words(client: EngineClient, staged: StagedServer, status: int, error: type[Exception]):
    staged.status, staged.answer = status, {"error": {"message": "no such luck"}}
    with pytest.raises(error, match=f"answered {status}: .*no such luck"):
        await ask(client, staged)


async def test_a_hanging_engine_fails_the_sample_at_its_deadline_and_is_told_to_abort(client: EngineClient, staged: StagedServer):
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    staged.handler = hang
    with pytest.raises(SampleFailed, match=r"no answer within 0.05 s"):
        await ask(client, staged, deadline_s=0.05)
    assert staged.aborted == ["r-1."]


async def test_a_connection_cut_before_or_within_the_answer_means_the_engine_is_away(client: EngineClient, staged: StagedServer):
    async def reset(http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async def cut(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(http)
        await answer.write(b"{")
        assert http.transport is not None
        http.transport.abort()
        return answer

    for handler in (reset, cut):
        staged.handler = handler
        with pytest.raises((EngineUnavailable, SampleFailed)):
            await ask(client, staged)


async def test_what_is_not_http_fails_the_sample(client: EngineClient):
    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">I", 7) + b"not http at all\r\n\r\n")
        await writer.drain()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((EngineUnavailable, SampleFailed)):
            await client.generate(f"http://127.0.0.1:{port}", [1], sampling=SAMPLING, rid="x", deadline_s=60.0)


async def test_nobody_listening_means_the_engine_is_away(client: EngineClient, staged: StagedServer):
    with held_port("127.0.0.1", key="port") as port, pytest.raises(EngineUnavailable, match="Connect"):
        await client.generate(f"http://127.0.0.1:{port}", [1], sampling=SAMPLING, rid="x", deadline_s=60.0)


async def test_an_api_key_is_sent(session: aiohttp.ClientSession, staged: StagedServer):
    seen: list[str | None] = []

    async def look(http: web.Request) -> web.StreamResponse:
        seen.append(http.headers.get("Authorization"))
        return web.json_response(good())

    staged.handler = look
    await ask(EngineClient(session, api_key="k"), staged)
    await ask(EngineClient(session), staged)
    assert seen == ["Bearer k", None]


async def test_the_embedded_engine_is_driven_as_it_is(client: EngineClient, engine: EmbeddedEngine):
    generations = await asyncio.gather(
        *(client.generate(engine.url, [1, 4 + i % 3], sampling=Sampling(max_new_tokens=4, ignore_eos=True), rid=f"e{i}", deadline_s=60) for i in range(20))
    )
    assert all(len(one.output_ids) == 4 and one.spans == (Span(version=Version(1, 0), start=0, end=4),) for one in generations)
    with pytest.raises(SampleFailed, match=r"answered 400: .*maximum context length of 512"):
        await client.generate(engine.url, [1], sampling=Sampling(max_new_tokens=600), rid="long", deadline_s=60)


async def test_a_cancelled_call_is_aborted_at_the_embedded_engine(client: EngineClient, engine: EmbeddedEngine):
    task = asyncio.create_task(client.generate(engine.url, [1], sampling=Sampling(max_new_tokens=500, ignore_eos=True), rid="c", deadline_s=60))
    async with asyncio.timeout(60):
        await generating(engine, 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.until_idle()


@pytest.mark.parametrize("admin_key", ["", "boss"])
async def test_an_abort_carries_the_admin_key_where_the_engine_has_one(admin_key: str, start_engine: Callable[..., Any], session: aiohttp.ClientSession):
    async with start_engine(api_key="user", admin_key=admin_key) as engine:
        client = EngineClient(session, "user", admin_key=admin_key)
        asked = asyncio.create_task(client.generate(engine.url, [1], sampling=Sampling(max_new_tokens=500, ignore_eos=True), rid="c", deadline_s=60))
        async with asyncio.timeout(60):
            await generating(engine, 1)
            await client.abort(engine.url, "c")
            assert (await asked).finish_reason == "abort"


# -- streams -----------------------------------------------------------------------------------------------------------------------------------


def sse(*events: Any, done: bool = True) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + ([b"data: [DONE]\n\n"] if done else [])


def middle(tokens: int, version: str = "1:3", *, start: int = 0) -> dict[str, Any]:
    """An event before the last, of tokens from `start` on."""
    ids = [5 + i for i in range(start, tokens)]
    meta = {"finish_reason": None, "weight_version": version, "completion_tokens": tokens, "cached_tokens": 0}
    return {"text": "", "output_ids": ids, "meta_info": meta | {"output_token_logprobs": [[-0.5, token, None] for token in ids]}}


def final(tokens: int = 3) -> dict[str, Any]:
    answer = good(tokens)
    answer["meta_info"]["completion_tokens"] = tokens
    return answer


def streams(*pieces: bytes, cut: bool = False) -> Handler:
    async def stream(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(http)
        for piece in pieces:
            await answer.write(piece)
        if cut:
            assert http.transport is not None
            await asyncio.sleep(0)
            http.transport.close()
        return answer

    return stream


@pytest.fixture
def streaming(session: aiohttp.ClientSession) -> EngineClient:
    return EngineClient(session, stream=True)


def attempt(client: EngineClient, server: Any, **options: Any) -> Awaitable[Outcome]:
    return client.attempt(server.url, [1, 2], **({"sampling": SAMPLING, "rid": "r-1", "deadline_s": 60.0} | options))


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_stream_comes_to_what_the_whole_answer_says(streaming: EngineClient, staged: StagedServer, incremental: bool):
    last = final()
    if incremental:
        last["output_ids"], last["text"] = last["output_ids"][2:], "abc"
        last["meta_info"]["output_token_logprobs"] = last["meta_info"]["output_token_logprobs"][2:]
    staged.handler = streams(*sse(middle(1), middle(2, start=1 if incremental else 0), last))
    signs = []
    outcome = await attempt(streaming, staged, on_sign=lambda: signs.append(1))
    assert outcome.piece is not None
    assert (outcome.fault, signs) == (None, [1])
    assert outcome.piece.output_ids.tolist() == [5, 6, 7]
    assert [(str(span.version), span.start, span.end) for span in outcome.piece.spans] == [("1:3", 0, 1), ("1:4", 1, 3)]
    assert (outcome.piece.finish_reason, outcome.piece.text) == ("length", "abc")
    assert staged.bodies[0]["stream"] is True


async def test_an_engine_that_answers_whole_although_a_stream_was_asked_for_is_taken_at_its_word(streaming: EngineClient, staged: StagedServer):
    assert (await ask(streaming, staged)).output_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("pieces", "cut", "fault", "kept"),
    [
        (sse(middle(1), middle(2), done=False), True, Fault.AWAY, 2),
        (sse(middle(1), middle(2), done=False), False, Fault.AWAY, 2),
        ([*sse(middle(1), done=False), b'data: {"text": "", "outp'], True, Fault.AWAY, 1),
        (sse(middle(1), {"error": {"message": "full", "code": 503}}), False, Fault.AWAY, 1),
        ([], False, Fault.AWAY, 0),
        (sse(middle(1), {"error": {"message": "Request r-1. was aborted", "code": 499}}), False, Fault.ENDED, 1),
        (sse(middle(1), {"error": {"message": "too long", "code": 400}}), False, Fault.REJECTED, 0),
        (sse(middle(1), {"error": {"message": "broken", "code": 500}}), False, Fault.BROKEN, 0),
        (sse(middle(1), change(finish_reason={"type": "abort", "message": "NaN", "status_code": 500}, completion_tokens=3)), False, Fault.BROKEN, 0),
        (sse(middle(1), {"hello": 1}), False, Fault.BROKEN, 0),
        (sse(middle(1, "boot:1")), False, Fault.FOREIGN, 0),
        (sse(middle(5), done=False), True, Fault.AWAY, 0),  # more than was asked for
        (sse(final()), True, None, 3),  # what breaks after the end does not matter
    ],
)
async def test_what_arrived_before_a_stream_broke_is_kept_unless_the_engine_says_that_it_failed(
    streaming: EngineClient, staged: StagedServer, pieces: list[bytes], cut: bool, fault: Fault | None, kept: int
):
    staged.handler = streams(*pieces, cut=cut)
    outcome = await attempt(streaming, staged)
    assert outcome.fault is fault
    assert (0 if outcome.piece is None else len(outcome.piece.output_ids)) == kept
    assert bool(outcome.problem) is (fault is not None)
    if fault is not None and outcome.piece is not None:
        assert outcome.piece.finish_reason == ABORTED
        assert outcome.piece.weight_version == Version(1, 3)


async def test_what_arrived_before_the_deadline_is_kept(streaming: EngineClient, staged: StagedServer):
    async def slow(http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        await answer.write(sse(middle(2))[0])
        await asyncio.Event().wait()
        raise AssertionError

    staged.handler = slow
    outcome = await attempt(streaming, staged, deadline_s=5.0)
    assert outcome.fault is Fault.SLOW
    assert outcome.piece is not None
    assert len(outcome.piece.output_ids) == 2
    assert staged.aborted == ["r-1."]


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (400, Fault.REJECTED),
        (422, Fault.REJECTED),
        (401, Fault.REFUSED),
        (403, Fault.REFUSED),
        (404, Fault.REFUSED),
        (429, Fault.AWAY),
        (502, Fault.AWAY),
        (503, Fault.AWAY),
        (499, Fault.ENDED),
        (500, Fault.BROKEN),
    ],
)
async def test_a_status_tells_whose_fault_it_is(streaming: EngineClient, staged: StagedServer, status: int, fault: Fault):
    staged.status = status
    assert (await attempt(streaming, staged)).fault is fault


async def test_a_salt_of_ones_own_takes_the_place_of_the_version(streaming: EngineClient, staged: StagedServer):
    await attempt(streaming, staged, assumed=Version(1, 3), salt="mine")
    assert staged.bodies[0]["extra_key"] == "mine"


class Dropping:
    """A server that closes connections: those in `drops`, by number, once so many requests have come over them."""

    def __init__(self, drops: dict[int, int]) -> None:
        self.drops = drops
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        mine, requests = self.connections, 0
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                requests += 1
                if requests == self.drops.get(mine):
                    break
                body = json.dumps(good()).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    ("drops", "requests", "faults", "connections"),
    [
        ({1: 2}, 2, [None, None], 2),  # an idle connection that the server had closed: asked again at once, over another
        ({1: 1}, 2, [Fault.AWAY, None], 2),  # a fresh one that it closes says that something is wrong
        ({1: 2, 2: 1}, 2, [None, Fault.AWAY], 2),  # and so does a second one
    ],
)
async def test_a_connection_that_was_closed_while_it_was_idle_is_no_failure(drops: dict[int, int], requests: int, faults: list[Fault | None], connections: int):
    server = Dropping(drops)
    async with open_session() as session, await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        client = EngineClient(session)
        seen = [(await client.attempt(url, [1], sampling=SAMPLING, rid=f"r{n}", deadline_s=60.0)).fault for n in range(requests)]
    assert seen == faults
    assert server.connections == connections


async def test_a_stream_of_the_embedded_engine_is_what_it_answers_whole(client: EngineClient, streaming: EngineClient, engine: EmbeddedEngine):
    greedy = Sampling(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    whole, streamed = [await one.generate(engine.url, [1, 4, 5], sampling=greedy, rid=f"s{i}", deadline_s=60) for i, one in enumerate((client, streaming))]
    assert streamed.output_ids.tolist() == whole.output_ids.tolist()
    assert streamed.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
    assert (streamed.spans, streamed.finish_reason, streamed.text) == (whole.spans, whole.finish_reason, whole.text)
    with pytest.raises(SampleFailed, match=r"answered 400: .*maximum context length of 512"):
        await streaming.generate(engine.url, [1], sampling=Sampling(max_new_tokens=600), rid="long", deadline_s=60)
