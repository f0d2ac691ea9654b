"""Evaluation on engines of its own, staged: what it asks, what it refuses to count, and what it does without them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from producer import evaluation as evaluation_module
from producer.evaluation import Evaluation
from protocol.errors import RedisUnavailable
from protocol.messages import Manifest
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync.aim import EVAL_FLEET
from weightsync.channel import Channel

from .test_evaluation import evaluation_of


async def publish(stage: Any, n: int) -> Version:
    """Version 1:n, trained and published; no engine here loads anything, so it has no files."""
    await stage.redis.hset(stage.keys.state, "trained", n)
    version = Version(1, n)
    manifest = Manifest(version=version, kind="full", parent="", tensors=(), digest=f"d{n}", transport="store", location="/nowhere", total_bytes=1)
    await Channel(stage.redis, stage.keys).publish(manifest, 1)
    return version


async def evaluator(stage: Any, name: str, *versions: str, at: str | None = None) -> Any:
    """An engine of the evaluation's own, at `at`, whose answers say `versions`."""
    engine = await stage.engine(name, at or versions[0])
    await stage.registry.beat(dataclasses.replace(engine.status(), fleet=EVAL_FLEET), ttl_s=60.0)
    engine.versions = [(version, 2) for version in versions]
    return engine


@contextlib.asynccontextmanager
async def watching(evaluation: Evaluation) -> AsyncIterator[None]:
    pool = evaluation._pinning._pool
    task = asyncio.create_task(pool.watch(), name="watch")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_it_asks_for_the_newest_version_and_only_engines_of_its_own_that_serve_just_that(stage: Any) -> None:
    ahead, own = await stage.engine("a", "1:2"), await evaluator(stage, "e", "1:1")
    evaluation = await evaluation_of(stage, samples=4, engines=1)
    await publish(stage, 0)
    await publish(stage, 1)
    async with watching(evaluation), asyncio.timeout(100):
        assert not evaluation.holds_up
        task = asyncio.create_task(evaluation.periodic(), name="periodic")
        await stage.redis.hset(stage.keys.state, "trained", 2)
        while not await stage.audit("eval"):
            await stage.wakeups.wait(Topic.RUN)
        task.cancel()
        await asyncio.wait([task])
    (event,) = await stage.audit("eval")
    assert (event["phase"], event["version"], event["pinned"], event["mixed"], event["versions"], event["samples"]) == ("periodic", "1:1", True, 0, ["1:1"], 4)
    assert (len(own.requests), len(ahead.requests)) == (4, 0)
    assert await stage.redis.get(stage.keys.eval_aim) == b"1:1"
    assert not [name async for name in _pins(stage)], "its files are let go"


async def _pins(stage: Any) -> AsyncIterator[bytes]:
    for name in await stage.redis.hkeys(stage.keys.weight_pins):
        if name.startswith(b"eval/"):
            yield name


async def test_the_first_one_is_of_version_0_also_when_training_is_past_it(stage: Any) -> None:
    own = await evaluator(stage, "e", "1:0")
    evaluation = await evaluation_of(stage, samples=2, engines=1)
    for n in range(3):
        await publish(stage, n)
    async with watching(evaluation), asyncio.timeout(100):
        await evaluation.first()
    (event,) = await stage.audit("eval")
    assert (event["phase"], event["version"], event["pinned"], len(own.requests)) == ("first", "1:0", True, 2)


async def test_a_sample_of_another_version_than_the_one_it_is_pinned_to_is_taken_again_and_then_counts_as_failed(stage: Any) -> None:
    own = await evaluator(stage, "e", "1:1", "1:2", at="1:1")
    evaluation = await evaluation_of(stage, samples=2, engines=1, concurrency=1)
    own.behave = lambda body: _unless_row(own, body, row=0)
    for n in (0, 1):
        await publish(stage, n)
    await stage.redis.hset(stage.keys.state, "trained", 2)
    async with watching(evaluation), asyncio.timeout(100):
        outcomes, problem = await evaluation._outcomes(evaluation_module.Phase.PERIODIC, None)
    (outcome,) = outcomes
    assert (len(outcome.answers), outcome.failed) == (1, 1)
    assert outcome.answers[1].versions == {Version(1, 1)}
    assert "asked for version 1:1 alone, and 1:1, 1:2 wrote it, 3 times" in problem
    assert sum("-main-0" in body["rid"] for body in own.requests) == 3


