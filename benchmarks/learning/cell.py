"""One run of the comparison: which loss, how stale, which seed; its configuration. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deploy.demo import task

_ON = 1.0
LOSSES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "default": {},
    "trust_region": {"kind": "trust_region"},
    "tis": {"kind": "truncated_is", "ratio_cap": 2.0},
    "naive": {"kind": "cispo", "ratio_floor": _ON - 1e-6, "ratio_cap": _ON},
})  # fmt: skip
"""Their [loss] sections. Naive, the policy gradient without any importance weight, is CISPO with the weight held at 1."""
GROUPS, GROUP_SIZE, LEARNING_RATE = 32, 8, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    loss: str
    staleness: int
    """Steps."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss}-{self.staleness}-{self.seed}"


def configuration(cell: Cell, *, steps: int, folder: Path, model: Path, train: Path, held_out: Path) -> dict[str, dict[str, Any]]:
    """The sections of run.toml: those of the demo but for what forces the staleness, at a learning rate that puts the naive loss at risk.

    D = K = s, and the trainer waits (`lockstep`). One engine and one producer: what more of them add is another order of groups.
    """
    return {
        "run": {"name": cell.name, "seed": cell.seed, "dir": str(folder)},
        "redis": {"appendfsync": "no"},
        "model": {"path": str(model)},
        "data": {"path": str(train)},
        "rollout": {"group_size": GROUP_SIZE, "max_prompt_tokens": 16, "max_new_tokens": task.MAX_NEW_TOKENS, "temperature": 1.0},
        "reward": {"kind": "function", "function": "deploy.demo.task:reward"},
        "eval": {"path": str(held_out), "every_seconds": 1e6, "samples": task.HELD_OUT_ROWS, "concurrency": task.HELD_OUT_ROWS},
        "buffer": {"groups_per_step": GROUPS, "chunk_groups": GROUPS, "pipeline_depth": float(cell.staleness), "max_staleness": cell.staleness},
        "weights": {"publish_every": 1},
        "engine": {"kind": "embedded", "count": 1, "torch_threads": 1, "slots": GROUPS * GROUP_SIZE},
        "producer": {"count": 1, "max_inflight_groups": GROUPS, "stream": False},
        "trainer": {"backend": "benchmarks.learning.lockstep:Lockstep", "lr": LEARNING_RATE, "torch_threads": 1},
        "loss": dict(LOSSES[cell.loss]),
        "checkpoint": {"every_seconds": 0.0},
        "stop": {"steps": steps},
        "http": {"port": 0},
    }


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Strings, numbers, truth values and lists of them look alike in JSON and TOML."""
    return "\n".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) for name, keys in sections.items())
