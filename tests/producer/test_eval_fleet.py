"""Evaluations beside a run whose real engines take new weights meanwhile: what is asked, what is answered, and what the record says of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from producer.config import ProducerDaemonConfig
from producer.election import Election
from producer.engine.client import EngineClient, Sampling
from producer.engine.host import EngineHostConfig, run_host
from producer.evaluation import Evaluation
from producer.main import prepare
from producer.pinning import Pinning
from producer.pool import EnginePool
from producer.sampler import Sampled, Sampler
from protocol.audit import event
from protocol.config import validate
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineState
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups
from tests.producer.engine.conftest import write_model
from weightsync.channel import Channel
from weightsync.config import store_folder
from weightsync.registry import Registry
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot
from weightsync.store import DirectoryStore

ROWS = 12


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / str(seed), seed=seed) for seed in (1, 2, 3)]


class Asked(Sampler):
    """Notes every sample; before the one numbered `at`, something happens, and the others wait for it."""

    at = -1

    async def happens(self) -> None: ...

    async def sample(self, *arguments: Any, **options: Any) -> Sampled:
        self.begun = getattr(self, "begun", 0) + 1
        if self.begun == self.at:
            await self.happens()
        sampled = await super().sample(*arguments, **options)
        self.samples = [*getattr(self, "samples", []), sampled]
        return sampled


class Run:
    """A run with a trainer of the test's own."""

    def __init__(self, *, client: Client, keys: Keys, url: str, models: list[Path], folder: Path, waker: Wakeups, session: aiohttp.ClientSession) -> None:
        rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(ROWS)]
        for name in ("train.jsonl", "eval.jsonl"):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.values: dict[str, Any] = {
            "run": {"name": keys.run, "dir": str(folder / "run")},
            "redis": {"url": url},
            "model": {"path": str(models[0])},
            "data": {"path": str(folder / "train.jsonl")},
            "eval": {"path": str(folder / "eval.jsonl"), "concurrency": 1},
            "rollout": {"max_prompt_tokens": 20, "max_new_tokens": 16},
            "weights": {"store": str(folder / "store")},
            "engine": {"slots": 4},
        }
        self.client, self.keys, self.models, self.waker, self.session = client, keys, models, waker, session
        self.ledger, self.registry, self.channel = RedisLedger(client, keys), Registry(client, keys), Channel(client, keys)

    def config(self, tree: Any, **sections: Any) -> Any:
        merged = {name: values | sections.get(name, {}) for name, values in self.values.items() if name in tree.model_fields}
        return validate(tree, merged, source="test")

    async def publish(self, n: int) -> None:
        """Version 1:n has the weights of the n-th model."""
        config = self.config(EngineHostConfig)
        await self.client.hset(self.keys.state, "trained", n)
        store = DirectoryStore(store_folder(config.weights, config.run), self.models[0])
        with open_tensors(self.models[n] / "model.safetensors") as tensors:
            manifest = await asyncio.to_thread(store.write, Snapshot(version=Version(1, n), tensors=tensors))
        await self.channel.publish(manifest, 1)

    async def serves(self, index: int, version: str) -> None:
        name = f"{self.keys.run}-engine-{index}"
        async with asyncio.timeout(300):
            while True:
                mark = self.waker.mark(Topic.ENGINES)
                found = {one.engine_id: one for one in await self.registry.engines() if one.state is EngineState.ROUTABLE}
                if name in found and str(found[name].version) == version:
                    return
                await self.waker.wait(Topic.ENGINES, since=mark)

    @contextlib.asynccontextmanager
    async def engines(self, count: int, **sections: Any) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as hosts:
            for index in range(count):
                hosts.create_task(run_host(self.config(EngineHostConfig, **sections), index, stop), name=f"host-{index}")
            try:
                yield
            finally:
                stop.set()

    @contextlib.asynccontextmanager
    async def evaluation(self, **eval_section: Any) -> AsyncIterator[tuple[Evaluation, Asked]]:
        config = self.config(ProducerDaemonConfig, eval=eval_section)
        prepared = await asyncio.to_thread(prepare, config)
        await self.ledger.create(prepared.identity, BufferConfig())
        await self.ledger.attach(None, trainer_id="t")
        await self.publish(0)
        pool = EnginePool(self.registry, self.ledger, self.waker, deadline_s=60.0)
        sampler = Asked(pool=pool, client=EngineClient(self.session), grader=prepared.grader, config=config.producer, decode=prepared.decode)
        watch = asyncio.create_task(pool.watch(), name="watch")
        try:
            yield (
                Evaluation(
                    config.eval,
                    prepared.held_out,
                    sampler=sampler,
                    sampling=Sampling(max_new_tokens=16, temperature=0.0),
                    pinning=Pinning(
                        self.client,
                        self.keys,
                        holder="p",
                        ledger=self.ledger,
                        pool=pool,
                        wakeups=self.waker,
                        separate=config.eval.engines > 0,
                        redis_deadline_s=60.0,
                    ),
                    election=Election(self.client, self.keys, every_s=3600.0),
                    wakeups=self.waker,
                    producer_id="p",
                    redis_deadline_s=60.0,
                ),
                sampler,
            )
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    async def records(self) -> list[dict[str, Any]]:
        entries = [event(entry_id, fields) for entry_id, fields in await self.client.xrange(self.keys.audit)]
        return [dict(entry.fields) for entry in entries if entry.op == "eval"]


