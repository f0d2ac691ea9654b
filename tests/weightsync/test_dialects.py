"""SGLang's pitfalls: each bites the recorded server when it is asked carelessly, and none does when we ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protocol.errors import ApplyFailed, EngineUnavailable
from protocol.messages import EngineState
from protocol.versions import Version
from tests.weightsync.recorded_sglang import FLUSH_REFUSED, RecordedSGLang
from weightsync.buckets import Bucket
from weightsync.control import EngineControl
from weightsync.dialect import Dialect, dialect, ended_by_updates

OLD, NEW = "0.5.17", "0.5.23"
BUCKET = Bucket(names=("w",), dtypes=("float32",), shapes=((2,),), offsets=(0,), nbytes=8, digest="d")


@contextlib.asynccontextmanager
async def engine(rig: Any, release: str, *, mode: str = "in_place", **traits: Any) -> AsyncIterator[RecordedSGLang]:
    """A recorded server that serves 1:1, with its reconciler."""
    async with RecordedSGLang("b1", release, **traits).serving() as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        await rig.publish(1, 1)
        async with rig.running(rig.reconciler("e0", server, pause_mode=mode, apply_deadline_s=60.0)):
            await rig.serves("e0", "1:1")
            yield server


@contextlib.asynccontextmanager
async def asked(rig: Any, server: RecordedSGLang, rid: str = "long", salt: str = "1:1", tokens: int = 3) -> AsyncIterator[asyncio.Task[Any]]:
    """A long request that runs and has so many tokens."""

    async def ask() -> Any:
        body = {"rid": rid, "input_ids": [1, 2, 3, 4], "extra_key": salt, "sampling_params": {"max_new_tokens": 100}}
        async with rig.session.post(server.url + "/generate", json=body) as answer:
            return await answer.json()

    task = asyncio.create_task(ask())
    while rid not in server.running:
        await asyncio.sleep(0)
    server.decode(tokens)
    try:
        yield task
    finally:
        server.finish()
        await task


async def post(rig: Any, server: RecordedSGLang, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with rig.session.post(server.url + path, json=body) as answer:
        return answer.status, await answer.json(content_type=None)


# -- the server bites ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_the_default_flush_ends_an_old_server(rig: Any, mode: str):
    async with RecordedSGLang("b1", OLD).serving() as server:
        async with rig.session.get(server.url + "/model_info"):
            pass
        task = asyncio.create_task(post(rig, server, "/generate", {"rid": "r", "input_ids": [1], "sampling_params": {"max_new_tokens": 99}}))
        while not server.running:
            await asyncio.sleep(0)
        await post(rig, server, "/pause_generation", {"mode": mode})
        with pytest.raises(Exception, match="disconnected"):
            await post(rig, server, "/update_weights_from_disk", {"model_path": "/m", "weight_version": "v1"})
        assert "Cache flush failed" in server.dead
        await asyncio.gather(task, return_exceptions=True)


async def test_the_default_flush_updates_a_new_server_by_halves(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server):
        await post(rig, server, "/pause_generation", {"mode": "in_place"})
        status, answer = await post(rig, server, "/update_weights_from_disk", {"model_path": "/m", "weight_version": "v1"})
        assert (status, answer["message"]) == (400, FLUSH_REFUSED)
        assert (server.version, server.tokenizer_version) == ("v1", "boot:b1")


async def test_renaming_ends_requests_by_default(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server) as task:
        await post(rig, server, "/update_weight_version", {"new_version": "v1"})
        assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_an_update_without_a_pause_waits_for_every_request(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server):
        update = asyncio.create_task(post(rig, server, "/update_weights_from_disk", {"model_path": "/m", "weight_version": "v1"}))
        while "/update_weights_from_disk" not in server.paths:
            await asyncio.sleep(0)
        assert not update.done()
        server.finish()
        assert (await update)[0] == 200


async def test_retracted_requests_of_an_old_server_rest_on_old_keys(rig: Any):
    async with RecordedSGLang("b1", OLD).serving() as server, asked(rig, server):
        await post(rig, server, "/pause_generation", {"mode": "retract"})
        await post(rig, server, "/update_weights_from_disk", {"model_path": "/m", "weight_version": "v1", "flush_cache": False})
        await post(rig, server, "/continue_generation", {})
        assert server.stale == ["long"]


# -- and does not bite us --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no radix"])
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("release", [OLD, NEW])
async def test_an_update_in_any_mode_leaves_the_server_alive_and_no_request_on_older_keys(rig: Any, release: str, mode: str, radix: bool):
    async with engine(rig, release, mode=mode, radix=radix) as server, asked(rig, server) as task:
        await rig.publish(1, 2)
        await rig.serves("e0", "1:2")
        server.decode(4)
        server.finish()
        answer = (await task)["meta_info"]
        async with asked(rig, server, "late", salt="1:2"):
            pass
    assert server.dead == ""
    assert server.stale == []
    assert server.version == server.tokenizer_version == "1:2"
    used = [body["mode"] for path, body in server.calls if path == "/pause_generation"]
    expected = "abort" if release == OLD and radix else mode
    assert set(used) == {expected}
    assert answer["finish_reason"]["type"] == ("abort" if expected == "abort" else "length")
    assert answer["num_retractions"] == (expected == "retract")
    assert not any(path in ("/health", "/health_generate") for path in server.paths)
    [*_, applied] = await rig.events("applied")
    assert (applied["pause_mode"], applied["transport"]) == (expected, "store")


async def test_a_request_that_waited_out_the_pause_meets_no_older_keys_where_it_could_not_be_told(rig: Any):
    """It carries the salt of the version before, and an old server does not say when it began: so the cache is emptied while nothing runs."""
    async with engine(rig, OLD) as server, asked(rig, server, "first"):
        server.finish()
        gate, loaded = asyncio.Event(), server._loaded

        async def waits() -> Any:
            return await post(
                rig, server, "/generate", {"rid": "second", "input_ids": [1, 2, 3, 4], "extra_key": "1:1", "sampling_params": {"max_new_tokens": 1}}
            )

        def load(body: dict[str, Any], message: str) -> Any:
            gate.set()
            return loaded(body, message)

        server._loaded = load  # type: ignore[method-assign]
        await rig.publish(1, 2)
        await gate.wait()
        status, answer = await waits()
        assert (status, answer["meta_info"]["weight_version"]) == (200, "1:2")
        assert server.stale == []


async def test_the_cache_is_emptied_also_when_something_alive_is_in_the_way(rig: Any):
    async with rig.engine("e0", about={"version": OLD}) as server:
        await rig.publish(1, 1)
        await rig.serves("e0", "1:1")
        server.flushes.append(False)
        server.calls.clear()
        await rig.publish(1, 2)
        await rig.serves("e0", "1:2")
        order = [call for call in server.calls if call in ("flush_cache", "abort_request", "continue_generation", "update_weights_from_disk")]
        assert order == ["update_weights_from_disk", "flush_cache", "abort_request", "flush_cache", "continue_generation"]


async def test_an_engine_that_keeps_its_old_keys_is_unfit(rig: Any):
    async with rig.engine("e0", about={"version": OLD}) as server:
        await rig.publish(1, 1)
        await rig.serves("e0", "1:1")
        server.flushes.extend([False, False])
        await rig.publish(1, 2)
        await rig.serves("e0", "1:2")
    assert ["old weights" in event["reason"] for event in await rig.events("unfit")] == [True]


@pytest.mark.parametrize(("release", "has"), [(OLD, False), (NEW, True)])
async def test_sessions_are_found_out_by_asking(rig: Any, release: str, has: bool):
    async with RecordedSGLang("b1", release).serving() as server:
        control = EngineControl(rig.session, server.url)
        assert await control.begin_session() is has
        assert (await control.dialect()).sessions is has
        await control.update_from_distributed(BUCKET, group="g", version="1:2", deadline_s=60)
        await control.end_session()
        assert server.session is False
        assert server.version == "1:2"


async def test_a_session_that_somebody_left_open_is_no_obstacle_and_no_session_is_a_refusal(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server:
        control = EngineControl(rig.session, server.url)
        with pytest.raises(ApplyFailed, match="must run between"):
            await control.update_from_distributed(BUCKET, group="g", version=None, deadline_s=60)
        server.session = True
        assert await control.begin_session() is True
        await control.end_session()
        with pytest.raises(ApplyFailed, match="No weight update session"):
            await control.end_session()
        await control.close_session()


async def test_a_take_over_closes_the_session_ends_what_runs_and_lets_a_paused_engine_go_on(rig: Any):
    """Also with no version there to apply: nobody's pause outlives its owner."""
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server) as task:
        server.session = True
        await EngineControl(rig.session, server.url).pause("in_place")
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        async with rig.running(rig.reconciler("e0", server)):
            assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
            async with asyncio.timeout(100):
                while server.paused:
                    await asyncio.sleep(0)
        assert server.session is False


