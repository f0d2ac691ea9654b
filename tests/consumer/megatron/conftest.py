"""Two processes do all the jobs of these tests, alone and then together; each test looks at what they found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.consumer.megatron.recorded import MODELS, RECORDED, Job, save_models, save_recording

_REPOSITORY = Path(__file__).parents[3]
_LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sp": True},
    "pp2": {"pp": 2},
    "dp2": {"distributed_optimizer": False},
    "dp2-distributed": {},
    "pp2-recompute": {"pp": 2, "recompute": "full"},
}
DEADLINE_S = 500
"""Of all jobs, on a machine that has much else to do."""
LOOKED_AT = ("tp1", "tp2", "tp2-sp", "pp2")
TRAINED = [("qwen3-tied", layout) for layout in _LAYOUTS] + [(model, layout) for model in ("llama", "qwen2-tied") for layout in ("tp2", "pp2")]
AGREED = [(model, "all") for model in RECORDED] + [("qwen3-tied", "ppo_clip"), ("qwen3-tied", "distillation")]
TAUGHT = ("tp2-sp", "pp2", "dp2-distributed")


def jobs() -> list[Job]:
    found = [Job(name=f"look-{model}-tp1", model=model, ranks=1) for model in MODELS]
    found += [Job(name=f"{what}-{model}-{loss}", model=model, ranks=1, what=what, loss=loss) for model, loss in AGREED for what in ("torch", "train")]
    found += [Job(name=f"train-{model}-all-{name}", model=model, ranks=2, what="train", layout=_LAYOUTS[name], loss="all") for model, name in TRAINED]
    found += [
        Job(name=f"train-qwen3-tied-distillation-{name}", model="qwen3-tied", ranks=2, what="train", layout=_LAYOUTS[name], loss="distillation")
        for name in TAUGHT
    ]
    found += [Job(name=f"look-{model}-{layout}", model=model, ranks=2, layout=_LAYOUTS[layout]) for model in MODELS for layout in LOOKED_AT[1:]]
    return [
        *found,
        Job(name="train-qwen3-tied-ppo_clip-bf16", model="qwen3-tied", ranks=1, what="train", trainer={"dtype": "bfloat16"}),
        Job(name="train-qwen3-tied-ppo_clip-bf16-tp2", model="qwen3-tied", ranks=2, what="train", layout={"tp": 2}, trainer={"dtype": "bfloat16"}),
        Job(name="resume-dp2", model="qwen3-tied", ranks=2, what="resume", layout={}),
        Job(name="resume-tp2", model="qwen2-tied", ranks=2, what="resume", layout={"tp": 2, "distributed_optimizer": False}),
        Job(name="resume-pp2-bf16", model="qwen3-tied", ranks=2, what="resume", layout={"pp": 2}, trainer={"dtype": "bfloat16"}),
        Job(name="logprobs", model="", ranks=2, what="logprobs"),
        Job(name="refuse-experts", model="experts", ranks=1, what="refuse"),
        Job(name="refuse-ranks", model="llama", ranks=2, what="refuse", layout={"tp": 2, "pp": 2}),
    ]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of model folders, and of recordings."""
    folder = tmp_path_factory.mktemp("megatron")
    save_models(folder)
    for model in RECORDED:
        save_recording(folder, model)
    (folder / "experts").mkdir()
    (folder / "experts" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


@pytest.fixture(scope="session")
def found(models: Path) -> Callable[[str], dict[str, Any]]:
    """What rank 0 found, by the name of the job."""
    (models / "jobs.json").write_text(json.dumps([dataclasses.asdict(job) for job in jobs()]))
    asyncio.run(_run(models))

    def look(name: str) -> dict[str, Any]:
        read: dict[str, Any] = torch.load(models / f"{name}.pt", weights_only=False)
        return read

    return look


async def _run(folder: Path) -> None:
    """Both processes to their end; one that fails ends the other."""
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        for rank in range(2):
            group.create_task(_rank(folder, rank))


async def _rank(folder: Path, rank: int) -> None:
    log = folder / f"rank-{rank}.log"
    command = [sys.executable, "-m", "tests.consumer.megatron.ranks", str(folder), str(rank)]
    with log.open("wb") as told:
        process = await asyncio.create_subprocess_exec(*command, cwd=_REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=told, stderr=told)
    try:
        assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
