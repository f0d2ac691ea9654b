"""A small real run that trains an adapter: `rollstream up` to its end, by both ways of publishing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from buffer.audit import read_audit
from deploy.cli import main
from deploy.summary import read_summary
from producer.rewards import RewardSample
from tests.deploy.all_there import all_there, hold_back
from tests.deploy.test_up_transports import STEPS, up, write_run
from weightsync.safetensors_file import open_model
from weightsync.snapshot import weights_digest

CLOSE = 1e-4
"""Nats between the trainer's logprob of a token and the engine's, at the same version."""


async def reward(sample: RewardSample) -> float:
    """Differs among the responses of a random model, so that every step has something to learn."""
    await all_there()
    return float(sum(token % 2 for token in sample.response_ids))


@pytest.mark.demo
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("publish", "kind", "transport", "ranks"), [("adapter", "adapter", "adapter", 1), ("adapter", "adapter", "adapter", 2), ("merged", "full", "store", 2)]
)
def test_versions_of_an_adapter_reach_both_engines_and_each_token_has_the_trainers_logprob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: str, kind: str, transport: str, ranks: int
):
    path = write_run(tmp_path, {}, {"pipeline_depth": 0.0})
    lora = {"rank": 4, "publish": publish, "use_rslora": True}
    hold_back(path, monkeypatch, reward="tests.deploy.test_lora_run:reward", engines=2)
    settings = path.read_text().replace("[trainer]\n", f"[trainer]\nranks = {ranks}\n")
    path.write_text(settings + "[lora]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lora.items()))
    up(path)
    summary = read_summary(tmp_path / "run")
    assert (summary["steps"], summary["groups_lost"], summary["disagreements"], summary["staleness"]["max"]) == (STEPS, 0, [], 0)
    events = asyncio.run(read_audit(tmp_path / "run" / "audit.jsonl"))
    published = [event.fields for event in events if event.op == "published"]
    assert [(str(one["version"]), one["kind"]) for one in published] == [(f"1:{n}", kind) for n in range(STEPS + 1)]
    assert len({one["digest"] for one in published}) == STEPS + 1, "the adapter moves"
    applied = [event.fields for event in events if event.op == "applied"]
    assert {(one["engine_id"], one["transport"]) for one in applied} == {("t-engine-0", transport), ("t-engine-1", transport)}
    assert all((one["pause_s"] == 0) == (publish == "adapter") for one in applied), "no engine stands still for an adapter"
    assert not [event for event in events if event.op == "unfit"]
    steps: list[dict[str, Any]] = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert max(step["logprob_diff_p99"] for step in steps) < CLOSE
    saved = {file.name for file in (tmp_path / "run" / "checkpoint").glob("step-*/*/*.safetensors")}
    assert saved == (
        {"adapter_model.safetensors"} if ranks == 1 else {f"{what}-0000{rank}-of-00002.safetensors" for what in ("weights", "optimizer") for rank in (1, 2)}
    )
    out = tmp_path / "exported"
    assert main(["export-model", "-c", str(path), "--checkpoint", "latest", "--out", str(out)]) == 0
    with open_model(out) as tensors, open_model(tmp_path / "model") as base:
        assert (weights_digest(tensors) == published[-1]["digest"]) == (publish == "merged")
        assert {name: one.shape for name, one in tensors.items()} == {name: one.shape for name, one in base.items()}
        assert weights_digest(tensors) != weights_digest(base)
