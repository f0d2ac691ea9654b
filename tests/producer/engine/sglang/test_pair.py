"""Two halves as one engine. In their place are servers that say what a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from producer.engine.sglang import pair
from producer.engine.sglang.pair import Pair
from producer.engine.sglang.ports import held_port

HERE = "127.0.0.1"
READ = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}}
WRITTEN = {"output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "length"}}}
GIVEN_UP = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}
ASKED = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
NEW = {"model_path": "/b", "weight_version": "1:1"}


class Half:
    """One server. `says` holds, by path, what is answered: a body, a status, or something to wait for first."""

    def __init__(self) -> None:
        self.version, self.url = "1:0", ""
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.left: list[str] = []
        """What its asker did not wait for."""
        self.news = asyncio.Event()
        self.then: Any = {}
        """What is said after something was waited for; bytes: a stream."""
        self.says: dict[str, Any] = {"/server_info": {"disable_radix_cache": True, "tp_size": 1}, "/weights_checker": {"success": True, "ranks": [{"a": 1}]}}

    async def answer(self, http: web.Request) -> web.Response:
        raw = await http.read()
        self.heard.append((http.path_qs, orjson.loads(raw) if raw else {}))
        self.news.set()
        said = self.says.get(http.path, {"success": True})
        if isinstance(said, asyncio.Event):
            try:
                await said.wait()
            except asyncio.CancelledError:
                self.left.append(http.path)
                self.news.set()
                raise
            said = self.then
        if isinstance(said, bytes):
            return web.Response(body=said, content_type="text/event-stream")
        if http.path == "/model_info":
            said = {"weight_version": self.version, "model_path": "/a"}
        if http.path == "/update_weights_from_disk" and said == {"success": True}:
            self.version = self.heard[-1][1]["weight_version"]
        return web.json_response(said if isinstance(said, dict) else {}, status=said if isinstance(said, int) else 200)

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not found():
                self.news.clear()
                await self.news.wait()

    def asked(self, path: str) -> list[dict[str, Any]]:
        return [body for heard, body in self.heard if heard == path]


class Two:
    def __init__(self, session: aiohttp.ClientSession, url: str, reads: Half, writes: Half) -> None:
        self._session, self._url, self.reads, self.writes = session, url, reads, writes

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        async with self._session.request("GET" if body is None else "POST", self._url + path, json=body, headers={"Authorization": "Bearer k"}) as answer:
            raw = await answer.read()
            return answer.status, orjson.loads(raw) if answer.content_type == "application/json" else {"stream": raw}

    async def update(self, **more: Any) -> tuple[int, dict[str, Any]]:
        await self.ask("/pause_generation", {"mode": "abort"})
        try:
            return await self.ask("/update_weights_from_disk", NEW | more)
        finally:
            await self.ask("/continue_generation", {})

    async def version(self) -> Any:
        return (await self.ask("/model_info"))[1]["weight_version"]


@contextlib.asynccontextmanager
async def half() -> AsyncIterator[Half]:
    one = Half()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", one.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, HERE, 0).start()
    one.url = f"http://{HERE}:{runner.addresses[0][1]}"
    try:
        yield one
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def two() -> AsyncIterator[Two]:
    async with half() as reads, half() as writes, aiohttp.ClientSession() as inner, aiohttp.ClientSession() as session:
        with held_port(HERE, key="k") as port:
            async with Pair(inner, prefill=reads.url, decode=writes.url, bootstrap=("10.0.0.1", 77), most=2).serve(HERE, port):
                reads.says["/generate"], writes.says["/generate"] = READ, WRITTEN
                yield Two(session, f"http://{HERE}:{port}", reads, writes)


async def test_both_halves_are_asked_in_one_room_and_the_one_that_writes_answers(two: Two):
    answers = [await two.ask("/generate", ASKED | {"stream": True}) for _ in range(2)]
    assert answers == [(200, WRITTEN)] * 2
    read, written = two.reads.asked("/generate"), two.writes.asked("/generate")
    assert [one | {"stream": True} for one in read] == written, "the half that reads is asked for a whole answer"
    assert not any(one["stream"] for one in read)
    assert {(one["bootstrap_host"], one["bootstrap_port"]) for one in read} == {("10.0.0.1", 77)}
    assert len({one["bootstrap_room"] for one in read}) == 2


@pytest.mark.parametrize(
    ("says", "status"),
    [(GIVEN_UP, 499), (503, 503)],
    ids=["aborted", "full"],
)
async def test_a_request_that_one_half_gives_up_is_let_go_of_by_the_other(two: Two, monkeypatch: pytest.MonkeyPatch, says: Any, status: int):
    monkeypatch.setattr(pair, "_LAST_WORD_S", 0.01)
    two.reads.says["/generate"], two.writes.says["/generate"] = says, asyncio.Event()
    assert (await two.ask("/generate", ASKED))[0] == status
    await two.writes.until(lambda: two.writes.left == ["/generate"])


async def test_what_the_half_that_writes_has_outranks_that_the_other_gave_up(two: Two):
    two.reads.says["/generate"] = GIVEN_UP
    partial = WRITTEN | {"meta_info": {"finish_reason": {"type": "abort"}}}
    two.writes.says["/generate"] = partial
    assert await two.ask("/generate", ASKED) == (200, partial)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pause_generation", {"mode": "abort"}, 499),
        ("/abort_request", {"rid": "on"}, 499),
        ("/abort_request", {"rid": "", "abort_all": True}, 499),
        ("/abort_request", {"rid": "two"}, 500),
        ("/abort_request", {"rid": ""}, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_was_aborted_before_it_wrote_is_no_fault_of_the_engine(two: Two, path: str, body: dict[str, Any], status: int, stream: bool):
    """SGLang calls it one: 500, or a stream of one event that says so."""
    two.writes.says["/generate"] = asyncio.Event()
    asking = asyncio.create_task(two.ask("/generate", ASKED | {"rid": "one.", "stream": stream}))
    await two.writes.until(lambda: bool(two.writes.asked("/generate")))
    await two.ask(path, body)
    waiting, two.writes.then = two.writes.says["/generate"], b'data: {"meta_info": {"finish_reason": {"status_code": 500}}}\n\n' if stream else 500
    waiting.set()
    assert (await asking)[0] == (status if status == 499 or not stream else 200)


async def test_who_asks_and_goes_away_is_let_go_of_by_both(two: Two):
    two.reads.says["/generate"] = two.writes.says["/generate"] = asyncio.Event()
    asking = asyncio.create_task(two.ask("/generate", ASKED))
    for one in (two.reads, two.writes):
        await one.until(lambda one=one: bool(one.asked("/generate")))  # type: ignore[misc]
    asking.cancel()
    for one in (two.reads, two.writes):
        await one.until(lambda one=one: one.left == ["/generate"])  # type: ignore[misc]


async def test_a_version_counts_once_both_serve_it(two: Two):
    assert await two.version() == "1:0"
    assert (await two.update())[0] == 200
    assert await two.version() == "1:1"
    assert [one.version for one in (two.reads, two.writes)] == ["1:1", "1:1"]


@pytest.mark.parametrize("which", ["reads", "writes"])
async def test_after_an_update_that_one_half_refused_nothing_is_written_until_both_took_one(two: Two, which: str):
    assert await two.version() == "1:0"
    broken: Half = getattr(two, which)
    broken.says["/update_weights_from_disk"] = {"success": False, "message": "no such file"}
    two.writes.says["/generate"] = asyncio.Event()
    under_way = asyncio.create_task(two.ask("/generate", ASKED))
    await two.writes.until(lambda: bool(two.writes.asked("/generate")))
    assert (await two.update())[1]["message"] == "no such file"
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await under_way
    assert await two.version() == "1:0", "no version but the last that both served"
    status, body = await two.ask("/generate", ASKED)
    assert (status, body["message"]) == (503, pair._TORN)
    assert (await two.ask("/ready"))[0] == 503
    del broken.says["/update_weights_from_disk"]
    assert (await two.update(weight_version="1:2"))[0] == 200
    two.writes.says["/generate"] = WRITTEN
    assert await two.version() == "1:2"
    assert await two.ask("/generate", ASKED) == (200, WRITTEN)


async def test_a_version_that_both_refuse_changes_nothing(two: Two):
    assert await two.version() == "1:0"
    for one in (two.reads, two.writes):
        one.says["/update_weights_from_disk"] = {"success": False, "message": "no such file"}
    assert (await two.update())[1]["message"] == "no such file"
    assert await two.version() == "1:0"
    assert await two.ask("/generate", ASKED) == (200, WRITTEN)


async def test_a_half_that_got_other_weights_from_somebody_else_is_seen(two: Two):
    two.reads.version = "9:9"
    assert await two.version() == "9:9 and 1:0"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_only_what_leaves_nothing_between_the_halves_is_a_pause(two: Two, mode: str):
    assert (await two.ask("/pause_generation", {"mode": mode}))[0] == 400
    assert (await two.ask("/update_weights_from_disk", NEW))[0] == 400
    assert two.reads.heard == two.writes.heard == []


async def test_control_calls_go_to_both_with_their_keys_and_a_refusal_of_either_is_the_answer(two: Two):
    for path in ("/abort_request", "/flush_cache?timeout=2", "/end_weight_update"):
        await two.ask(path, {"rid": "x"})
        assert two.reads.heard[-1] == two.writes.heard[-1] == (path, {"rid": "x"})
    two.reads.says["/flush_cache"] = 400
    assert (await two.ask("/flush_cache", {}))[0] == 400
    assert (await two.ask("/weights_checker", {"action": "checksum"}))[1]["ranks"] == [{"a": 1}, {"a": 1}]
    for one, mode in ((two.reads, "prefill"), (two.writes, "decode")):
        one.says["/server_info"] |= {"disaggregation_mode": mode}
    assert (await two.ask("/server_info"))[1] == {"disable_radix_cache": True, "tp_size": 1, "disaggregation_mode": "null", "halves": True}
    two.reads.says["/server_info"]["disable_radix_cache"] = False
    assert (await two.ask("/server_info"))[1]["disable_radix_cache"] is False, "prompts are kept by the half that reads"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (ASKED | {"return_logprob": True, "logprob_start_len": 0}, "logprobs of a prompt"),
        (ASKED | {"sampling_params": {"n": 2}}, "one sample"),
        ({"input_ids": [[1], [2]]}, "one prompt"),
        ({"text": ["one", "two"]}, "one prompt"),
    ],
)
async def test_what_two_halves_cannot_answer_is_refused(two: Two, body: dict[str, Any], why: str):
    status, said = await two.ask("/generate", body)
    assert status == 400
    assert why in said["message"]


async def test_more_than_have_room_are_refused(two: Two):
    two.writes.says["/generate"] = asyncio.Event()
    waiting = [asyncio.create_task(two.ask("/generate", ASKED)) for _ in range(2)]
    await two.writes.until(lambda: len(two.writes.asked("/generate")) == 2)
    assert (await two.ask("/generate", ASKED))[0] == 503
    two.writes.says["/generate"].set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
