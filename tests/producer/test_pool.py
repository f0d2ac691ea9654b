"""The pool against a real registry: whom it lets wait, whom it lets try, and one router in front of many."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from producer.breaker import IN_A_ROW
from producer.pool import EnginePool
from protocol.errors import SampleFailed
from protocol.messages import EngineState
from protocol.versions import Version
from tests.producer.streaming import StreamingEngine, register, response
from tests.producer.test_cut_off import bench


async def pool_of(stage: Any, *names: str, **fields: Any) -> EnginePool:
    await stage.create(stage.config())
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    for name in names:
        await register(stage.registry, name, f"http://{name}", **fields)
    await pool.refresh()
    return pool


async def waits(pool: EnginePool, **options: Any) -> asyncio.Task[Any]:
    """A request that waits for an engine."""
    task = asyncio.create_task(pool.acquire(None, **options), name="waits")
    async with asyncio.timeout(100):
        while not pool.waiting_since:
            await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_one_request_at_a_time_tries_an_engine_that_rested_and_its_first_sign_lets_all_in(stage: Any) -> None:
    pool = await pool_of(stage, "a")
    seats = [await pool.acquire(None) for _ in range(IN_A_ROW)]
    assert [pool.refused(seat, "broke") for seat in seats] == [False] * (IN_A_ROW - 1) + [True]
    assert pool.resting == {"a": "broke"}
    probe = await pool.acquire(None)
    assert probe.probe
    others = [await waits(pool) for _ in range(3)]
    pool.answers(probe)
    async with asyncio.timeout(100):
        assert [(await one).probe for one in others] == [False] * 3
    assert (pool.resting, pool.waiting_since) == ({}, 0.0)


async def test_a_probe_that_is_given_up_lets_the_next_one_try(stage: Any) -> None:
    pool = await pool_of(stage, "a")
    pool.refused(await pool.acquire(None), "gone", certain=True)
    probe = await pool.acquire(None)
    other = await waits(pool)
    pool.release(probe, answered=False)
    async with asyncio.timeout(100):
        assert (await other).probe


async def test_a_probe_that_fails_makes_the_others_wait_on_until_the_next_rest_is_over(stage: Any) -> None:
    pool = await pool_of(stage, "a")
    pool.refused(await pool.acquire(None), "gone", certain=True)
    probe = await pool.acquire(None)
    other = await waits(pool)
    assert pool.refused(probe, "still gone", certain=True)
    async with asyncio.timeout(100):
        assert (await other).probe
    assert pool.resting == {"a": "still gone"}


async def test_no_engine_at_all_is_waited_out(stage: Any) -> None:
    pool = await pool_of(stage)
    waiting = [await waits(pool) for _ in range(3)]
    await register(stage.registry, "late", "http://late")
    await pool.refresh()
    async with asyncio.timeout(100):
        assert {(await one).id for one in waiting} == {"late"}
    assert pool.waiting_since == 0.0


async def test_fleets_and_exact_versions_are_those_of_the_registry(stage: Any) -> None:
    pool = await pool_of(stage, "e", fleet="eval")
    waiting = await waits(pool)
    assert (await pool.acquire(None, fleet="eval")).id == "e"
    assert (await pool.acquire(None, exact=Version(1, 0), fleet="eval")).version == Version(1, 0)
    assert pool.loads == (), "whom no rollout may go to does not limit rollouts"
    await register(stage.registry, "r", "http://r", running=3, queued=1, kv_usage=0.5)
    await pool.refresh()
    assert (await waiting).id == "r"
    assert [(load.running, load.queued, load.kv_usage) for load in pool.loads] == [(3, 1, 0.5)]


# -- a router in front -------------------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def forwarding(engines: Sequence[StreamingEngine]) -> AsyncIterator[str]:
    """The URL of what a SGLang router is to its users: it hands each request to the next engine, events as they come, and knows nothing else."""
    turn = itertools.cycle(engines)

    async def forward(http: web.Request) -> web.StreamResponse:
        async with session.post(next(turn).url + "/generate", data=await http.read()) as upstream:
            answer = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.headers["Content-Type"]})
            await answer.prepare(http)
            with contextlib.suppress(aiohttp.ClientError):
                async for piece in upstream.content.iter_any():
                    await answer.write(piece)
            return answer

    app = web.Application()
    app.router.add_post("/generate", forward)
    async with aiohttp.ClientSession() as session:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def test_behind_a_router_requests_go_there_and_those_of_the_evaluations_fleet_do_not(stage: Any) -> None:
    first, second, own = StreamingEngine(), StreamingEngine(), StreamingEngine()
    async with first.serving(), second.serving(), own.serving(), forwarding([first, second]) as url, bench(stage, router_url=url + "/") as at:
        await at.add("a", first, kind="sglang")
        await at.add("b", second, kind="sglang")
        await at.add("e", own, fleet="eval")
        made = [await at.sample() for _ in range(4)]
        assert all(at.is_whole(one) for one in made)
        assert {one.rollout.engine_id for one in made} == {"router"}
        assert (len(first.requests), len(second.requests), len(own.requests)) == (2, 2, 0)
        assert {request["extra_key"] for request in first.requests} == {"1:0"}
        await at.sample(fleet="eval")
        assert len(own.requests) == 1


async def test_a_router_is_as_new_as_its_oldest_engine_and_shares_no_prefix_while_they_differ(stage: Any) -> None:
    first, second = StreamingEngine(), StreamingEngine(version="1:1")
    async with first.serving(), second.serving(), forwarding([first, second]) as url, bench(stage, router_url=url) as at:
        await stage.ledger.open_step(1, 1)
        await stage.redis.hset(stage.keys.state, "trained", 1)
        await at.add("a", first, kind="sglang")
        await at.add("b", second, kind="sglang", version="1:1")
        made = [await at.sample() for _ in range(2)]
        spans = [[str(span.version) for span in one.rollout.spans] for one in made]
        assert spans == [["1:0"], ["1:1"]], "each answer says what wrote it"
        salts = [engine.requests[0]["extra_key"] for engine in (first, second)]
        assert salts == ["r.0", "r.0"], "the id of the request, which the test gives to both"
        waiting = asyncio.create_task(at.pool.acquire(Version(1, 1)), name="waiting")
        while not at.pool.waiting_since:
            await asyncio.sleep(0)
        await stage.registry.ack("a", "boot:1", Version(1, 1))
        await at.pool.refresh()
        async with asyncio.timeout(100):
            seat = await waiting
        assert (seat.id, seat.engine.mixed, seat.engine.prefix_cache) == ("router", False, True)


@pytest.mark.parametrize("version", ["1:0", "1:9", "boot:1"])
async def test_an_answer_through_a_router_of_a_version_that_cannot_be_fails_the_sample_and_blames_nobody(stage: Any, version: str) -> None:
    """Older than what all have acked, newer than anything trained, or none of a run's: it comes from an engine that nobody can name."""
    good, odd = StreamingEngine(version="1:1"), StreamingEngine(version=version)
    async with good.serving(), odd.serving(), forwarding([odd, good]) as url, bench(stage, router_url=url, sample_retries=1) as at:
        await stage.ledger.open_step(1, 1)
        await stage.redis.hset(stage.keys.state, "trained", 1)
        await at.add("a", good, version="1:1")
        await at.add("b", odd, version="1:1")
        made = await at.sample()
        assert [str(span.version) for span in made.rollout.spans] == ["1:1"]
        assert (len(odd.requests), len(good.requests)) == (1, 1)
        assert {one.state for one in await stage.registry.engines()} == {EngineState.ROUTABLE}
        with pytest.raises(SampleFailed):
            await at.pool.judge(await at.pool.acquire(None), {Version(1, 0)})


