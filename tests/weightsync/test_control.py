from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable
from weightsync.buckets import Bucket
from weightsync.control import EngineControl

Handler = Callable[[web.Request], Awaitable[web.Response]]


async def test_an_update_asks_for_no_flush_and_no_abort(rig: Any, tmp_path: Path):
    await rig.publish(1, 1)
    manifest = await rig.channel.newest()
    async with rig.server("b1") as server:
        control = EngineControl(rig.session, server.url)
        assert await control.weight_version() == "boot:b1"
        await control.update_from_disk(manifest.location, "1:1", deadline_s=60)
        assert server.bodies[-1] == {
            "model_path": manifest.location,
            "load_format": "auto",
            "weight_version": "1:1",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        assert await control.weight_version() == "1:1"
        assert await control.probe(deadline_s=60) == ("1:1", "1:1")


@pytest.mark.parametrize(("stage", "words"), [("refuse", "no such weights"), ("refuse_softly", "not now"), ("half", "partially updated")])
async def test_a_refusal_carries_the_engines_words(rig: Any, stage: str, words: str):
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        server.stage.append(stage)
        with pytest.raises(ApplyFailed, match=words):
            await EngineControl(rig.session, server.url).update_from_disk((await rig.channel.newest()).location, "1:1", deadline_s=60)


async def test_a_paused_engine_answers_no_probe_in_time(rig: Any):
    async with rig.server("b1") as server:
        control = EngineControl(rig.session, server.url)
        await control.pause("in_place")
        with pytest.raises(EngineUnavailable, match="no answer within"):
            await control.probe(deadline_s=0.05)
        await control.resume()
        await control.resume()
        assert set(await control.probe(deadline_s=60)) == {"boot:b1"}


@pytest.mark.parametrize(("halves", "tokens"), [(True, 2), (False, 1)])
async def test_a_probe_of_two_halves_has_a_token_of_each(rig: Any, halves: bool, tokens: int):
    most = 2

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/server_info":
            return web.json_response({"halves": halves})
        asked = (await request.json())["sampling_params"]["max_new_tokens"]
        return web.json_response({"output_ids": [5] * min(asked, most), "meta_info": {"weight_version": f"asked for {asked}"}})

    runner, url = await _answers(handler)
    try:
        control = EngineControl(rig.session, url)
        await control.dialect()
        assert await control.probe(deadline_s=5) == (f"asked for {tokens}",)
        most = tokens - 1
        with pytest.raises(ApplyFailed, match=r"a probe for .* came back without it"):
            await control.probe(deadline_s=5)
    finally:
        await runner.cleanup()


async def test_an_engine_that_is_gone_is_unavailable(rig: Any):
    async with rig.server("b1") as server:
        control = EngineControl(rig.session, server.url)
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await control.resume(deadline_s=60)
    with pytest.raises(EngineUnavailable, match="no time left"):
        await control.resume(deadline_s=0)


async def test_silence_is_of_calls_that_were_made_and_ends_with_any_answer(rig: Any):
    async with rig.server("b1") as server:
        control = EngineControl(rig.session, server.url)
        with pytest.raises(EngineUnavailable):
            await control.resume(deadline_s=0)
        assert not control.silent_since(0), "it was not asked"
        await control.pause("in_place")
        assert not control.silent_since(0)
        with pytest.raises(EngineUnavailable):
            await control.probe(deadline_s=0.05)
        assert control.silent_since(0)
        assert not control.silent_since(control.calls), "not since then"
        waiting = asyncio.create_task(control.probe(deadline_s=60))
        asked = control.calls
        while control.calls == asked:
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert control.silent_since(control.calls - 1), "who gives up heard nothing"
        server.stage.append("refuse")
        with pytest.raises(ApplyFailed):
            await control.update_from_disk("/nowhere", "1:1", deadline_s=60)
        assert not control.silent_since(0), "a refusal is an answer"
        await control.resume()


async def test_engines_without_sessions_are_understood(rig: Any):
    async with rig.server("b1", {"version": "0.5.17"}) as server:
        control = EngineControl(rig.session, server.url)
        await control.close_session()
        assert await control.begin_session() is False
        await control.end_session()


async def _answers(handler: Handler) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_a_kept_connection_that_the_engine_closed_is_opened_again(rig: Any):
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 2:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({})

    runner, url = await _answers(handler)
    try:
        control = EngineControl(rig.session, url)
        await control.resume()
        await control.resume()
        assert calls == 3
    finally:
        await runner.cleanup()


async def test_old_engines_without_spans_are_believed_by_their_final_version(rig: Any):
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({"output_ids": [4], "meta_info": {"weight_version": "1:3"}})

    runner, url = await _answers(handler)
    try:
        assert await EngineControl(rig.session, url).probe(deadline_s=60) == ("1:3",)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("answer", [b"[]", b'{"output_ids": []}', b'{"output_ids": [1]}', b"not json", b""])
async def test_an_answer_that_is_no_token_is_no_proof(rig: Any, answer: bytes):
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    runner, url = await _answers(handler)
    try:
        with pytest.raises((ApplyFailed, DecodeError)):
            await EngineControl(rig.session, url).probe(deadline_s=60)
    finally:
        await runner.cleanup()


async def test_the_key_goes_with_every_call(rig: Any):
    seen: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"success": True})

    runner, url = await _answers(handler)
    try:
        control = EngineControl(rig.session, url + "/", api_key="secret")
        async with asyncio.TaskGroup() as group:
            group.create_task(control.pause("abort"))
            group.create_task(control.abort_all())
            group.create_task(control.update_from_disk("/x", "1:1", deadline_s=60))
            group.create_task(control.model_info())
        assert seen == ["Bearer secret"] * 4
    finally:
        await runner.cleanup()


