"""A small real run by each transport that needs a carrier: `rollstream up` to its end, every version in both engines by that way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from buffer.audit import read_audit
from deploy.demo import task
from deploy.summary import read_summary
from protocol.messages import Event
from tests.producer.engine.conftest import write_model

STEPS = 6
SLOWER = 200
"""The slow engine takes so many times as long to load a version: longer than a step takes."""
MANY_STEPS = 30
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


@contextlib.contextmanager
def slow_engine(path: Path, index: int) -> Iterator[None]:
    """One more engine in the run of `path`, registered before that begins."""
    command = [sys.executable, "-m", "deploy.cli", "engine", "-c", str(path), "--index", str(index), "--set", f"engine.apply_delay_factor={SLOWER}"]
    log = path.parent / "slow.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        while "listens on" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait(20)


def up(path: Path) -> None:
    """To the run's end. One that does not come to it is ended, with all it started, and what everybody wrote is shown."""
    command = [sys.executable, "-m", "deploy.cli", "up", "--new", "-c", str(path)]
    with (path.parent / "up.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            code: int | None = process.wait(200)
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
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("weights", "buffer", "most"),
    [
        ({"transport": "gloo"}, {"pipeline_depth": 0.0}, 0),
        ({"transport": "delta", "dtype": "bfloat16", "full_every": 4}, {"pipeline_depth": 1.0}, 4),
        ({"transport": "store", "store": "simplecache::file://{folder}/away"}, {"pipeline_depth": 0.0}, 0),
    ],
    ids=["gloo, on-policy", "delta in bfloat16", "behind a URL"],
)
def test_every_version_reaches_both_engines_by_the_transport_of_the_run(tmp_path: Path, weights: dict[str, Any], buffer: dict[str, Any], most: int):
    path = write_run(tmp_path, weights, buffer)
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
    for event in events:
        if event.op == "applied":
            assert event.fields["transport"] == weights["transport"], event
            applied[str(event.fields["engine_id"])].append(str(event.fields["version"]))
    assert set(applied) == {"t-engine-0", "t-engine-1"}
    assert all(versions[-1] == published[-1] for versions in applied.values()), applied
    brought = set().union(*applied.values())
    assert brought <= set(published)
    if most == 0:
        assert brought == set(published), "so may an engine"
    kinds = [event.fields["kind"] for event in events if event.op == "published"]
    assert kinds[0] == "full"
    assert ("delta" in kinds) == (weights["transport"] == "delta")


@pytest.mark.demo
@pytest.mark.timeout(240)
def test_an_on_policy_run_trains_nothing_stale_and_waits_for_no_engine_that_is_slow_to_update(tmp_path: Path, redis_url: str):
    """Each of the two may pause: a run whose engines go for the same version at once says so (docs/weights.md)."""
    path = write_run(tmp_path, {"max_paused": 2}, {"pipeline_depth": 0.0}, steps=MANY_STEPS, engines=1, redis_url=redis_url)
    with slow_engine(path, 1):
        up(path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["disagreements"], summary["over_k_tokens"]) == (MANY_STEPS, 0, [], 0)
    assert summary["staleness"]["max"] == 0
    events = asyncio.run(read_audit(tmp_path / "run" / "audit.jsonl"))
    published = [event.at for event in events if event.op == "published"]
    assert len(published) == MANY_STEPS + 1
    updates: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.op == "applied":
            updates[str(event.fields["engine_id"])].append(event)
    quick, slow = updates["t-engine-0"], updates["t-engine-1"]
    assert len(slow) > 1, "it took part"
    assert median(_seconds(one) for one in slow) > 10 * median(_seconds(one) for one in quick), "or it was not slow"
    assert len(quick) == MANY_STEPS + 1 > len(slow)
    assert any(one.at - _seconds(one) < moment < one.at for one in slow for moment in published), "steps were trained while it loaded one"


def _seconds(event: Event) -> float:
    return float(str(event.fields["apply_s"]))
