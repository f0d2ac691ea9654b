"""The demo's reward, held back until what a run is to show has come about, however fast the machine is: after its first steps training waits until an
evaluation has begun, that one until a step was trained meanwhile, and training, some steps later, until it is recorded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from buffer.audit import read_audit
from deploy.demo import task
from producer.rewards import Reward, RewardSample

HELD_OUT, AUDIT, BEGAN = "HELD_BACK_HELD_OUT", "HELD_BACK_AUDIT", "HELD_BACK_BEGAN"
"""Variables with the paths of the held-out prompts, of the run's audit, and of the file that says an evaluation after the first has begun."""
FREE_STEPS = 4
"""So many steps, then an evaluation must have begun; so many more, then it must be over."""
STEPS = 16


async def reward(sample: RewardSample) -> Reward:
    """That of `task.reward`, late."""
    began = Path(os.environ[BEGAN])
    evaluations, trained = await _so_far()
    if str(sample.prompt) not in Path(os.environ[HELD_OUT]).read_text():
        await _until(lambda evaluations, trained: trained < FREE_STEPS or (began.exists() and (trained < 2 * FREE_STEPS or evaluations > 1)))
    elif evaluations and not began.exists():  # the first is over, and this is of the second
        began.touch()
        await _until(lambda _, now: now > trained)
    return await task.reward(sample)


async def _until(done: Callable[[int, int], bool]) -> None:
    while not done(*await _so_far()):
        await asyncio.sleep(0.5)


async def _so_far() -> tuple[int, int]:
    """Evaluations that are recorded, and the last step that was trained."""
    path = Path(os.environ[AUDIT])
    events = await read_audit(path) if path.exists() else []
    return sum(event.op == "eval" for event in events), max((int(event.fields["step"]) for event in events if event.op == "trained"), default=0)
