"""First rollouts without a trainer, from a real engine; then training on them without Redis, producer or engine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from buffer.recording import Recording
from buffer.redis_ledger import RedisLedger
from deploy.demo import folder as folders
from deploy.demo.warm_start import warm_start
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import Reason
from protocol.objects import object_store
from protocol.versions import Version

ROOT = Path(__file__).parents[2]
GROUPS = 24


async def command(folder: Path, name: str, *words: str) -> asyncio.subprocess.Process:
    with (folder / f"{name}.log").open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return await asyncio.create_subprocess_exec(sys.executable, "-m", *words, cwd=ROOT, stdout=log, stderr=log, env=environment)


async def ended(folder: Path, name: str, process: asyncio.subprocess.Process) -> None:
    assert await process.wait() == 0, (folder / f"{name}.log").read_text()[-3000:]


@pytest.mark.demo
@pytest.mark.redis
@pytest.mark.timeout(900)
async def test_what_an_engine_sampled_without_a_trainer_trains_a_model_later(tmp_path: Path, redis: Client, keys: Keys, redis_url: str) -> None:
    demo = folders.Demo(folder=tmp_path / "demo", seed=3, steps=3)
    folders.claim(demo)
    folders.fill(demo)
    await asyncio.to_thread(warm_start, demo.model, demo.seed, steps=1)
    settings = [f"run.name={keys.run}", f"run.dir={tmp_path / 'run'}", "buffer.groups_per_step=8", "eval.path=''", f"weights.store={tmp_path / 'weights'}"]
    options = ["-c", str(demo.config), *(word for one in settings for word in ("--set", one))]
    where = str(tmp_path / "rollouts")

    engine = await command(tmp_path, "engine", "deploy.cli", "engine", *options, "--set", f"redis.url={redis_url}")
    try:
        producer = await command(
            tmp_path, "producer", "producer.main", *options, "--set", f"redis.url={redis_url}", "--rollout-only", where, "--groups", str(GROUPS)
        )
        await ended(tmp_path, "producer", producer)
        await ended(tmp_path, "engine", engine)
    finally:
        if engine.returncode is None:
            engine.kill()
            await engine.wait()
    groups = list(Recording(object_store(where, key="--rollout-only")).groups())
    assert len(groups) == GROUPS
    assert {version for group in groups for version in group.header.trainable} == {Version(1, 0)}
    status = await RedisLedger(redis, keys).status()
    assert (status.trained, status.dead[Reason.RECORDED]) == (0, GROUPS)

    trainer = await command(tmp_path, "trainer", "consumer.main", *options, "--set", "redis.url=''", "--recorded", where)
    await ended(tmp_path, "trainer", trainer)
    lines = [json.loads(line) for line in (tmp_path / "run" / "recorded" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["groups"]) for line in lines] == [(1, 8), (2, 8), (3, 8)]
    assert lines[0]["ratio_dev"] < 1e-3, "the first step trains the very policy that sampled"
    assert (tmp_path / "run" / "recorded" / "checkpoint" / "step-000003-2" / "model" / "model.safetensors").is_file()