async def test_an_engine_is_told_unfit_once_however_many_requests_it_has(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = StreamingEngine()
    async with engine.serving(), bench(stage) as at:
        await at.add("a", engine)
        seats = [await at.pool.acquire(None) for _ in range(3)]
        for seat in seats:
            with pytest.raises(SampleFailed, match="says nothing"):
                await at.pool.mark_unfit(seat, "says nothing")
        assert [one.state for one in await stage.registry.engines()] == [EngineState.UNFIT]
        assert [record.message for record in caplog.records if "is unfit" in record.message] == ["engine a is unfit: says nothing"]


async def test_a_response_that_is_cut_off_behind_a_router_goes_on_through_it(stage: Any) -> None:
    first, second = StreamingEngine(), StreamingEngine()
    async with first.serving(), second.serving(), forwarding([first, second]) as url, bench(stage, router_url=url) as at:
        await at.add("a", first)
        await at.add("b", second)
        whole = first._event

        def event(ids: list[int], start: int, most: int, *, last: bool) -> Any:
            if start == 5:
                raise ConnectionResetError
            return whole(ids, start, most, last=last)

        first._event = event  # type: ignore[method-assign]
        prompt = at.chosen.ids.tolist()
        made = await at.sample()
        assert made.rollout.tokens.tolist() == [*prompt, *response(prompt, 12)]
        assert [len(request["input_ids"]) - len(prompt) for request in second.requests] == [5]
