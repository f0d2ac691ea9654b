"""`rollstream up` with engines that do nothing but evaluate: each evaluation is of one version, and training goes on meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from buffer.audit import read_audit
from deploy.demo import task
from deploy.summary import read_summary
from tests.deploy import held_back
from tests.deploy.held_back import STEPS
from tests.deploy.test_up_transports import up, write_run


@pytest.mark.demo
@pytest.mark.timeout(1500)
def test_a_fleet_of_its_own_evaluates_one_version_at_a_time_while_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_run(tmp_path, {"transport": "store"}, {"pipeline_depth": 1.0})
    _, held_out = task.write_data(tmp_path, 0)
    text = path.read_text().replace("steps = 6", f"steps = {STEPS}").replace("count = 2\nslots", "count = 1\nslots")
    text = text.replace("deploy.demo.task:reward", "tests.deploy.held_back:reward").replace("[reward]", "[reward]\ntimeout_seconds = 200")
    monkeypatch.setenv(held_back.HELD_OUT, str(held_out))
    monkeypatch.setenv(held_back.AUDIT, str(tmp_path / "run" / "audit.jsonl"))
    monkeypatch.setenv(held_back.BEGAN, str(tmp_path / "began"))
    path.write_text(f'{text}[eval]\npath = "{held_out}"\nengines = 1\nevery_seconds = 0.5\nsamples = 12\n')
    up(path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["disagreements"]) == (STEPS, 0, [])
    events = asyncio.run(read_audit(tmp_path / "run" / "audit.jsonl"))
    evals = [event.fields for event in events if event.op == "eval"]
    assert {one["phase"] for one in evals} == {"first", "periodic", "final"}
    assert all(one["pinned"] and one["versions"] == [one["version"]] and one["failed"] == 0 for one in evals)
    assert evals[-1]["version"] == f"1:{STEPS}"
    trained = 0
    behind = []
    for event in events:
        trained = int(event.fields["step"]) if event.op == "trained" else trained
        behind += [trained - int(event.fields["version"].partition(":")[2])] if event.op == "eval" else []
    assert max(behind) > 0, "steps were trained while an evaluation was under way"
    served = {str(event.fields["engine_id"]): event.fields["version"] for event in events if event.op == "applied"}
    assert set(served) == {"t-engine-0", "t-engine-1"}