def _unless_row(engine: Any, body: dict[str, Any], *, row: int) -> str:
    mixed = f"-main-{row}" in body["rid"]
    engine.versions = [("1:1", 2), ("1:2", 2)] if mixed else [("1:1", 4)]
    return "ok"


async def test_without_such_engines_it_is_given_up_in_time_and_the_next_one_may_begin(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_module, "_AGAIN_S", 0.0)
    rollouts = await stage.engine("a")
    evaluation = await evaluation_of(stage, samples=2, engines=1, deadline_seconds=0.2)
    await publish(stage, 0)
    async with watching(evaluation), asyncio.timeout(100):
        await evaluation.first()
    (failure,) = await stage.audit("eval_failed")
    assert "eval.deadline_seconds = 0.2" in failure["problem"]
    assert rollouts.requests == [], "those of the run are left alone"
    assert await stage.redis.get(stage.keys.key("eval:lock")) is None


async def test_the_final_one_asks_engines_of_the_run_where_none_of_its_own_comes(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = await stage.engine("a", "1:1")
    evaluation = await evaluation_of(stage, samples=2, engines=1, final_deadline_seconds=0.4)
    for n in (0, 1):
        await publish(stage, n)
    async with watching(evaluation), asyncio.timeout(100):
        await evaluation.final(Version(1, 1))
    (event,) = await stage.audit("eval")
    assert (event["phase"], event["version"], event["pinned"], len(rollouts.requests)) == ("final", "1:1", True, 2)
    assert "the run's are asked" in caplog.text


async def test_several_sets_are_evaluated_at_one_version_and_recorded_together(stage: Any) -> None:
    await stage.engine("a")
    hard = stage.folder / "hard.jsonl"
    hard.write_text('{"prompt": "?1", "label": "no"}\n{"prompt": "?2", "label": "1234"}\n{"prompt": "?3", "label": "no"}\n')
    evaluation = await evaluation_of(stage, samples=4, sets={"hard": str(hard)})
    async with asyncio.timeout(100):
        await evaluation.first()
    events = await stage.audit("eval")
    assert [(event["set"], event["samples"], event["exact"], event["version"]) for event in events] == [
        ("main", 4, 1.0, "1:0"),
        ("hard", 3, pytest.approx(1 / 3), "1:0"),
    ]


async def test_an_outage_that_lets_go_of_the_version_costs_one_evaluation_and_not_the_producer(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = await evaluation_of(stage, samples=2, engines=1)
    await publish(stage, 0)

    @contextlib.asynccontextmanager
    async def away(*_: Any, **__: Any) -> AsyncIterator[None]:
        raise RedisUnavailable("away")
        yield

    monkeypatch.setattr(evaluation._pinning, "pinned", away)
    assert await evaluation._outcomes(evaluation_module.Phase.PERIODIC, None) == ([], "away")


async def test_what_waits_for_engines_of_its_own_is_not_said_to_hold_up_the_run(stage: Any) -> None:
    evaluation = await evaluation_of(stage, samples=2, engines=1)
    pool = evaluation._pinning._pool
    for fleet, waits in ((EVAL_FLEET, False), ("rollout", True)):
        task = asyncio.create_task(pool.acquire(None, exact=Version(1, 5), fleet=fleet), name=fleet)
        await asyncio.sleep(0)
        assert (pool.waiting_since > 0) == waits
        task.cancel()
        await asyncio.wait([task])
    assert pool.waiting_since == 0
