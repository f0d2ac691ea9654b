"""Rewards that are held back until every engine of a run listens: however late one comes, it has its part in the run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from deploy.demo import task
from producer.rewards import Reward, RewardSample

LOGS, ENGINES = "ALL_THERE_LOGS", "ALL_THERE_ENGINES"
"""Variables with the folder of the run's logs and the number of its engines."""


def hold_back(path: Path, monkeypatch: pytest.MonkeyPatch, *, reward: str, engines: int) -> None:
    """Give the run of `path` this function of rewards, which awaits `all_there`."""
    path.write_text(path.read_text().replace("deploy.demo.task:reward", reward).replace("[reward]", "[reward]\ntimeout_seconds = 600"))
    monkeypatch.setenv(LOGS, str(path.parent / "run" / "logs"))
    monkeypatch.setenv(ENGINES, str(engines))


async def all_there() -> None:
    while sum("listens on" in log.read_text() for log in Path(os.environ[LOGS]).glob("engine-*.log")) < int(os.environ[ENGINES]):
        await asyncio.sleep(0.2)


async def reward(sample: RewardSample) -> Reward:
    """The demo's."""
    await all_there()
    return await task.reward(sample)
