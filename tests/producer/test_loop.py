"""The life of a producer as others see it: its status while it lives."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from buffer.client import ProducerBuffer
from buffer.redis_ledger import RedisLedger
from producer.config import ProducerDaemonConfig
from producer.election import Election
from producer.engine.client import EngineClient, Sampling
from producer.evaluation import Evaluation
from producer.loop import ProducerLoop
from producer.main import Prepared
from producer.pinning import Pinning
from producer.pool import EnginePool
from producer.rollout import GroupMaker
from producer.sampler import Sampler
from producer.source import PromptSource
from producer.teacher.teacher import Teacher
from producer.work import GroupWork
from protocol.messages import Edge, ProducerStatus
from protocol.presence import Presence


class Told(Presence[ProducerStatus]):
    """Presence that wakes a test with every beat."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where, "producer", ProducerStatus)
        self.news: asyncio.Queue[ProducerStatus] = asyncio.Queue()

    async def beat(self, member: str, status: ProducerStatus, **options: Any) -> None:
        await super().beat(member, status, **options)
        self.news.put_nowait(status)


class Parts:
    """A producer whose parts a test holds."""

    def __init__(self, stage: Any, prepared: Prepared, config: ProducerDaemonConfig) -> None:
        teacher = Teacher(stage.session, config.teacher, texts={}) if config.teacher.urls else None
        self.stage = stage
        self.presence = Told(stage.redis, stage.keys)
        self.loop = loop = ProducerLoop(
            config.producer, ProducerStatus(producer_id="p"), presence=self.presence, slot_s=0.1, redis_deadline_s=60.0, stall_s=1e-6, teacher=teacher
        )
        self.pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0, on_status=loop.on_status)
        self.sampler = Sampler(pool=self.pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
        sampling = Sampling(max_new_tokens=8)
        self.work = GroupWork(
            ProducerBuffer(stage.ledger, stage.wakeups, "o" * 16),
            PromptSource(prepared.prompts, seed=0),
            GroupMaker(self.sampler, sampling, group_size=2, group_filter=config.producer.filter, producer_id="p", owner="o" * 16, teacher=teacher),
            max_inflight=2,
            max_bytes=4096,
            redis_deadline_s=60.0,
            closing=loop.closing,
            on_run_ended=loop.on_run_ended,
        )
        pinning = Pinning(
            *(stage.redis, stage.keys),
            holder="p",
            ledger=stage.ledger,
            pool=self.pool,
            wakeups=stage.wakeups,
            separate=config.eval.engines > 0,
            redis_deadline_s=60.0,
        )
        self.evaluation = Evaluation(
            config.eval,
            prepared.held_out,
            sampler=self.sampler,
            sampling=sampling,
            pinning=pinning,
            election=Election(stage.redis, stage.keys, every_s=3600.0),
            wakeups=stage.wakeups,
            producer_id="p",
            redis_deadline_s=60.0,
        )

    async def run(self, stop: asyncio.Event) -> None:
        await self.loop.run(stop, ledger=self.stage.ledger, pool=self.pool, work=self.work, sampler=self.sampler, evaluation=self.evaluation)


async def parts_of(stage: Any, **section: Any) -> Parts:
    held_out = stage.folder / "eval.jsonl"
    held_out.write_bytes((stage.folder / "train.jsonl").read_bytes())
    config = stage.config(eval={"path": str(held_out), "every_seconds": 3600.0} | section)
    return Parts(stage, await stage.create(config), config)


async def test_a_first_evaluation_that_blocks_the_run_is_the_edge_it_reports_and_logs_until_it_is_over(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    parts = await parts_of(stage)
    presence, engine = parts.presence, await stage.engine("a")
    engine.behave = lambda _: "hang"
    stop = asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.run(stop), name="loop")
        await engine.arrived.wait()
        while (status := await presence.news.get()).waiting_for is not Edge.FIRST_EVALUATION:
            pass
        assert status.waiting_since > 0
        assert status.inflight_groups == 0
        engine.behave = lambda _: "ok"
        engine.go.set()
        while (await presence.news.get()).waiting_for is Edge.FIRST_EVALUATION:
            pass
        stop.set()
    assert [event["phase"] for event in await stage.audit("eval")] == ["first"]
    assert sum("generation is blocked" in record.message and "first evaluation" in record.message for record in caplog.records) == 1


async def test_a_run_without_a_live_trainer_is_swept_by_its_producers(stage: Any) -> None:
    parts, engine = await parts_of(stage), await stage.engine("a")
    engine.behave = lambda _: "hang"
    left = stage.keys.payload(77, 1, "token")
    await stage.redis.set(left, b"of a process that died before it deleted it")
    await stage.redis.sadd(stage.keys.key("doomed"), "77:1:token")
    ledger, stop = RedisLedger(stage.redis, stage.keys, cluster=True), asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.loop.run(stop, ledger=ledger, pool=parts.pool, work=parts.work, sampler=parts.sampler, evaluation=None), name="loop")
        while await stage.redis.exists(left):
            await parts.presence.news.get()
        stop.set()
    assert await stage.redis.scard(stage.keys.key("doomed")) == 0


