"""Every edge starved once for real: a real ledger on Redis, real ends of the buffer, real presence; the watchdog names the edge at the root."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from rich.console import Console

from buffer.client import ProducerBuffer, TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import Slot
from buffer.redis_ledger import RedisLedger
from buffer.watchdog import Stall
from deploy import live
from deploy.cli import main
from deploy.config import listen
from deploy.http import app as http
from deploy.snapshot import Picture, PictureSource
from protocol.codec import digest
from protocol.connection import Client
from protocol.errors import RunMissing
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Edge, EngineId, EngineState, EngineStatus, GroupHeader, ProducerStatus, TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version
from protocol.wakeups import Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.registry import Registry

from .conftest import manifest

IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=1, dataset="rows", tokenizer="words")
BYTES = 1000
PATIENCE_S = 3600.0
"""Longer than any of these tests takes: what is a stall at once is one because it is said to have begun before."""


class Stage:
    """A run, and the two ends of its buffer in the test's hands. B = 2 in chunks of 2, D = 1: 4 slots."""

    def __init__(self, client: Client, keys: Keys, waker: Wakeups, group: asyncio.TaskGroup) -> None:
        self.client, self.keys = client, keys
        self.ledger = RedisLedger(client, keys)
        self.producer = ProducerBuffer(self.ledger, waker, "owner")
        self.producers = Presence(client, keys, "producer", ProducerStatus)
        self.trainers = Presence(client, keys, "trainer", TrainerStatus)
        self.registry = Registry(client, keys)
        self._waker = waker
        self._group = group
        self._waiting: list[asyncio.Task[Any]] = []
        self.incarnation = 0

    async def create(self, **changes: object) -> None:
        base: dict[str, object] = {"groups_per_step": 2, "pipeline_depth": 1.0, "chunk_groups": 2, "byte_budget": 100_000}
        await self.ledger.create(IDENTITY, BufferConfig.model_validate(base | changes))

    async def train(self, **changes: object) -> None:
        """The run, with a trainer at work on step 1 and an engine at its first version."""
        await self.create(**changes)
        self.incarnation = (await self.ledger.attach(None, trainer_id="trainer")).incarnation
        await self.publish(0)
        await self.serve(0)
        await self.beat_trainer()

    async def publish(self, n: int) -> None:
        await Channel(self.client, self.keys).publish(manifest(Version(self.incarnation, n)), self.incarnation)

    async def serve(self, n: int) -> None:
        status = EngineStatus(engine_id=EngineId("engine-0"), boot_nonce="nonce", url="http://127.0.0.1:9", kind="embedded", state=EngineState.STARTING)
        await self.registry.beat(status, ttl_s=600.0)
        await self.registry.ack("engine-0", "nonce", Version(self.incarnation, n))

    async def beat_trainer(self, *, ttl_s: float = 600.0, **changes: Any) -> None:
        status = TrainerStatus(trainer_id="trainer", incarnation=self.incarnation, step=1, moved_at=time.time(), host="host", pid=1)
        await self.trainers.beat("trainer", dataclasses.replace(status, **changes), ttl_s=ttl_s)

    async def beat_producer(self, edge: Edge | None = None) -> None:
        status = ProducerStatus(producer_id="producer-0", waiting_for=edge, waiting_since=time.time() if edge else 0.0)
        await self.producers.beat("producer-0", status, ttl_s=600.0)

    async def starve_producer(self, *, max_bytes: int = BYTES) -> Edge:
        """Reserve until nothing more is granted; the edge that the ledger names, which the producer announces. It goes on waiting."""
        edge = await self._blocked(lambda on_blocked: self._reserve_all(max_bytes, on_blocked), "test:producer")
        await self.beat_producer(edge)
        return edge

    async def starve_trainer(self) -> Edge:
        """Lease the first chunk of step 1 while too few groups are ready. It goes on waiting."""
        await self.ledger.open_step(self.incarnation, 1)
        buffer = TrainerBuffer(self.ledger, self._waker, self.incarnation)
        edge = await self._blocked(lambda on_blocked: buffer.lease(1, 0, on_blocked), "test:trainer")
        await self.beat_trainer(waiting_for=edge, waiting_since=time.time())
        return edge

    async def _reserve_all(self, max_bytes: int, on_blocked: Callable[[Edge], None]) -> None:
        while True:
            await self.producer.reserve(4, max_bytes, on_blocked)

    async def _blocked(self, work: Callable[[Callable[[Edge], None]], Awaitable[Any]], name: str) -> Edge:
        edges: asyncio.Queue[Edge] = asyncio.Queue()

        async def run() -> None:
            await work(edges.put_nowait)

        self._waiting.append(self._group.create_task(run(), name=name))
        return await edges.get()

    async def put(self, slots: tuple[Slot, ...]) -> None:
        for slot in slots:
            payload = b"payload %d" % slot.seq
            header = GroupHeader(
                seq=slot.seq,
                attempt=slot.attempt,
                token=slot.token,
                prompt_id="row",
                producer_id="producer-0",
                group_size=1,
                lengths=(12,),
                trainable={slot.min_version: 10},
                oldest=slot.min_version,
                rewards=(0.5,),
                payload_bytes=len(payload),
                payload_digest=digest(payload),
            )
            await self.producer.put(header, payload)

    async def picture(self) -> Picture:
        return await PictureSource(self.client, self.keys, patience_s=PATIENCE_S).picture()

    async def root(self) -> Stall:
        (stall,) = (await self.picture()).blocked
        return stall

    def end(self) -> None:
        for task in self._waiting:
            task.cancel()


