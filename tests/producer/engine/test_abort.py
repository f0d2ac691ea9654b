"""Updates that end what is running: a real embedded engine under its host and reconciler, real groups, and `weights.pause_mode = "abort"`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from buffer.client import ProducerBuffer, TrainerBuffer
from producer.engine.client import EngineClient, Sampling
from producer.engine.embedded.worker import Worker
from producer.engine.host import EngineHostConfig, run_host
from producer.pool import EnginePool
from producer.rollout import GroupMaker
from producer.sampler import Sampler
from producer.source import PromptSource
from producer.work import GroupWork
from protocol.config import validate
from protocol.messages import EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic
from weightsync.channel import Channel
from weightsync.config import store_folder
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

STEPS = 4
TOKENS = 200


class Trainer:
    """Leases, trains nothing, and publishes one of two models in turn; the engine must run something when an update comes."""

    def __init__(self, stage: Any, config: EngineHostConfig, models: tuple[Path, Path], session: aiohttp.ClientSession) -> None:
        self._stage, self._models, self._session = stage, models, session
        self._channel = Channel(stage.redis, stage.keys)
        self._store = DirectoryStore(store_folder(config.weights, config.run), models[0])
        self._buffer = TrainerBuffer(stage.ledger, stage.wakeups, 1)
        self.holds = threading.Event()

    async def publish(self, n: int) -> EngineStatus:
        """The engine, once it serves `1:n`."""
        version = Version(1, n)
        with open_tensors(self._models[n % 2] / "model.safetensors") as tensors:
            manifest = self._store.write(Snapshot(version=version, tensors=tensors))
        await self._channel.publish(manifest, 1)
        while True:
            mark = self._stage.wakeups.mark(Topic.ENGINES)
            for engine in await self._stage.registry.routable():
                if engine.version == version:
                    return engine  # type: ignore[no-any-return]
            await self._stage.wakeups.wait(Topic.ENGINES, since=mark)

    async def step(self, step: int, engine: EngineStatus) -> EngineStatus:
        await self._stage.ledger.open_step(1, step)
        chunk = await self._buffer.lease(step, 0)
        for number in range(1, 100):
            if chunk.last:
                break
            chunk = await self._buffer.lease(step, number)
        await self._stage.ledger.trained(1, step, f"digest-{step}", {})
        while not self.holds.is_set():
            while not await self._running(engine):
                pass
            self.holds.set()  # what runs stays unfinished until the update is there
            if not await self._running(engine):
                self.holds.clear()
        return await self.publish(step)

    async def _running(self, engine: EngineStatus) -> int:
        async with self._session.get(engine.url + "/server_info") as answer:
            (state,) = (await answer.json())["internal_states"]
        return int(state["num_running_reqs"])


@contextlib.asynccontextmanager
async def producing(stage: Any, config: Any, prepared: Any) -> AsyncIterator[tuple[GroupWork, Sampler]]:
    closing = asyncio.Event()
    pool = EnginePool(stage.registry, stage.ledger, stage.wakeups, deadline_s=60.0)
    sampler = Sampler(pool=pool, client=EngineClient(stage.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
    sampling = Sampling(max_new_tokens=TOKENS, ignore_eos=True)
    work = GroupWork(
        ProducerBuffer(stage.ledger, stage.wakeups, "o" * 16),
        PromptSource(prepared.prompts, seed=0),
        GroupMaker(sampler, sampling, group_size=2, group_filter=config.producer.filter, producer_id="p", owner="o" * 16),
        max_inflight=4,
        max_bytes=1 << 20,
        redis_deadline_s=60.0,
        closing=closing,
        on_run_ended=closing.set,
    )
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(pool.watch(), name="watch")
        running = tasks.create_task(work.run(lambda: 0.0), name="work")
        yield work, sampler
        closing.set()
        await running
        watch.cancel()


@pytest.mark.redis
async def test_updates_that_abort_running_requests_fail_no_group(
    stage: Any, session: aiohttp.ClientSession, model_a: Path, model_b: Path, monkeypatch: pytest.MonkeyPatch
):
    """With no retry allowed at all, each update ends the responses under way, and every group is trained at its first attempt all the same."""
    own = {"model": {"path": str(model_a)}, "rollout": {"group_size": 2, "max_prompt_tokens": 20, "max_new_tokens": TOKENS}}
    config = stage.config(**own, producer={"sample_retries": 0, "max_inflight_groups": 4, "sample_deadline_seconds": 100.0, "group_deadline_seconds": 100.0})
    prepared = await stage.create(config, pipeline_depth=1.0, max_staleness=STEPS)
    values = {name: section for name, section in stage.values(**own).items() if name in ("run", "redis", "model", "rollout")}
    values |= {"weights": {"store": str(stage.folder / "store"), "pause_mode": "abort"}, "engine": {"slots": 8}}
    hosting = validate(EngineHostConfig, values, source="test")
    trainer, stop = Trainer(stage, hosting, (model_a, model_b), session), asyncio.Event()
    due, pause = Worker._due, Worker._do_pause

    def held(worker: Worker) -> bool:
        if trainer.holds.is_set():
            time.sleep(0.002)
            return False
        return due(worker)

    def let_go(worker: Worker, mode: str) -> None:
        pause(worker, mode)
        trainer.holds.clear()

    monkeypatch.setattr(Worker, "_due", held)
    monkeypatch.setattr(Worker, "_do_pause", let_go)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        tasks.create_task(run_host(hosting, 0, stop), name="host")
        engine = await trainer.publish(0)
        async with producing(stage, config, prepared) as (work, sampler):
            for step in range(1, STEPS + 1):
                engine = await trainer.step(step, engine)
            tally = work.tally
        stop.set()
    assert sampler.aborted, "an update should have met a request"
    assert sampler.kept_tokens, "and what that had should have been gone on from"
    assert (tally.failed, tally.lost) == (0, 0)
    status = await stage.ledger.status()
    assert status.dead == {}
    assert {event["reason"] for event in await stage.audit("released")} <= {"given_back"}
    assert {event["attempt"] for event in await stage.audit("put")} == {1}
