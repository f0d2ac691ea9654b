"""The weight server's device by transport, trainer and engines."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from deploy import checks
from deploy.checks import check_carrier
from deploy.config import UpConfig
from deploy.up import server_device as module
from deploy.up.plan import plan
from deploy.up.server_device import server_device, shared_gpu
from deploy.up.supervisor import Child, Role
from protocol.config import validate
from protocol.errors import ConfigError

SGLANG = {"kind": "sglang"}


def config(transport: str, trainer: str, **engine: object) -> UpConfig:
    sections: dict[str, Any] = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"path": "d"}}
    sections |= {"weights": {"transport": transport, "bucket_mb": 256}, "trainer": {"device": trainer}, "engine": engine}
    if evals := engine.pop("evals", 0):
        sections["eval"] = {"path": "e", "engines": evals}
    return validate(UpConfig, sections, source="test")


@pytest.mark.parametrize(
    ("transport", "trainer", "engine", "device"),
    [
        ("store", "cuda:0", SGLANG, ""),
        ("delta", "cuda:0", SGLANG, ""),
        ("gloo", "cpu", {}, "cpu"),
        ("gloo", "cuda:1", SGLANG, "cpu"),
        ("nccl", "cuda:1", SGLANG, "cuda:1"),
        ("nccl", "cuda", {**SGLANG, "gpu": 1}, "cuda:0"),
        ("nccl", "cuda:3", {**SGLANG, "gpu": 0, "count": 2}, "cuda:3"),
        ("nccl", "cuda:0", SGLANG, "cuda:1"),
        ("nccl", "cuda:0", {**SGLANG, "count": 2, "tp": 2}, "cuda:4"),
        ("nccl", "cuda:0", {**SGLANG, "count": 2, "tp": 2, "args": ["--pp-size", "2"]}, "cuda:8"),
        ("nccl", "cpu", {**SGLANG, "gpu": 1, "count": 2}, "cuda:0"),
        ("nccl", "cpu", {**SGLANG, "count": 1, "evals": 2}, "cuda:3"),
        ("nccl", "cpu", {**SGLANG, "device": "cpu"}, "cuda:0"),
        ("ipc", "cuda:0", SGLANG, "cuda:0"),
        ("ipc", "cuda:0", {**SGLANG, "gpu": 1}, "cuda:1"),
        ("ipc", "cuda:2", {**SGLANG, "gpu": 1, "count": 2}, "cuda:2"),
        ("ipc", "cpu", {**SGLANG, "gpu": 2}, "cuda:2"),
        ("ipc", "cuda:1", {}, "cuda:1"),
    ],
)
def test_it_sends_from_where_the_snapshot_lies_if_the_transport_can(transport: str, trainer: str, engine: dict[str, object], device: str):
    found = config(transport, trainer, **engine)
    assert server_device(found) == device
    argv = plan(found, Path("run.toml"), (), redis=None).argv(Child(Role.WEIGHT_SERVER))
    assert argv[-2:] == ("--device", device) if device else "--device" not in argv


def test_a_gpu_that_is_not_there_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    one_gpu = config("nccl", "cuda:0", **SGLANG)
    monkeypatch.setattr(checks, "_COUNT_GPUS", "print(1)")
    with pytest.raises(ConfigError, match=r"would send from cuda:1, and torch sees 1 here.*no engine's"):
        check_carrier(one_gpu.weights, one_gpu.run, device=server_device(one_gpu))
    beside = config("ipc", "cuda:0", **SGLANG)
    check_carrier(beside.weights, beside.run, device=server_device(beside))


def test_the_examples_hold():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("trainer", "engine", "shared"),
    [("cuda:0", SGLANG, True), ("cuda:3", {**SGLANG, "count": 2, "tp": 2}, True), ("cuda:1", SGLANG, False), ("cpu", SGLANG, False), ("cuda:0", {}, False)],
)
def test_a_gpu_that_trainer_and_engines_share_is_told(trainer: str, engine: dict[str, object], shared: bool):
    assert bool(shared_gpu(config("store", trainer, **engine))) is shared