@pytest_asyncio.fixture
async def stage(redis: Client, keys: Keys) -> AsyncIterator[Stage]:
    async with wakeups(redis, keys) as waker, asyncio.TaskGroup() as group:
        found = Stage(redis, keys, waker, group)
        yield found
        found.end()


async def test_no_run(stage: Stage):
    with pytest.raises(RunMissing):
        await stage.ledger.join(IDENTITY)
    await stage.beat_producer(Edge.NO_RUN)
    stall = await stage.root()
    assert stall.edge is Edge.NO_RUN
    assert "--new" in stall.what_to_do


async def test_no_trainer_because_none_ever_came(stage: Stage):
    await stage.create()
    assert await stage.starve_producer() is Edge.NO_TRAINER
    stall = await stage.root()
    assert (stall.edge, stall.waiting) == (Edge.NO_TRAINER, ("producer-0: no trainer",))
    assert "no trainer has attached" in stall.why


async def test_no_trainer_because_it_died_although_the_producers_hear_of_no_slot(stage: Stage):
    await stage.train()
    await stage.beat_trainer(ttl_s=0.001)
    died = await stage.trainers.last_seen()
    assert await stage.starve_producer() is Edge.NO_SLOT
    while await stage.trainers.members():
        pass
    stall = await stage.root()
    assert (stall.edge, stall.since, stall.waiting) == (Edge.NO_TRAINER, died, ("producer-0: no slot",))
    assert "gone, after step 0" in stall.why


async def test_no_slot_while_the_trainer_is_at_work_is_no_stall(stage: Stage):
    await stage.train()
    assert await stage.starve_producer() is Edge.NO_SLOT
    stall = await stage.root()
    assert (stall.edge, stall.at_work) == (Edge.NO_SLOT, True)
    assert "all 4 slots are in use, and the trainer is at work on step 1" in stall.why


async def test_no_slot_because_the_trainer_is_here_and_hangs(stage: Stage):
    await stage.train()
    stopped = time.time() - 2 * PATIENCE_S
    await stage.beat_trainer(moved_at=stopped)
    assert await stage.starve_producer() is Edge.NO_SLOT
    picture = await stage.picture()
    (stall,) = picture.stalls
    assert (stall.edge, stall.since) == (Edge.NO_SLOT, stopped)
    assert "trainer trainer (pid 1 on host) is here, waits for nobody, and has not moved in step 1" in stall.why


async def test_no_budget(stage: Stage):
    await stage.train(byte_budget=2 * BYTES)
    assert await stage.starve_producer() is Edge.NO_BUDGET
    stall = await stage.root()
    assert stall.edge is Edge.NO_BUDGET
    assert "2000 of 2000 bytes are in use" in stall.why
    await stage.beat_trainer(spill_problem="No space left on device")
    assert "the spill, which fails: No space left on device" in (await stage.root()).why
    await stage.trainers.leave("trainer")
    assert (await stage.root()).edge is Edge.NO_TRAINER


async def test_no_engine(stage: Stage):
    await stage.train()
    await stage.registry.leave("engine-0", "nonce")
    assert await stage.starve_producer() is Edge.NO_ENGINE
    stall = await stage.root()
    assert (stall.edge, stall.why) == (Edge.NO_ENGINE, "no engine is registered")


async def test_no_engine_because_the_only_one_is_unfit(stage: Stage):
    await stage.train()
    await stage.registry.mark_unfit("engine-0", "nonce", "checksum of model.norm.weight")
    assert await stage.starve_producer() is Edge.NO_ENGINE
    assert await stage.starve_trainer() is Edge.NO_GROUP
    stall = await stage.root()
    assert (stall.edge, stall.why) == (Edge.NO_ENGINE, "no engine may be asked: engine-0 is unfit (checksum of model.norm.weight)")
    assert stall.waiting == ("producer-0: no engine", "trainer trainer: no group")


async def test_no_version(stage: Stage):
    """On-policy: once step 1 is trained, every group needs its version."""
    await stage.train(pipeline_depth=0.0)
    await stage.put(await stage.producer.reserve(2, BYTES))
    await stage.ledger.open_step(1, 1)
    await stage.ledger.lease(1, 1, 0)
    await stage.ledger.trained(1, 1, "digest", {})
    assert await stage.starve_producer() is Edge.NO_VERSION
    unpublished = await stage.root()
    assert unpublished.edge is Edge.NO_VERSION
    assert "the newest published version is 1:0, 1 steps behind the newest trained; engine-0 serves 1:0" in unpublished.why
    await stage.publish(1)
    assert "1:1 is published, and no engine that may be asked is new enough; engine-0 serves 1:0" in (await stage.root()).why
    await stage.serve(1)
    while (await stage.ledger.status()).generating == 0:
        pass
    await stage.beat_producer()
    assert (await stage.picture()).blocked == ()


