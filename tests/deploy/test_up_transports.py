"""A small real run by each transport that needs a carrier: `rollstream up` to its end, every version in both engines by that way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from buffer.audit import read_audit
from buffer.redis_ledger import RedisLedger
from deploy.demo import task
from deploy.summary import read_summary
from producer.engine.embedded import weights as loading
from producer.engine.host import EngineHostConfig, run_host
from protocol.config import load
from protocol.connection import Client
from protocol.keys import Keys
from protocol.wakeups import Topic, wakeups
from tests.deploy.all_there import hold_back
from tests.producer.engine.conftest import write_model
from weightsync.registry import Registry

STEPS = 6
MANY_STEPS = 30
MEANWHILE = 5
"""Steps that the slow engine takes to load a version."""
ROOT = Path(__file__).parents[2]


def write_run(folder: Path, weights: dict[str, Any], buffer: dict[str, Any], *, steps: int = STEPS, engines: int = 2, redis_url: str = "") -> Path:
    train, _ = task.write_data(folder, 0)
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "t", "dir": str(folder / "run")},
        "model": {"path": str(write_model(folder / "model", seed=1))},
        "data": {"path": str(train)},
        "rollout": {"group_size": 4, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "reward": {"kind": "function", "function": "deploy.demo.task:reward"},
        "buffer": {"groups_per_step": 4, "chunk_groups": 4, "max_staleness": 4} | buffer,
        "weights": {"store": str(folder / "store"), "relay": str(folder / "relay")} | weights,
        "engine": {"count": engines, "slots": 16},
        "producer": {"count": 1},
        "trainer": {"lr": 1e-3},
        "stop": {"steps": steps},
        "http": {"port": 0},
        "redis": {"url": redis_url},
    }
    path = folder / "run.toml"
    tables["weights"]["store"] = tables["weights"]["store"].format(folder=folder)
    path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items()))
    return path


class Holding:
    """Whoever loads weights in this process is held until `MEANWHILE` more steps are trained, or the last."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self._client, self._keys = client, Keys("t")
        self._entered, self._release = asyncio.Event(), threading.Event()
        self._over = False
        self.trained: list[tuple[int, int]] = []
        """For each load, the steps that were trained when it began and when it ended."""
        loop, apply = asyncio.get_running_loop(), loading.apply

        def held(*args: Any) -> None:
            loop.call_soon_threadsafe(self._entered.set)
            self._release.wait()
            if not self._over:
                self._release.clear()
            apply(*args)

        monkeypatch.setattr(loading, "apply", held)

    async def watch(self) -> None:
        ledger = RedisLedger(self._client, self._keys)
        async with wakeups(self._client, self._keys) as waker:
            while True:
                await self._entered.wait()
                self._entered.clear()
                began = now = (await ledger.status()).trained
                while now < min(began + MEANWHILE, MANY_STEPS):
                    mark = waker.mark(*Topic)
                    now = (await ledger.status()).trained
                    await waker.wait(*Topic, since=mark, timeout_s=1.0)
                self.trained.append((began, now))
                self._release.set()

    @contextlib.asynccontextmanager
    async def engine(self, path: Path, index: int) -> AsyncIterator[None]:
        """One more engine in the run of `path`, here, registered before that begins; it ends with the run."""
        stop, registry = asyncio.Event(), Registry(self._client, self._keys)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.watch(), name="test:watch")
            tasks.create_task(run_host(load(EngineHostConfig, path), index, stop), name="test:host")
            try:
                while not await registry.engines():
                    await asyncio.sleep(0.05)
                yield
            finally:
                stop.set()
                self._over = True
                self._release.set()
                watching.cancel()