async def test_a_first_evaluation_on_engines_of_its_own_holds_up_no_group(stage: Any) -> None:
    parts = await parts_of(stage, engines=1)
    await stage.engine("a")
    await parts.pool.refresh()
    stop = asyncio.Event()
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.run(stop), name="loop")
        while (status := await parts.presence.news.get()).groups_put < 2:
            assert status.waiting_for not in (Edge.FIRST_EVALUATION, Edge.NO_ENGINE)
        stop.set()
    assert await stage.audit("eval") == []


async def test_a_producer_says_what_full_engines_allow_and_since_when_it_has_none(stage: Any) -> None:
    parts, engine = await parts_of(stage), await stage.engine("a")
    engine.behave = lambda _: "hang"
    stop, news = asyncio.Event(), parts.presence.news
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        life = parts.loop.run(stop, ledger=stage.ledger, pool=parts.pool, work=parts.work, sampler=parts.sampler, evaluation=None)
        tasks.create_task(life, name="loop")
        while (status := await news.get()).inflight_groups < 2:
            pass
        assert status.inflight_limit == 0
        await stage.registry.beat(dataclasses.replace(engine.status(), kv_usage=0.95, running=4), ttl_s=600.0)
        await parts.pool.refresh()
        while (await news.get()).inflight_limit != 1:
            pass
        await stage.registry.leave("a", engine.nonce)
        await parts.pool.refresh()
        engine.abort_at = [2] * 4  # they want to go on
        engine.go.set()
        while not parts.pool.waiting_since:
            await news.get()
        while (status := await news.get()).waiting_since != parts.pool.waiting_since:
            pass
        assert status.waiting_for is Edge.NO_ENGINE
        stop.set()


async def test_a_producer_says_which_engines_it_leaves_alone_and_why(stage: Any) -> None:
    parts, engine = await parts_of(stage), await stage.engine("a")
    engine.behave = lambda _: "drop"
    stop, news = asyncio.Event(), parts.presence.news
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        life = parts.loop.run(stop, ledger=stage.ledger, pool=parts.pool, work=parts.work, sampler=parts.sampler, evaluation=None)
        tasks.create_task(life, name="loop")
        while "broke the connection" not in (await news.get()).resting.get("a", ""):
            pass
        engine.behave = lambda _: "ok"
        while (status := await news.get()).resting or not status.groups_put:
            pass
        stop.set()


async def test_while_no_teacher_answers_groups_keep_their_slots_and_the_producer_says_so(stage: Any) -> None:
    config = stage.config(teacher={"urls": ["http://127.0.0.1:9"]})
    parts = Parts(stage, await stage.create(config), config)
    await stage.engine("a")
    stop, news = asyncio.Event(), parts.presence.news
    async with asyncio.timeout(100), asyncio.TaskGroup() as tasks:
        life = parts.loop.run(stop, ledger=stage.ledger, pool=parts.pool, work=parts.work, sampler=parts.sampler, evaluation=None)
        tasks.create_task(life, name="loop")
        while (status := await news.get()).waiting_for is not Edge.NO_TEACHER:
            pass
        assert "cannot be reached" in status.resting["teacher http://127.0.0.1:9"]
        assert (status.inflight_groups, status.groups_put, status.groups_failed) == (2, 0, 0)
        stop.set()
    ledger = await stage.ledger.status()
    assert (ledger.generating, ledger.released, sum(ledger.dead.values())) == (0, 2, 0)
