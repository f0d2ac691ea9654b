"""The whole cluster is lost in the middle of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.summary import read_summary
from protocol.connection import Client
from protocol.keys import Keys
from tests.ray.conftest import Run, Simulated


@pytest.mark.timeout(1200)
async def test_a_run_outlives_its_cluster_as_redis_has_its_state(tmp_path: Path, redis: Client, keys: Keys, redis_url: str):
    first = Simulated()
    run = Run(tmp_path, redis, keys, redis_url, first.address)
    run.sections["placement"]["engine_gpus"] = 0
    run.sections["engine"]["count"] = run.sections["producer"]["count"] = 1
    run.sections["stop"]["steps"] = 26
    try:
        up = await run.up("--new")
        await run.trained(6)
    finally:
        first.close()
    up.kill()
    await up.wait()
    before = await run.ledger.status()
    assert before.outstanding > 0

    second = Simulated()
    try:
        run.sections["ray"]["address"] = run.address = second.address
        await run.up("--resume")
        said = await run.done("up")
        summary = read_summary(run.folder / "run")
        assert summary["steps"] == 26, said
        assert summary["groups_lost"] == 0
        assert summary["groups_duplicated"] == 0
        assert not summary["disagreements"]
        assert summary["incarnations"] >= 2
    finally:
        await run.close()
        second.close()