def up(path: Path) -> None:
    """To the run's end. One that does not come to it is ended, with all it started, and what everybody wrote is shown."""
    command = [sys.executable, "-m", "deploy.cli", "up", "--new", "-c", str(path)]
    with (path.parent / "up.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            code: int | None = process.wait(800)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.terminate()  # asked again, it ends everybody at once
            process.wait(20)
    logs = "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(path.parent.rglob("*.log")))
    assert code == 0, logs


@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("weights", "buffer", "most"),
    [
        ({"transport": "gloo"}, {"pipeline_depth": 0.0}, 0),
        ({"transport": "delta", "dtype": "bfloat16", "full_every": 4}, {"pipeline_depth": 1.0}, 4),
        ({"transport": "store", "store": "simplecache::file://{folder}/away"}, {"pipeline_depth": 0.0}, 0),
    ],
    ids=["gloo, on-policy", "delta in bfloat16", "behind a URL"],
)
def test_every_version_reaches_both_engines_by_the_transport_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: dict[str, Any], buffer: dict[str, Any], most: int
):
    path = write_run(tmp_path, weights, buffer)
    hold_back(path, monkeypatch, reward="tests.deploy.all_there:reward", engines=2)
    up(path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["disagreements"], summary["over_k_tokens"]) == (STEPS, 0, [], 0)
    assert summary["staleness"]["max"] <= most
    events = asyncio.run(read_audit(tmp_path / "run" / "audit.jsonl"))
    published = [event.fields["version"] for event in events if event.op == "published"]
    versions = [f"1:{n}" for n in range(STEPS + 1)]
    assert published == [version for version in versions if version in published]
    assert (published[0], published[-1]) == (versions[0], versions[-1])
    if most == 0:
        assert published == versions, "one that a newer overtakes may be passed over (rule W2); on-policy steps wait for theirs"
    applied: dict[str, list[str]] = defaultdict(list)
    ways: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if event.op == "applied":
            applied[str(event.fields["engine_id"])].append(str(event.fields["version"]))
            ways[str(event.fields["engine_id"])].add(str(event.fields["transport"]))
    assert set(applied) == {"t-engine-0", "t-engine-1"}
    assert all({weights["transport"]} <= way <= {weights["transport"], "store"} for way in ways.values()), (
        "what takes too long is left to the store for a while"
    )
    assert all(versions[-1] == published[-1] for versions in applied.values()), applied
    brought = set().union(*applied.values())
    assert brought <= set(published)
    if most == 0:
        assert brought == set(published), "so may an engine"
    kinds = [event.fields["kind"] for event in events if event.op == "published"]
    assert kinds[0] == "full"
    assert ("delta" in kinds) == (weights["transport"] == "delta")


@pytest.mark.demo
@pytest.mark.timeout(900)
async def test_an_on_policy_run_trains_nothing_stale_and_waits_for_no_engine_that_is_slow_to_update(
    tmp_path: Path, redis: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Each of the two may pause: a run whose engines go for the same version at once says so (docs/weights.md)."""
    path = write_run(tmp_path, {"max_paused": 2, "apply_deadline_s": 600.0}, {"pipeline_depth": 0.0}, steps=MANY_STEPS, engines=1, redis_url=redis_url)
    holding = Holding(redis, monkeypatch)
    async with holding.engine(path, 1):
        await asyncio.to_thread(up, path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["disagreements"], summary["over_k_tokens"]) == (MANY_STEPS, 0, [], 0)
    assert summary["staleness"]["max"] == 0
    events = await read_audit(tmp_path / "run" / "audit.jsonl")
    versions = [f"1:{n}" for n in range(MANY_STEPS + 1)]
    assert [event.fields["version"] for event in events if event.op == "published"] == versions
    applied: dict[str, list[str]] = defaultdict(list)
    for event in events:
        if event.op == "applied":
            applied[str(event.fields["engine_id"])].append(str(event.fields["version"]))
    quick, slow = applied["t-engine-0"], applied["t-engine-1"]
    assert {*quick, *slow} == set(versions), "a version is sampled from, or nothing is trained on-policy"
    assert quick[-1] == slow[-1] == versions[-1]
    assert len(slow) > 1, "it took part"
    assert any(now >= began + MEANWHILE for began, now in holding.trained), "steps were trained while it loaded one"
    assert len(slow) <= 2 + MANY_STEPS // MEANWHILE
