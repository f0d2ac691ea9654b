"""Evaluation and its election against a real Redis."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from producer import election as election_module
from producer import evaluation as evaluation_module
from producer.election import Election, Phase, Turn
from producer.engine.client import EngineClient, Sampling
from producer.evaluation import Evaluation
from producer.pinning import Pinning
from producer.pool import EnginePool
from producer.sampler import Sampler
from protocol.versions import Version
from protocol.wakeups import Topic


def election(stage: Any, every_s: float = 3600.0) -> Election:
    return Election(stage.redis, stage.keys, every_s=every_s)


async def test_one_process_evaluates_at_a_time_and_each_phase_once(stage: Any) -> None:
    mine, other = election(stage), election(stage)
    assert await mine.claim(Phase.FIRST) == (Turn.MINE, 0.0)
    claim, wait_s = await other.claim(Phase.FIRST)
    assert claim is Turn.HELD
    assert 0 < wait_s <= election_module.TTL_S
    assert await mine.claim(Phase.FIRST) == (Turn.MINE, 0.0)
    assert await other.record(Phase.FIRST, "", [{}]) is False
    assert await mine.record(Phase.FIRST, "", [{"phase": "first", "set": "a"}, {"phase": "first", "set": "b"}]) is True
    assert (await other.claim(Phase.FIRST))[0] is Turn.DONE
    assert await stage.audit("eval") == [{"phase": "first", "set": "a"}, {"phase": "first", "set": "b"}]
    claim, wait_s = await other.claim(Phase.PERIODIC)
    assert claim is Turn.EARLY
    assert 0 < wait_s <= 3600


async def test_a_final_evaluation_happens_once_for_each_version_a_run_ends_with(stage: Any) -> None:
    mine = election(stage)
    for version in ("1:5", "2:9"):
        assert (await mine.claim(Phase.FINAL, version))[0] is Turn.MINE
        assert await mine.record(Phase.FINAL, version, [])
        assert (await election(stage).claim(Phase.FINAL, version))[0] is Turn.DONE


async def test_work_without_a_record_gives_the_lock_back(stage: Any) -> None:
    async def work() -> int:
        return 7

    mine = election(stage)
    await mine.claim(Phase.PERIODIC)
    assert await mine.holding(Phase.PERIODIC, "", work()) == 7
    assert (await election(stage).claim(Phase.PERIODIC))[0] is Turn.MINE


async def test_work_is_cancelled_when_the_lock_has_gone_to_another(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election_module, "_RENEW_S", 0.01)
    mine, other = election(stage), election(stage)
    cancelled = asyncio.Event()

    async def work() -> None:
        await stage.redis.delete(stage.keys.key("eval:lock"))
        await other.claim(Phase.PERIODIC)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    await mine.claim(Phase.PERIODIC)
    async with asyncio.timeout(100):
        assert await mine.holding(Phase.PERIODIC, "", work()) is None
    assert cancelled.is_set()
    assert (await other.claim(Phase.PERIODIC))[0] is Turn.MINE


def pinning_of(stage: Any, pool: EnginePool, *, separate: bool) -> Pinning:
    return Pinning(stage.redis, stage.keys, holder="p", ledger=stage.ledger, pool=pool, wakeups=stage.wakeups, separate=separate, redis_deadline_s=60.0)


async def evaluation_of(stage: Any, **config: Any) -> Evaluation:
    held_out = stage.folder / "eval.jsonl"
    held_out.write_bytes((stage.folder / "train.jsonl").read_bytes())
    daemon = stage.config(eval={"path": str(held_out)} | config)
    prepared = await stage.create(daemon)
    assert prepared.held_out
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    await pool.refresh()
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=daemon.producer, decode=prepared.decode)
    return Evaluation(
        daemon.eval,
        prepared.held_out,
        sampler=sampler,
        sampling=Sampling(max_new_tokens=4, temperature=0.0),
        pinning=pinning_of(stage, pool, separate=daemon.eval.engines > 0),
        election=election(stage, config.get("every_seconds", 3600.0)),
        wakeups=stage.wakeups,
        producer_id="p",
        redis_deadline_s=60.0,
    )


async def test_an_evaluation_counts_what_failed_and_names_every_version_that_served(stage: Any) -> None:
    engine = await stage.engine("a")
    engine.texts = ["1234", "no"]
    engine.behave = lambda body: 400 if body["rid"].split(".")[0].endswith("-first-main-3") else "ok"
    engine.versions = [("1:0", 2), ("2:0", 2)]
    evaluation = await evaluation_of(stage, samples=4, concurrency=1)
    await stage.ledger.attach(None, trainer_id="second")
    async with asyncio.timeout(100):
        await evaluation.first()
        await evaluation.first()
    (event,) = await stage.audit("eval")
    assert (event["samples"], event["failed"], event["versions"], event["producer_id"]) == (3, 1, ["1:0", "2:0"], "p")
    assert (event["set"], event["version"], event["pinned"], event["mixed"], event["tokens"]) == ("main", "1:0", False, 3, 12)
    assert event["reward"] == event["exact"] == pytest.approx(2 / 3)


async def test_a_first_evaluation_of_which_nothing_comes_is_recorded_as_failed_after_a_few_tries(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_module, "_AGAIN_S", 0.0)
    engine = await stage.engine("a")
    engine.behave = lambda _: 400
    evaluation = await evaluation_of(stage, samples=2)
    async with asyncio.timeout(100):
        await evaluation.first()
        await evaluation.first()
    assert await stage.audit("eval") == []
    (failure,) = await stage.audit("eval_failed")
    assert (failure["phase"], failure["failed"], failure["producer_id"]) == ("first", 2, "p")
    assert "answered 400" in failure["problem"]
    rounds = evaluation_module._FIRST_TRIES
    assert len(engine.requests) == 2 * rounds * 4  # samples, rounds, attempts of each


async def test_the_final_evaluation_takes_what_there_is_when_no_engine_serves_the_final_version(stage: Any) -> None:
    await stage.engine("a")
    evaluation = await evaluation_of(stage, samples=2, final_deadline_seconds=0.3)
    await evaluation._pinning._pool.refresh()
    async with asyncio.timeout(100):
        await evaluation.final(Version(1, 9))
    (event,) = await stage.audit("eval")
    assert (event["phase"], event["version"], event["versions"]) == ("final", "1:0", ["1:0"])


async def test_periodic_evaluations_are_not_done_twice_by_two_producers(stage: Any) -> None:
    await stage.engine("a")
    first = await evaluation_of(stage, samples=2, every_seconds=0.2)
    second = await evaluation_of(stage, samples=2, every_seconds=0.2)
    for evaluation in (first, second):
        await evaluation._pinning._pool.refresh()
    tasks = [asyncio.create_task(evaluation.periodic(), name="periodic") for evaluation in (first, second)]
    async with asyncio.timeout(100):
        while True:
            mark = stage.wakeups.mark(Topic.RUN)
            if len(await stage.audit("eval")) >= 3:
                break
            await stage.wakeups.wait(Topic.RUN, since=mark)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    at = [int(entry[0].split(b"-")[0]) for entry in await stage.redis.xrange(stage.keys.audit) if entry[1][b"op"] == b"eval"]
    assert all(later - earlier >= 200 for earlier, later in pairwise(at))