async def test_a_take_over_of_an_engine_that_decodes_ends_no_request(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server) as task:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        async with rig.running(rig.reconciler("e0", server)):
            await rig.publish(1, 1)
            await rig.serves("e0", "1:1")
        assert not task.done()


async def test_an_answer_to_a_distributed_update_proves_nothing_and_a_token_does(rig: Any):
    """The call answers 200, `/model_info` goes on answering, and nothing is ever decoded again."""
    async with RecordedSGLang("b1", NEW).serving() as server:
        control = EngineControl(rig.session, server.url)
        server.bytes_come = False
        await control.begin_session()
        await control.update_from_distributed(BUCKET, group="g", version="1:2", deadline_s=60)
        await control.end_session()
        assert await control.weight_version() == "1:2"
        with pytest.raises(EngineUnavailable, match="no answer within"):
            await control.probe(deadline_s=0.1)


async def test_an_engine_that_took_an_update_and_hangs_is_unfit_and_said_to_be_silent(rig: Any):
    await rig.publish(1, 1)
    async with rig.server("b1") as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server, hasty=True)
        async with rig.running(reconciler):
            await rig.serves("e0", "1:1")
            server.stage.extend(["silent", "silent"])
            await rig.publish(1, 2)
            await rig.until(lambda all_: all_["e0"].state is EngineState.UNFIT and reconciler.totals.silent > 0)
            assert not server.paused
            await rig.serves("e0", "1:2")
            assert reconciler.totals.silent == 0


