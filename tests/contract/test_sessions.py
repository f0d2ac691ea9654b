"""Names of weights, and sessions around updates: who may open, close, and send into them."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.errors import ApplyFailed
from weightsync.dialect import EMBEDDED

from .engine import SOON, Engine, asking
from .spans import split

DONE = {"success": True, "message": "Success"}
NONE = {"success": False, "message": "no weight-update session is open; call begin_weight_update() first"}
OPEN = {"success": False, "message": "a weight-update session is already open; call end_weight_update() first"}


async def test_a_session_is_opened_once_and_ended_once(engine: Engine):
    assert await engine.post("/end_weight_update") == (400, NONE)
    assert await engine.post("/begin_weight_update") == (200, DONE)
    assert await engine.post("/begin_weight_update") == (400, OPEN)
    assert await engine.post("/end_weight_update") == (200, DONE)
    assert await engine.post("/end_weight_update") == (400, NONE)
    assert await engine.post("/begin_weight_update", {"selector": "target"}) == (200, DONE)


async def test_the_projects_control_ends_a_session_that_somebody_left_open(engine: Engine):
    await engine.post("/begin_weight_update")
    assert await engine.control.begin_session()
    await engine.control.end_session()
    with pytest.raises(ApplyFailed, match="no weight-update session is open"):
        await engine.control.end_session()
    await engine.control.close_session()
    assert (await engine.control.dialect()).sessions


async def test_generation_goes_on_while_a_session_is_open(engine: Engine):
    await engine.post("/begin_weight_update")
    async with engine.running(1, tokens=100) as (one,):
        assert len((await one.answer())["output_ids"]) == 100
    assert await engine.version() == "1:0"


async def test_without_a_pause_calls_of_a_session_let_running_requests_finish(engine: Engine):
    """So the project pauses first."""
    for path in ("/begin_weight_update", "/end_weight_update"):
        async with engine.running(1, tokens=SOON) as (one,):
            assert await engine.post(path) == (200, DONE)
            assert one.tokens > 60  # the answer and the last events come by ways of their own
            assert (await one.answer())["meta_info"]["finish_reason"] == {"type": "length", "length": SOON}
    for mode in ("in_place", "retract"):
        async with engine.running(1) as (one,):
            await engine.post("/pause_generation", {"mode": mode})
            assert await engine.post("/begin_weight_update") == (200, DONE)
            assert await engine.post("/end_weight_update") == (200, DONE)
            assert not one.task.done()


async def test_nothing_is_taken_outside_a_session(engine: Engine):
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "none", "flush_cache": False, "load_format": "flattened_bucket"}
    status, answer = await engine.post("/update_weights_from_distributed", body)
    assert status == 400
    assert answer == {"success": False, "message": "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"}


async def test_calls_of_a_session_need_a_body(engine: Engine):
    for path in ("/begin_weight_update", "/end_weight_update", "/pause_generation", "/continue_generation", "/update_weight_version"):
        status, body = await engine.post(path, raw=b"")
        assert (status, body["object"]) == (400, "error")


async def test_a_new_name_opens_a_span_in_running_requests(engine: Engine):
    async with engine.running(1, tokens=SOON) as (one,):
        answer = await engine.post("/update_weight_version", {"new_version": "1:7", "abort_all_requests": False})
        assert answer == (200, {"success": True, "message": "Weight version updated to 1:7", "new_version": "1:7"})
        split(await one.answer(), "1:0", "1:7")
    assert await engine.version() == "1:7"


async def test_a_new_name_ends_running_requests_unless_told_not_to(engine: Engine):
    async with engine.running(1) as (one,):
        assert (await engine.post("/update_weight_version", {"new_version": "1:8"})).status == 200
        assert (await one.answer())["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await engine.generate(asking(2)))["meta_info"]["weight_version"] == await engine.version() == "1:8"


async def test_once_an_event_names_a_new_version_all_that_the_old_one_wrote_has_come(engine: Engine):
    """So what comes after that event is the new one's, also when no last event ever tells. What came before it may be either's."""
    events: list[dict[str, Any]] = []
    named = False
    async with engine.stream(asking(SOON)) as stream:
        async for event in stream:
            events.append(event)
            if len(event["output_ids"]) >= 10 and not named:
                named = True
                await engine.post("/update_weight_version", {"new_version": "1:7", "abort_all_requests": False})
    *middle, final = events
    names = [event["meta_info"]["weight_version"] for event in middle]
    assert sorted(set(names)) == ["1:0", "1:7"]
    assert names == sorted(names)
    first = middle[names.index("1:7")]
    assert len(first["output_ids"]) >= split(final, "1:0", "1:7")


async def test_the_dialect_is_what_the_engine_shows(engine: Engine):
    dialect = await engine.control.dialect()
    assert dialect.spans
    assert (dialect.ranks, dialect.replicas) == (1, 1)
    assert dialect.pause_mode("in_place") == "in_place"
    assert dialect.pause_mode("retract") == "retract"
    assert (dialect.version == EMBEDDED) == (not dialect.overlap)
