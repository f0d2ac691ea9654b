"""The groups of one producer against a real ledger: slots lost, given back, failed, filtered, and a Redis that goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from buffer.client import ProducerBuffer
from buffer.contract import Blocked, Granted
from producer.engine.client import EngineClient, Sampling, open_session
from producer.outage import through_outage
from producer.pace import Load
from producer.pool import EnginePool
from producer.rollout import GroupMaker
from producer.sampler import Sampler
from producer.source import PromptSource
from producer.stopping import unless
from producer.work import GroupWork
from protocol.errors import LedgerRegressed, RedisUnavailable
from protocol.groups import payload_bound
from protocol.messages import Edge, Reason
from protocol.versions import Version
from protocol.wakeups import Topic
from tests.producer.streaming import Ill, StreamingEngine, register


class Bench:
    """Group work under way, to be looked at."""

    def __init__(self, work: GroupWork, pool: EnginePool, closing: asyncio.Event) -> None:
        self.work, self.pool, self.closing = work, pool, closing


@contextlib.asynccontextmanager
async def working(
    stage: Any, config: Any, prepared: Any, *, drain_s: float = 0.0, redis_deadline_s: float = 60.0, buffer: Any = None, client: EngineClient | None = None
) -> AsyncIterator[Bench]:
    closing = asyncio.Event()
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    client = client or EngineClient(stage.session)
    sampler = Sampler(pool=pool, client=client, grader=prepared.grader, config=config.producer, decode=prepared.decode)
    maker = GroupMaker(sampler, Sampling(max_new_tokens=8), group_size=2, group_filter=config.producer.filter, producer_id="p", owner="o" * 16)
    work = GroupWork(
        buffer or ProducerBuffer(stage.ledger, stage.wakeups, "o" * 16),
        PromptSource(prepared.prompts, seed=0),
        maker,
        max_inflight=config.producer.max_inflight_groups,
        max_bytes=payload_bound(group_size=2, prompt_tokens=16, new_tokens=8),
        redis_deadline_s=redis_deadline_s,
        closing=closing,
        on_run_ended=closing.set,
    )
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(pool.watch(), name="watch")
        running = tasks.create_task(work.run(lambda: drain_s), name="work")
        yield Bench(work, pool, closing)
        closing.set()
        await running
        watch.cancel()


async def until(stage: Any, condition: Any) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await stage.wakeups.wait(*Topic, timeout_s=0.02)


async def taken_over(stage: Any, owner: str) -> Granted:
    """What another producer is granted once the slots of the first have expired."""
    async with asyncio.timeout(100):
        while True:  # no event tells of it: slots expire when somebody asks
            answer = await stage.ledger.reserve(owner, f"r-{owner}", 2, max_bytes=4096)
            if isinstance(answer, Granted) and any(slot.attempt > 1 for slot in answer.slots):
                return answer


async def test_a_group_whose_slot_went_to_another_is_dropped_at_the_heartbeat(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config, pipeline_depth=0.0, slot_seconds=0.05)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: len(engine.requests) == 4)
        await taken_over(stage, "other")
        await bench.work.renew()
        assert bench.work.tally.lost == 2
        await until(stage, lambda: len(bench.work) == 0)
    assert await stage.audit("put") == []


async def test_a_group_whose_slot_went_to_another_is_refused_at_the_put(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config, pipeline_depth=0.0, slot_seconds=0.05)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: len(engine.requests) == 4)
        await taken_over(stage, "other")
        engine.go.set()
        await until(stage, lambda: bench.work.tally.lost == 2)
        assert bench.work.tally.put == 0
    assert await stage.audit("put") == []


async def test_what_is_under_way_at_closing_is_given_back_after_the_drain(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    async with working(stage, config, prepared):
        await until(stage, lambda: len(engine.requests) == 4)
    status = await stage.ledger.status()
    assert (status.generating, status.released) == (0, 2)
    assert status.releases == {Reason.GIVEN_BACK: 2}


async def test_a_group_that_fails_is_released_and_handed_out_again(stage: Any) -> None:
    config = stage.config(producer={"sample_retries": 0, "max_inflight_groups": 1})
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.behave = lambda _: 400 if len(engine.requests) < 2 else "ok"
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: bench.work.tally.put == 5)
        assert bench.work.tally.failed == 1
    (released,) = await stage.audit("released")
    assert (released["seq"], released["reason"]) == (0, "failed")
    assert "1 attempts failed" in released["why"]
    assert sorted((event["seq"], event["attempt"]) for event in await stage.audit("put")) == [(0, 2), (1, 1), (2, 1), (3, 1), (4, 1)]


async def test_filtered_groups_die_and_the_next_seq_takes_their_place(stage: Any) -> None:
    config = stage.config(producer={"filter": "zero_variance", "max_inflight_groups": 1})
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.texts = ["1234", "1234", "1234", "no"]
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: bench.work.tally.put == 5)
    assert bench.work.tally.filtered >= 4
    dead = await stage.audit("dead")
    assert {event["why"] for event in dead} == {"all rewards are 1"}
    assert all(len(event["lengths"]) == config.rollout.group_size and min(event["lengths"]) > 0 for event in dead)
    assert all(len(event["lengths"]) == config.rollout.group_size and min(event["lengths"]) > 0 for event in await stage.audit("put"))
    assert {event["reason"] for event in await stage.audit("dead")} == {"filtered"}


async def test_without_an_engine_it_waits_and_says_so_and_goes_on_when_one_comes(stage: Any) -> None:
    config = stage.config()
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: len(engine.requests) == 4)
        await stage.registry.mark_unfit("a", engine.nonce, "test")
        await bench.pool.refresh()
        engine.behave = lambda _: 500
        engine.go.set()
        await until(stage, lambda: bench.work.tally.put == 2)
        await until(stage, lambda: bench.work.waiting_for is Edge.NO_ENGINE)
        await stage.engine("b")
        await until(stage, lambda: bench.work.tally.put == 5)


async def test_a_trainer_that_comes_back_takes_engines_off_the_line_out_of_use(stage: Any) -> None:
    config = stage.config()
    await stage.create(config)
    await stage.engine("a", "1:3")
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    await pool.refresh()
    assert (await pool.acquire(Version(1, 2))).id == "a"
    await stage.ledger.attach(None, trainer_id="second")
    await pool.refresh()
    async with asyncio.timeout(100):
        waiting = asyncio.create_task(pool.acquire(Version(2, 0)), name="acquire")
        await asyncio.sleep(0)
        assert not waiting.done()
        assert pool.waiting_since > 0
        await stage.engine("b", "2:0")
        await pool.refresh()
        assert (await waiting).id == "b"
    assert pool.waiting_since == 0


class Away(ProducerBuffer):
    """A buffer whose Redis goes away for some puts."""

    failures = 0

    async def put(self, header: Any, payload: bytes) -> Any:
        if self.failures:
            self.failures -= 1
            raise RedisUnavailable("staged")
        return await super().put(header, payload)


async def test_a_finished_group_is_held_while_redis_is_away_and_put_when_it_is_back(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.outage._PAUSE_S", 0.01)
    config = stage.config()
    prepared = await stage.create(config, pipeline_depth=0.0)
    await stage.engine("a")
    buffer = Away(stage.ledger, stage.wakeups, "o" * 16)
    buffer.failures = 5
    async with working(stage, config, prepared, buffer=buffer) as bench:
        await until(stage, lambda: bench.work.tally.put == 2)
    assert buffer.failures == 0
    assert (await stage.ledger.status()).ready == 2


@pytest.mark.parametrize("problem", [LedgerRegressed("staged"), RedisUnavailable("staged")])
async def test_a_wait_for_a_slot_longer_than_the_deadline_leaves_redis_its_whole_deadline(
    stage: Any, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    monkeypatch.setattr("producer.outage._PAUSE_S", 0.01)
    now_s, real, asked = 0.0, stage.ledger.reserve, 0
    monkeypatch.setattr("producer.outage.time", SimpleNamespace(monotonic=lambda: now_s))
    config = stage.config()
    prepared = await stage.create(config, pipeline_depth=0.0)
    await stage.engine("a")

    async def reserve(*args: Any, **known: Any) -> Any:
        nonlocal now_s, asked
        if asked == 1:
            asked += 1
            raise problem
        answer = await real(*args, **known)
        if isinstance(answer, Blocked):
            now_s += 600  # the deadline is 60 s
            asked += 1
        return answer

    monkeypatch.setattr(stage.ledger, "reserve", reserve)
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: asked >= 3)
        assert bench.work.waiting_for is Edge.NO_SLOT


class Forgetful(ProducerBuffer):
    """A buffer whose ledger has not trained anything for so many puts: it lost it, and its trainer has not told it again."""

    puts = 0

    def of(self, stage: Any, puts: int) -> Forgetful:
        self.client, self.state, self.puts = stage.redis, stage.keys.state, puts
        return self

    async def put(self, header: Any, payload: bytes) -> Any:
        await self.client.hset(self.state, "trained", -1 if self.puts else 0)
        self.puts = max(0, self.puts - 1)
        try:
            return await super().put(header, payload)
        finally:
            await self.client.hset(self.state, "trained", 0)  # no ledger ever says -1 to who reserves


async def test_a_version_that_the_ledger_forgot_is_no_failure_of_the_group(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.outage._PAUSE_S", 0.01)
    config = stage.config(producer={"max_inflight_groups": 1})
    prepared = await stage.create(config, pipeline_depth=0.0)
    await stage.engine("a")
    buffer = Forgetful(stage.ledger, stage.wakeups, "o" * 16).of(stage, 3)
    async with working(stage, config, prepared, buffer=buffer) as bench:
        await until(stage, lambda: bench.work.tally.put == 2)
        assert bench.work.tally.failed == 0
    assert [(event["seq"], event["attempt"]) for event in await stage.audit("put")] == [(0, 1), (1, 1)]


async def test_a_version_that_the_run_never_trained_fails_the_group_in_the_end(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.outage._PAUSE_S", 0.01)
    config = stage.config(producer={"max_inflight_groups": 1})
    prepared = await stage.create(config, pipeline_depth=0.0, max_attempts=1)
    await stage.engine("a")
    buffer = Forgetful(stage.ledger, stage.wakeups, "o" * 16).of(stage, 10_000_000)
    async with working(stage, config, prepared, redis_deadline_s=1.0, buffer=buffer) as bench:
        await until(stage, lambda: bench.work.tally.failed == 1)
    (dead,) = await stage.audit("dead")
    assert (dead["seq"], dead["reason"], "never trained version 1:0" in dead["why"]) == (0, "failed", True)


async def test_redis_that_stays_away_ends_the_wait_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.outage._PAUSE_S", 0.01)

    async def call() -> None:
        raise RedisUnavailable("staged")

    with pytest.raises(RedisUnavailable):
        await through_outage(call, deadline_s=0.05)


async def test_work_is_cut_short_by_its_event_and_its_own_failure_comes_out() -> None:
    stop = asyncio.Event()
    cleaned = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def fail() -> None:
        raise ValueError("mine")

    asyncio.get_running_loop().call_soon(stop.set)
    await unless(stop, forever(), name="forever")
    assert cleaned == [True]
    with pytest.raises(ValueError, match="mine"):
        await unless(asyncio.Event(), fail(), name="fail")


async def test_no_more_groups_are_under_way_than_the_engines_can_hold_and_more_as_soon_as_they_can(stage: Any) -> None:
    config = stage.config(producer={"max_inflight_groups": 4})
    prepared = await stage.create(config, pipeline_depth=9.0)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    full, fine = [Load(kv_usage=0.95, running=8)], [Load(kv_usage=0.2, running=6)]
    async with working(stage, config, prepared) as bench:
        await until(stage, lambda: len(engine.requests) == 8)
        assert bench.work.inflight_limit == 0
        bench.work.adapt(full)
        bench.work.adapt(full)
        assert bench.work.inflight_limit == 3, "one decrease, while four groups are under way still"
        done, engine.go = engine.go, asyncio.Event()
        done.set()
        await until(stage, lambda: bench.work.tally.put == 4 and len(engine.requests) == 14)
        assert len(bench.work) == 3
        bench.work.adapt(fine)
        await until(stage, lambda: len(engine.requests) == 16)
        assert len(bench.work) == 4
        assert bench.work.inflight_limit == 0


async def test_a_run_of_groups_goes_on_over_a_time_without_any_engine(stage: Any) -> None:
    """The only engine is killed with requests under way, and another comes later: no group fails."""
    config = stage.config(producer={"sample_retries": 0})
    prepared = await stage.create(config)
    first = StreamingEngine(behave=lambda _: Ill(after=3, how="hang"))
    async with contextlib.AsyncExitStack() as life, open_session() as session:
        await life.enter_async_context(first.serving())
        await register(stage.registry, "a", first.url)
        async with working(stage, config, prepared, client=EngineClient(session, stream=True)) as bench:
            await until(stage, lambda: first.generated == 12)
            await life.aclose()
            await until(stage, lambda: bench.pool.waiting_since > 0 and len(bench.pool.resting) == 1)
            await stage.registry.leave("a", "boot:1")
            await until(stage, lambda: len(bench.pool.resting) == 0)
            assert len(bench.work) == 2
            async with StreamingEngine().serving() as second:
                await register(stage.registry, "b", second.url)
                await until(stage, lambda: bench.work.tally.put == 5)
                assert bench.pool.waiting_since == 0
                assert second.generated == 5 * 2 * 8 - 12, "what the first one wrote is not written again"
            assert bench.work.tally.failed == 0
    assert {event["attempt"] for event in await stage.audit("put")} == {1}