async def test_data_parallel_replicas_are_refused_before_they_end_the_server(rig: Any):
    async with RecordedSGLang("b1", NEW, dp_size=2).serving() as server:
        control = EngineControl(rig.session, server.url)
        with pytest.raises(ApplyFailed, match="dp_size 2"):
            await control.init_group(master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo", deadline_s=60)
        await control.begin_session()
        with pytest.raises(EngineUnavailable):
            await control.update_from_distributed(BUCKET, group="g", version="1:2", deadline_s=60)
        assert "dp_size" in server.dead


async def test_pipeline_stages_are_refused_before_the_engine_waits_for_a_group_that_cannot_form(rig: Any):
    async with RecordedSGLang("b1", NEW, pp_size=2).serving() as server:
        with pytest.raises(ApplyFailed, match="pp_size 2"):
            await EngineControl(rig.session, server.url).init_group(
                master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, group_name="g", backend="gloo", deadline_s=5
            )
        assert "/init_weights_update_group" not in server.paths


@pytest.mark.parametrize(("release", "ready"), [(OLD, False), (NEW, True)])
async def test_a_pause_is_seen_without_waiting_and_old_servers_are_not_believed_ready(rig: Any, release: str, ready: bool):
    async with RecordedSGLang("b1", release).serving() as server:
        control = EngineControl(rig.session, server.url)
        assert await control.ready() is ready
        await control.pause("in_place")
        assert await control.ready() is False
        assert await control.flush_cache() is True


async def test_a_busy_server_refuses_to_flush(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server, asked(rig, server):
        assert await EngineControl(rig.session, server.url).flush_cache() is False


async def test_a_server_with_two_keys_gets_each_where_it_takes_it(rig: Any):
    async with RecordedSGLang("b1", NEW, keys=("user", "admin")).serving() as server:
        control = EngineControl(rig.session, server.url, api_key="user", admin_key="admin")
        await control.begin_session()
        await control.end_session()
        await control.update_from_disk("/m", "1:2", deadline_s=60)
        assert set(await control.probe(deadline_s=60)) == {"1:2"}
        assert (await control.server_info())["version"] == NEW
        with pytest.raises(ApplyFailed, match="401"):
            await EngineControl(rig.session, server.url, api_key="user").pause("in_place")
        with pytest.raises(ApplyFailed, match="401"):
            await EngineControl(rig.session, server.url, api_key="admin").model_info()


# -- what each can do ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "sessions", "spans", "prefix_cache", "overlap"),
    [
        ({"version": "0.5.17"}, False, False, True, True),
        ({"version": "0.5.18"}, False, False, True, True),
        ({"version": "0.5.19"}, False, True, True, True),
        ({"version": "0.5.20.post1"}, False, True, True, True),
        ({"version": "0.5.21"}, True, True, True, True),
        ({"version": "0.6.0rc1"}, True, True, True, True),
        ({"version": "0.5.23", "disable_radix_cache": True, "disable_overlap_schedule": True}, True, True, False, False),
        ({"version": "main"}, False, False, True, True),
        ({}, False, False, True, True),
        ({"version": "embedded"}, False, True, False, False),
    ],
)
def test_what_a_server_says_of_itself(about: dict[str, Any], sessions: bool, spans: bool, prefix_cache: bool, overlap: bool):
    assert dialect(about) == Dialect(version=about.get("version", ""), sessions=sessions, spans=spans, prefix_cache=prefix_cache, overlap=overlap)


def test_what_a_server_shows_outranks_what_it_says():
    shown = dialect({"version": "0.5.17"}, sessions=True, spans=True)
    assert (shown.sessions, shown.spans) == (True, True)


@pytest.mark.parametrize(
    ("about", "mode", "safe", "lag"),
    [
        ({"version": "0.5.17"}, "in_place", "abort", 0),
        ({"version": "0.5.17"}, "retract", "abort", 0),
        ({"version": "0.5.17", "disable_radix_cache": True}, "retract", "retract", 0),
        ({"version": "0.5.17", "disable_radix_cache": True}, "in_place", "in_place", 0),
        ({"version": "0.5.19"}, "retract", "abort", 0),
        ({"version": "0.5.19"}, "in_place", "in_place", 1),
        ({"version": "0.5.23"}, "in_place", "in_place", 1),
        ({"version": "0.5.23"}, "retract", "retract", 0),
        ({"version": "0.5.23"}, "abort", "abort", 0),
        ({"version": "0.5.23", "disable_overlap_schedule": True}, "in_place", "in_place", 0),
        ({"version": "embedded"}, "in_place", "in_place", 0),
    ],
)
def test_pauses_that_are_safe_and_tokens_that_lag(about: dict[str, Any], mode: Any, safe: str, lag: int):
    known = dialect(about)
    assert (known.pause_mode(mode), known.span_lag(mode)) == (safe, lag)


async def test_the_reconciler_tells_how_far_spans_lag(rig: Any):
    async with RecordedSGLang("b1", NEW).serving() as server:
        await rig.registry.beat(rig.status("e0", "b1", server.url), ttl_s=600)
        reconciler = rig.reconciler("e0", server)
        assert reconciler.span_lag == 0
        async with rig.running(reconciler):
            await rig.publish(1, 1)
            assert (await rig.serves("e0", "1:1")).version == Version(1, 1)
            assert reconciler.span_lag == 1


@pytest.mark.parametrize(("name", "value"), [("speculative_algorithm", "NGRAM"), ("load_format", "flash_rl")])
def test_a_server_that_an_update_would_end_is_known_before_the_first(name: str, value: str):
    why = ended_by_updates({"version": OLD, name: value})
    assert why is not None
    assert value in why
    assert ended_by_updates({"version": NEW, name: value}) is None
    assert ended_by_updates({"version": OLD, "speculative_algorithm": None, "load_format": "auto"}) is None
