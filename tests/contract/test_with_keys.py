"""The other setup: keys, streams that bring only what is new, no overlapping steps, and reduced precision."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from producer.engine.client import EngineClient, Sampling
from protocol.errors import ApplyFailed, SampleFailed
from protocol.versions import Version
from weightsync.control import EngineControl

from .conftest import Models, Serve
from .engine import PROMPT, SOON, Engine, asking
from .spans import check_in_place, logged, split

USERS = ("/generate", "/model_info", "/server_info")
ADMINS = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/update_weights_from_disk", "/update_weight_version")
ADMINS += ("/begin_weight_update", "/end_weight_update", "/update_weights_from_distributed", "/init_weights_update_group", "/weights_checker")
OPEN = ("/ready", "/health", "/metrics")
REFUSED = (401, {"error": "Unauthorized"})


@pytest_asyncio.fixture
async def engine(guarded: Serve) -> AsyncIterator[Engine]:
    async with guarded() as served:
        yield served


async def ask(engine: Engine, path: str, key: str) -> int:
    """Bodies say nothing that could be done, so whoever is let in is told so."""
    return (await engine.ask("GET" if path.endswith("_info") else "POST", path, None if path.endswith("_info") else [], key=key)).status


@pytest.mark.parametrize("key", ["", "wrong", "key-of-admins"])
async def test_users_need_their_key_and_no_other(engine: Engine, key: str):
    for path in USERS:
        assert await engine.ask("GET" if path.endswith("_info") else "POST", path, [], key=key) == REFUSED
        assert await ask(engine, path, engine.setup.api_key) != 401


@pytest.mark.parametrize("key", ["", "wrong", "key-of-users"])
async def test_what_pauses_or_changes_needs_the_admins_key_and_no_other(engine: Engine, key: str):
    for path in ADMINS:
        assert await engine.ask("POST", path, [], key=key) == REFUSED
    for path in ("/flush_cache", "/weights_checker"):
        assert await engine.ask("GET", path, key=key) == REFUSED
    for path in ("/pause_generation", "/end_weight_update", "/update_weight_version"):
        assert (await engine.ask("POST", path, [], key=engine.setup.admin_key)).status == 400
    assert (await engine.get("/ready")).status == 200


async def test_whether_it_lives_is_for_everybody(engine: Engine):
    for path in OPEN:
        assert (await engine.get(path, key="")).status == 200


async def test_a_path_that_is_not_there_is_behind_the_users_key(engine: Engine):
    assert (await engine.get("/nothing", key="")).status == 401
    assert (await engine.get("/nothing", key=engine.setup.api_key)).status == 404


async def test_the_projects_own_clients_bear_the_right_ones(engine: Engine, models: Models):
    await engine.control.pause("in_place")
    await engine.control.update_from_disk(str(models.b), "1:1", deadline_s=120)
    await engine.control.resume()
    assert await engine.control.weight_version() == "1:1"
    with pytest.raises(ApplyFailed, match="401"):
        await EngineControl(engine.session, engine.url, api_key=engine.setup.api_key).pause("in_place")
    with pytest.raises(SampleFailed, match="401"):
        await EngineClient(engine.session).generate(engine.url, PROMPT, sampling=Sampling(max_new_tokens=2), rid="x", deadline_s=120)


async def test_events_bring_what_is_new_and_add_up_to_the_whole(engine: Engine):
    whole = await engine.generate(asking(200, sampling={"temperature": 0.0}))
    body = asking(200, sampling={"temperature": 0.0}, logprob_start_len=0, top_logprobs_num=1, return_prompt_token_ids=True)
    events = await engine.events(body)
    final = events[-1]["meta_info"]
    assert len(events) > 5
    ids = [token for event in events for token in event["output_ids"]]
    logprobs = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    tops = [entry for event in events for entry in event["meta_info"]["output_top_logprobs"]]
    assert ids == [entry[1] for entry in logprobs] == [top[0][1] for top in tops]
    assert "".join(event["text"] for event in events) == (whole["text"] if ids == whole["output_ids"] else "".join(event["text"] for event in events))
    reached = 0
    for event in events:
        reached += len(event["output_ids"])
        assert event["meta_info"]["completion_tokens"] == event["meta_info"]["output_token_logprobs_length"] == reached
        assert event["meta_info"]["input_token_logprobs"] == final["input_token_logprobs"]
        assert event["prompt_token_ids"] == PROMPT
        assert ("weight_versions" in event["meta_info"]) == (event is events[-1])
    assert final["weight_versions"] == [{"version": "1:0", "start": 0, "end": 200}]


async def test_a_stop_string_is_held_back_here_too(engine: Engine):
    whole = (await engine.generate(asking(60, sampling={"temperature": 0.0})))["text"]
    stop = whole[3:9]
    events = await engine.events(asking(60, sampling={"temperature": 0.0, "stop": stop}))
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert "".join(event["text"] for event in events) == whole[:3]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_projects_client_reads_them_all_the_same(engine: Engine, models: Models, tolerance: float, *, stream: bool):
    client = EngineClient(engine.session, engine.setup.api_key, stream=stream)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    one = await client.generate(engine.url, PROMPT, sampling=sampling, rid="c", deadline_s=120, assumed=Version(1, 0))
    own = models.written(models.a, PROMPT, one.output_ids.tolist())
    torch.testing.assert_close(torch.from_numpy(one.logprobs.copy()), own, atol=tolerance, rtol=0)


async def test_logprobs_in_reduced_precision_are_off_by_its_rounding(engine: Engine, models: Models, tolerance: float):
    answer = await engine.generate(asking(100))
    off = (logged(answer) - models.written(models.a, PROMPT, answer["output_ids"])).abs()
    assert off.max() <= tolerance
    assert off.mean() <= tolerance / 4


async def test_without_overlapping_steps_a_boundary_in_place_is_exact(engine: Engine, models: Models, tolerance: float):
    assert await engine.span_lag() == 0
    async with engine.running(1, tokens=SOON) as (one,):
        await engine.control.pause("in_place")
        await engine.control.update_from_disk(str(models.b), "1:1", deadline_s=120)
        await engine.control.resume()
        answer = await one.answer()
        check_in_place(answer, split(answer, "1:0", "1:1"), models, PROMPT, lag=0, tolerance=tolerance)
