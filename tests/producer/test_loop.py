"""The life of a producer as others see it: its status while it lives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from buffer.client import ProducerBuffer
from producer.config import EvalConfig
from producer.election import Election
from producer.engine.client import EngineClient, Sampling
from producer.evaluation import Evaluation
from producer.loop import ProducerLoop
from producer.pool import EnginePool
from producer.rollout import GroupMaker
from producer.sampler import Sampler
from producer.source import PromptSource
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


async def test_a_first_evaluation_that_blocks_the_run_is_the_edge_it_reports_and_logs_until_it_is_over(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    held_out = stage.folder / "eval.jsonl"
    held_out.write_bytes((stage.folder / "train.jsonl").read_bytes())
    config = stage.config(eval={"path": str(held_out)})
    prepared = await stage.create(config)
    engine = await stage.engine("a")
    engine.behave = lambda _: "hang"
    presence = Told(stage.redis, stage.keys)
    loop = ProducerLoop(config.producer, ProducerStatus(producer_id="p"), presence=presence, slot_s=0.1, redis_deadline_s=5.0, stall_s=1e-6)
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=5.0, on_status=loop.on_status)
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
    sampling = Sampling(max_new_tokens=8)
    work = GroupWork(
        ProducerBuffer(stage.ledger, stage.wakeups, "o" * 16),
        PromptSource(prepared.prompts, seed=0),
        GroupMaker(sampler, sampling, group_size=2, group_filter=config.producer.filter, producer_id="p", owner="o" * 16),
        max_inflight=2,
        max_bytes=4096,
        redis_deadline_s=5.0,
        closing=loop.closing,
        on_run_ended=loop.on_run_ended,
    )
    evaluation = Evaluation(
        EvalConfig(path=str(held_out), every_seconds=3600.0),
        prepared.held_out,  # type: ignore[arg-type]
        sampler=sampler,
        sampling=sampling,
        pool=pool,
        election=Election(stage.redis, stage.keys, every_s=3600.0),
        wakeups=stage.wakeups,
        producer_id="p",
        redis_deadline_s=5.0,
    )
    stop = asyncio.Event()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(loop.run(stop, ledger=stage.ledger, pool=pool, work=work, sampler=sampler, evaluation=evaluation), name="loop")
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
