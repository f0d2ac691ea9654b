"""Who has which GPU in a measured run, and the run's configuration. Pure.

| layout | GPUs | trainer and engine |
| --- | --- | --- |
| neighbours | 1 | beside each other on one GPU, both all the time; SGLang's memory is bounded |
| turns | 1 | one after the other on one GPU (`placement.layout` colocated): on-policy, D = 0 |
| apart | 2 | the trainer on the first GPU given, the engine on the second |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

ENGINE_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-custom-all-reduce"),
    "--disable-radix-cache",  # without it a server of 0.5.17 is paused by abort, whatever was asked for
    *("--mem-fraction-static", "0.2", "--max-total-tokens", "262144", "--stream-interval", "8"),
)
"""Of SGLang on a GPU. One event for each token of 256 streams would be most of what its HTTP process does."""


class Layout(StrEnum):
    NEIGHBOURS = "neighbours"
    TURNS = "turns"
    APART = "apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much there is to do; the fields are the configuration's."""

    groups_per_step: int
    group_size: int
    max_new_tokens: int
    slots: int
    producers: int
    held_out: int
    eval_seconds: float
    streams: int
    stream_tokens: int


FULL = Scale(groups_per_step=64, group_size=8, max_new_tokens=32, slots=256, producers=4, held_out=128, eval_seconds=45.0, streams=8, stream_tokens=192)
DRY = Scale(groups_per_step=2, group_size=2, max_new_tokens=12, slots=6, producers=1, held_out=2, eval_seconds=600.0, streams=1, stream_tokens=32)
"""For a CPU, where a step of even this takes most of a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run. Paths are absolute."""

    name: str
    """Of the run, of its folders and of its results"""
    layout: Layout
    pause: str
    transport: str
    engine: str
    """sglang or embedded"""
    device: str
    """cuda or cpu"""
    engine_python: str
    flags: tuple[str, ...]
    lr: float
    steps: int
    """0: by time alone."""
    train_seconds: float
    scale: Scale
    folder: Path
    store: Path
    """In shared memory: versions, and checkpoints too."""
    model: Path
    train: Path
    held_out: Path


def visible(layout: Layout, gpus: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES: what is first there is the trainer's. Raises: `ValueError` for another number of GPUs than the layout has."""
    wanted = 2 if layout is Layout.APART else 1
    if len(gpus) != wanted or len(set(gpus)) != wanted:
        raise ValueError(f"layout {layout} needs {wanted} of --gpus, got {','.join(map(str, gpus))}")
    return ",".join(map(str, gpus))


def configuration(run: Measured) -> dict[str, dict[str, Any]]:
    """The sections of run.toml."""
    scale, on_gpu, turns = run.scale, run.device == "cuda", run.layout is Layout.TURNS
    return {
        "run": {"name": run.name, "dir": str(run.folder)},
        "model": {"path": str(run.model)},
        "data": {"path": str(run.train)},
        "rollout": {"group_size": scale.group_size, "max_prompt_tokens": 192, "max_new_tokens": scale.max_new_tokens},
        "reward": {"kind": "function", "function": "benchmarks.gpu.arithmetic:reward"},
        "eval": {"path": str(run.held_out), "samples": scale.held_out, "every_seconds": scale.eval_seconds, "final_deadline_seconds": 15.0},
        "buffer": {"groups_per_step": scale.groups_per_step, "pipeline_depth": 0.0 if turns else 1.5, "max_staleness": 8},
        "weights": {
            "store": str(run.store / "versions"),
            "transport": run.transport,
            "dtype": "bfloat16",
            "pause_mode": run.pause,
            "keep": 16,  # the newest versions are what sampled tokens are judged by afterwards
        },
        "engine": _engine(run),
        "producer": {"count": scale.producers, "max_inflight_groups": 2 * scale.groups_per_step},
        "trainer": {
            "lr": run.lr,
            "device": "cuda:0" if on_gpu else "cpu",
            "dtype": "bfloat16" if on_gpu else "float32",
            "micro_batch_tokens": 16384 if on_gpu else 2048,
            "torch_threads": 4 if on_gpu else 1,
        },
        "checkpoint": {"every_seconds": 0.0, "dir": str(run.store / "checkpoints")},
        "stop": {"steps": run.steps, "seconds": run.train_seconds},
        "http": {"port": 0},
        "placement": {"layout": "colocated" if turns else "disaggregated"},
    }


def _engine(run: Measured) -> dict[str, Any]:
    common = {"kind": run.engine, "slots": run.scale.slots}
    if run.engine == "embedded":
        return common
    if run.device == "cpu":
        return common | {"device": "cpu", "python": run.engine_python, "args": list(run.flags)}
    graphs = ("--cuda-graph-max-bs-decode", str(run.scale.slots))
    gpu = int(run.layout is Layout.APART)
    return common | {"gpu": gpu, "python": run.engine_python, "args": [*ENGINE_ARGS, *graphs, *run.flags], "torch_threads": 4, "start_seconds": 240.0}


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Strings, numbers, truth values and lists of them look alike in JSON and TOML."""
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) for name, keys in sections.items())