async def test_no_group_because_no_producer_ever_came(stage: Stage):
    await stage.train()
    assert await stage.starve_trainer() is Edge.NO_GROUP
    stall = await stage.root()
    assert (stall.edge, stall.why, stall.waiting) == (Edge.NO_GROUP, "no producer has joined the run", ("trainer trainer: no group",))


async def test_no_group_because_the_last_producer_left(stage: Stage):
    await stage.train()
    await stage.beat_producer()
    await stage.producer.reserve(2, BYTES)
    await stage.producers.leave("producer-0")
    assert await stage.starve_trainer() is Edge.NO_GROUP
    stall = await stage.root()
    assert (stall.edge, stall.since) == (Edge.NO_GROUP, await stage.producers.last_seen())
    assert stall.why == "the last producer is gone; 2 slots of theirs expire by themselves"


async def test_no_group_because_generation_is_slow_although_a_producer_hears_of_no_slot(stage: Stage):
    await stage.train()
    assert await stage.starve_producer() is Edge.NO_SLOT
    assert await stage.starve_trainer() is Edge.NO_GROUP
    stall = await stage.root()
    assert (stall.edge, stall.waiting) == (Edge.NO_GROUP, ("producer-0: no slot", "trainer trainer: no group"))
    assert "4 groups are being generated and 0 are ready" in stall.why


async def test_the_first_evaluation(stage: Stage):
    await stage.train()
    await stage.beat_producer(Edge.FIRST_EVALUATION)
    assert await stage.starve_trainer() is Edge.NO_GROUP
    stall = await stage.root()
    assert (stall.edge, stall.waiting) == (Edge.FIRST_EVALUATION, ("producer-0: first evaluation", "trainer trainer: no group"))


async def test_a_run_that_drains_is_blocked_nowhere(stage: Stage):
    await stage.train()
    assert await stage.starve_producer() is Edge.NO_SLOT
    stage.end()
    await stage.ledger.drain(stage.incarnation, "over")
    await stage.trainers.leave("trainer")
    assert (await stage.picture()).blocked == ()


async def test_a_stall_is_in_status_http_metrics_and_the_line_of_up(stage: Stage, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    await stage.train()
    assert await stage.starve_producer() is Edge.NO_SLOT
    await stage.trainers.leave("trainer")
    await stage.client.set(stage.keys.presence_seen("trainer"), int((time.time() - 2 * PATIENCE_S) * 1000))

    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "{stage.keys.run}"\ndir = "{tmp_path}/run"\nstall_seconds = {PATIENCE_S}\n[redis]\nurl = "{redis_url}"\n')
    assert await asyncio.to_thread(main, ["status", "-c", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "STALLED no trainer for 7" in said
    assert "(producer-0: no slot); start rl-trainer with --resume" in said
    assert await asyncio.to_thread(main, ["status", "--json", "-c", str(path)]) == 0
    body = json.loads(capsys.readouterr().out)["watchdog"]
    assert (body["stalled"], [one["edge"] for one in body["blocked"]]) == (True, ["no trainer"])

    source = PictureSource(stage.client, stage.keys, patience_s=PATIENCE_S)
    listener = listen("127.0.0.1", 0)
    with contextlib.closing(listener):
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with http.running(source, listener), aiohttp.ClientSession() as session:
            async with session.get(f"{base}/v1/watchdog") as answer:
                watchdog = await answer.json()
            async with session.get(f"{base}/readyz") as answer:
                assert answer.status == 200
                ready = await answer.json()
            async with session.get(f"{base}/metrics") as answer:
                metrics = await answer.text()
    assert watchdog["stalled"] is True
    assert watchdog["blocked"][0]["waiting"] == ["producer-0: no slot"]
    assert ready["stalls"][0].startswith("no trainer for 7")
    run = stage.keys.run
    assert f'rollstream_stalled{{run="{run}"}} 1.0' in metrics
    assert f'rollstream_blocked_seconds{{edge="no slot",run="{run}"}} 0.0' in metrics
    (seconds,) = [line.rpartition(" ")[2] for line in metrics.splitlines() if line.startswith('rollstream_blocked_seconds{edge="no trainer"')]
    assert float(seconds) >= 2 * PATIENCE_S

    picture = await source.picture()
    assert "STALLED no trainer" in live.line(picture)
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(live.render(picture, {}, []))
    assert "STALLED no trainer" in console.export_text()


async def test_a_service_without_a_run_says_who_waits_for_it(stage: Stage):
    await stage.beat_producer(Edge.NO_RUN)
    listener = listen("127.0.0.1", 0)
    with contextlib.closing(listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/watchdog"
        async with http.running(PictureSource(stage.client, stage.keys), listener), aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
            body = await answer.json()
    assert (body["stalled"], [one["edge"] for one in body["blocked"]]) == (False, ["no run"])
