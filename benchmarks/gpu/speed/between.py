"""Row `between`: the real trainer on a real Redis with groups always ready; what lies between the end of a step and the first kernel of the next.

    finish_step ends │ digest, witness, trained(s), metrics, open_step(s + 1) │ lease │ fetch, decode │ collate, pack │ first kernel
                     └────────────────────────────────────── gap ─────────────┴───────────────────────────────────────┘
                                                                              └──────────── lease to kernel ──────────┘

Versions are not published in between: the copy that publishing needs is measured by `benchmarks.gpu.weights`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.gpu.speed.workload import SIZES, model_folder, tell
from buffer.client import TrainerBuffer
from buffer.redis_ledger import RedisLedger
from consumer.config import TrainerDaemonConfig
from consumer.daemon import run_trainer
from consumer.torch_backend import TorchBackend
from deploy.redis_server import redis_server
from protocol.config import validate
from protocol.connection import connect
from protocol.identity import identify
from protocol.keys import Keys

_STEPS = {"1b": 7, "tiny": 4}
_GROUPS = {"1b": 16, "tiny": 4}
_UNCOUNTED = 2
"""Steps: kernels are compiled and memory is found in the first."""
LEASED: list[tuple[int, float]] = []
"""When the first chunk of a step was asked for."""


class Enough(Exception):
    """All steps are measured."""


@dataclasses.dataclass
class Times:
    first: float = 0.0
    """When the first forward of the step under way began; 0: it has not."""
    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)


class TimedBackend(TorchBackend):
    """Ends the run by an error after `STEPS`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._times = Times()

    def _logits(self, model: Any, part: Any) -> Any:
        times = getattr(self, "_times", None)
        if times is not None and not times.first:
            times.first = time.monotonic()
        return super()._logits(model, part)

    def finish_step(self, step: int, divisor: float) -> Any:
        report = super().finish_step(step, divisor)  # the device is idle when it returns
        times = self._times
        asked = max((at for number, at in LEASED if number == step), default=0.0)
        times.steps.append({"first": times.first, "asked": asked, "ended": time.monotonic(), "tokens": divisor})
        times.first = 0.0
        if len(times.steps) == _STEPS[os.environ["SPEED_SIZE"]]:
            told(times.steps, packed=self._packed)
            raise Enough
        return report


def told(steps: list[dict[str, float]], *, packed: bool) -> None:
    pairs = list(itertools.pairwise(steps))[_UNCOUNTED - 1 :]
    gaps = [after["first"] - before["ended"] for before, after in pairs]
    seconds = [after["ended"] - before["ended"] for before, after in pairs]
    asked = [after["first"] - after["asked"] for _, after in pairs]
    tell(
        "between",
        packed=packed,
        steps=len(pairs),
        gap_ms=[gap * 1e3 for gap in gaps],
        gap_share=statistics.median(gap / whole for gap, whole in zip(gaps, seconds, strict=True)),
        lease_to_kernel_ms=[one * 1e3 for one in asked],
        lease_share=statistics.median(one / whole for one, whole in zip(asked, seconds, strict=True)),
        step_s=seconds,
        tokens_in_loss=[after["tokens"] for _, after in pairs],
    )


def configured(folder: Path, url: str, size: str, device: str) -> TrainerDaemonConfig:
    sizes, groups = SIZES[size], _GROUPS[size]
    tables = {
        "run": {"name": f"speed-{uuid.uuid4().hex[:6]}", "dir": str(folder / "run"), "seed": 1},
        "redis": {"url": url},
        "model": {"path": str(model_folder(size))},
        "data": {"path": str(folder / "prompts.jsonl")},
        "rollout": {"group_size": sizes.group_size, "max_prompt_tokens": sizes.prompt[1], "max_new_tokens": sizes.response[1]},
        "buffer": {"groups_per_step": groups, "chunk_groups": max(1, groups // 4), "pipeline_depth": 2.0, "max_staleness": 1000},
        "weights": {"store": str(folder / "weights"), "publish_every": 1000, "dtype": "bfloat16"},
        "trainer": {
            "backend": "benchmarks.gpu.speed.between:TimedBackend",
            "device": device,
            "dtype": "bfloat16",
            "packing": "on",
            "micro_batch_tokens": sizes.micro_batch,
            "lr": 1e-6,
        },
        "checkpoint": {"every_seconds": 0.0, "every_steps": 1000, "dir": str(folder / "checkpoint")},
    }
    tables["buffer"]["byte_budget"] = 64 << 30  # never reached: the run ends after some steps
    config = validate(TrainerDaemonConfig, tables, source="speed")
    config.check()
    return config


async def run(size: str, device: str) -> None:
    lease = TrainerBuffer.lease

    async def noted(self: TrainerBuffer, step: int, chunk: int, *rest: Any) -> Any:
        if chunk == 0:
            LEASED.append((step, time.monotonic()))
        return await lease(self, step, chunk, *rest)

    TrainerBuffer.lease = noted  # type: ignore[method-assign]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=model_folder(size).parent)))
        (folder / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
        url = await stack.enter_async_context(redis_server(folder / "redis", appendfsync="no"))
        config = configured(folder, url, size, device)
        feed = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.gpu.speed.feed", url, config.run.name, size)
        try:
            client, keys = connect(url), Keys(config.run.name)
            identity = identify(config.run, config.model, config.data, config.rollout)
            try:
                await run_trainer(config, RedisLedger(client, keys), client, keys, asyncio.Event(), new_as=identity)
            except* Enough:
                pass
            finally:
                await client.aclose()
        finally:
            with contextlib.suppress(ProcessLookupError):
                feed.kill()
            await feed.wait()


def main(_: str, size: str, device: str) -> None:
    os.environ["SPEED_SIZE"] = size
    asyncio.run(run(size, device))