BUCKET = Bucket(names=("a", "b"), dtypes=("float32", "bfloat16"), shapes=((2, 2), (3,)), offsets=(0, 16), nbytes=22, digest="d1")
GROUP = {"master_address": "127.0.0.1", "master_port": 7, "rank_offset": 1, "world_size": 3, "group_name": "g", "backend": "nccl"}


@pytest.mark.parametrize(
    ("call", "path", "body"),
    [
        (lambda c: c.init_group(**GROUP, deadline_s=60), "/init_weights_update_group", GROUP),
        (lambda c: c.destroy_group("g"), "/destroy_weights_update_group", {"group_name": "g"}),
        (
            lambda c: c.update_from_distributed(BUCKET, group="g", version=None, deadline_s=60),
            "/update_weights_from_distributed",
            {
                "names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 2], [3]], "group_name": "g", "flush_cache": False,
                "abort_all_requests": False, "weight_version": None, "load_format": "flattened_bucket",
            },
        ),
        (
            lambda c: c.update_from_tensor(["p0", "p1"], load_format=None, version="1:2", deadline_s=60),
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["p0", "p1"], "load_format": None, "flush_cache": False, "abort_all_requests": False, "weight_version": "1:2"},
        ),
        (lambda c: c.weights_checksum(deadline_s=60), "/weights_checker", {"action": "checksum"}),
        (lambda c: c.pause("retract"), "/pause_generation", {"mode": "retract"}),
        (lambda c: c.abort_all(), "/abort_request", {"rid": "", "abort_all": True}),
        (lambda c: c.rename("away:1"), "/update_weight_version", {"new_version": "away:1", "abort_all_requests": False}),
        (lambda c: c.release_memory(), "/release_memory_occupation", {}),
        (lambda c: c.resume_memory(), "/resume_memory_occupation", {}),
    ],
)  # fmt: skip
async def test_every_call_says_what_servers_would_otherwise_assume(rig: Any, call: Any, path: str, body: dict[str, Any]):
    seen: list[tuple[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        if request.path != "/server_info":
            seen.append((request.path, await request.json()))
        return web.json_response({"success": True})

    runner, url = await _answers(handler)
    try:
        await call(EngineControl(rig.session, url))
        assert seen == [(path, body)]
    finally:
        await runner.cleanup()


async def test_a_call_that_waits_for_bytes_of_its_own_is_never_sent_twice(rig: Any):
    """A closed connection leaves it open whether the engine took the call: a second one would wait for a broadcast that nobody sends, or end the server."""
    calls: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(request.path)
        if request.path != "/server_info":
            assert request.transport is not None
            request.transport.close()
        return web.json_response({})

    runner, url = await _answers(handler)
    try:
        control = EngineControl(rig.session, url)
        once = [
            lambda: control.update_from_distributed(BUCKET, group="g", version=None, deadline_s=60),
            lambda: control.update_from_tensor(["p"], load_format=None, version=None, deadline_s=60),
            lambda: control.init_group(**GROUP, deadline_s=60),
            lambda: control.release_memory(deadline_s=60),
            lambda: control.resume_memory(deadline_s=60),
        ]
        for call in once:
            with pytest.raises(EngineUnavailable, match="closed the connection"):
                await call()
        assert [path for path in calls if path != "/server_info"] == [
            "/update_weights_from_distributed",
            "/update_weights_from_tensor",
            "/init_weights_update_group",
            "/release_memory_occupation",
            "/resume_memory_occupation",
        ]
    finally:
        await runner.cleanup()


async def test_what_an_engine_does_not_tell_is_taken_for_dangerous_and_asked_once(rig: Any):
    calls: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(request.path)
        return web.json_response({"detail": "Not Found"}, status=404)

    runner, url = await _answers(handler)
    try:
        control = EngineControl(rig.session, url)
        known = await control.dialect()
        assert (known.sessions, known.spans, known.prefix_cache, known.overlap) == (False, False, True, True)
        assert await control.dialect() == known
        assert calls == ["/server_info", "/get_server_info"]
    finally:
        await runner.cleanup()