@pytest_asyncio.fixture
async def run(redis: Client, keys: Keys, redis_url: str, models: list[Path], tmp_path: Path) -> AsyncIterator[Run]:
    async with wakeups(redis, keys) as waker, aiohttp.ClientSession() as session:
        yield Run(client=redis, keys=keys, url=redis_url, models=models, folder=tmp_path, waker=waker, session=session)


def spans_of(sampled: Sampled) -> set[str]:
    return {str(span.version) for span in sampled.rollout.spans}


def when(sampler: Asked, at: int, work: Callable[[], Awaitable[None]]) -> None:
    sampler.at, sampler.happens = at, work  # type: ignore[method-assign]


async def test_every_sample_of_a_fleet_of_its_own_is_of_the_pinned_version_while_the_run_goes_on(run: Run):
    fleet = {"eval": {"engines": 1}, "engine": {"count": 1}}

    async def train_on() -> None:
        for n in (1, 2):
            await run.publish(n)
            await run.serves(0, f"1:{n}")

    async with run.evaluation(**fleet["eval"]) as (evaluation, sampler), run.engines(2, **fleet), asyncio.timeout(300):
        when(sampler, ROWS // 2, train_on)
        await evaluation.first()
        assert [spans_of(sampled) for sampled in sampler.samples] == [{"1:0"}] * ROWS
        assert {sampled.rollout.engine_id for sampled in sampler.samples} == {f"{run.keys.run}-engine-1"}
        await run.serves(1, "1:0")
        first = [sampled.rollout.tokens.tolist() for sampled in sampler.samples]

        await run.client.hdel(run.keys.key("eval"), "last")
        task = asyncio.create_task(evaluation.periodic(), name="periodic")
        while len(records := await run.records()) < 2:
            await run.waker.wait(Topic.RUN)
        task.cancel()
        await asyncio.wait([task])
        assert [spans_of(sampled) for sampled in sampler.samples[ROWS:]] == [{"1:2"}] * ROWS
        assert [sampled.rollout.tokens.tolist() for sampled in sampler.samples[ROWS:]] != first
    told = [(one["phase"], one["version"], one["pinned"], one["mixed"], one["versions"], one["samples"]) for one in records]
    assert told == [("first", "1:0", True, 0, ["1:0"], ROWS), ("periodic", "1:2", True, 0, ["1:2"], ROWS)]


async def test_on_shared_engines_the_record_names_what_they_served_and_counts_what_is_not_of_the_version_it_began_with(run: Run):
    async def train_on() -> None:
        await run.publish(1)
        await run.serves(0, "1:1")

    async with run.evaluation() as (evaluation, sampler), run.engines(1), asyncio.timeout(300):
        when(sampler, 5, train_on)
        await evaluation.first()
        assert [spans_of(sampled) for sampled in sampler.samples] == [{"1:0"}] * 4 + [{"1:1"}] * (ROWS - 4)
    (record,) = await run.records()
    assert (record["version"], record["versions"], record["pinned"], record["mixed"]) == ("1:0", ["1:0", "1:1"], False, ROWS - 4)
