"""A round: somebody of a stand is killed twice, wherever it is and at a failpoint, and started again; then the verdict.

killed by chance ──► started, armed ──► killed at the failpoint ──► started ──► everybody serves what is newest
  └───────────── meanwhile every engine is asked what it serves and what it holds ──────────────┘
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.failpoints import Failpoint
from tests.faults.weight_stand import RELAY, SERVER, TRAINER, Stand
from tests.faults.weight_verdict import unfit_problems, watching

ENGINE_POINTS = (
    Failpoint.ENGINE_PREPARED,
    Failpoint.ENGINE_PAUSED,
    Failpoint.ENGINE_LOADED,
    Failpoint.ENGINE_RESUMED,
    Failpoint.ENGINE_ACKED,
)
SERVER_POINTS = (Failpoint.SERVER_STAGED, Failpoint.SERVER_GROUPED, Failpoint.SERVER_SENDING, Failpoint.SERVER_SENT)
RELAY_POINTS = (Failpoint.RELAY_READ, Failpoint.RELAY_WRITTEN, Failpoint.RELAY_RENAMED)
VERSION_POINTS = (
    Failpoint.VERSION_PART_WRITTEN,
    Failpoint.VERSION_WRITTEN,
    Failpoint.VERSION_RENAMED,
    Failpoint.VERSION_PUBLISHED,
    Failpoint.VERSION_DELETED,
)
KILLS = 2
"""In a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Who dies, and at which passing of which place."""

    role: str
    at: Failpoint
    nth: int = 1

    def __str__(self) -> str:
        return f"{self.role} at {self.at}:{self.nth}"


def _plans(role: str, points: Sequence[Failpoint]) -> list[WeightPlan]:
    return [WeightPlan(role=role, at=at, nth=_nth(at, 2)) for at in points]


def _nth(at: Failpoint, wanted: int) -> int:
    """A process group stays over many versions: who waits for another waits for somebody else to break."""
    return 1 if at is Failpoint.SERVER_GROUPED else wanted


CI_PLANS: dict[str, list[WeightPlan]] = {
    "gloo": [*_plans("engine-0", ENGINE_POINTS), *_plans(SERVER, SERVER_POINTS)],
    "delta": [*_plans("engine-1", ENGINE_POINTS), *_plans(RELAY, RELAY_POINTS), *_plans(TRAINER, VERSION_POINTS)],
}
"""Every phase of an update once, by each transport that somebody carries."""


def random_plan(rng: random.Random, transport: str, engines: int) -> WeightPlan:
    """Of a stand of this kind; the same for the same generator."""
    carrier = (SERVER, SERVER_POINTS) if transport == "gloo" else (RELAY, RELAY_POINTS)
    engine_points = ENGINE_POINTS if transport == "gloo" else ENGINE_POINTS + RELAY_POINTS  # without a relay, hosts do its work
    choices = [carrier, (TRAINER, VERSION_POINTS), *((f"engine-{index}", engine_points) for index in range(engines))]
    role, points = rng.choice(choices)
    at = rng.choice(points)
    return WeightPlan(role=role, at=at, nth=_nth(at, rng.randint(1, 3)))


async def run_round(stand: Stand, plan: WeightPlan) -> int:
    """How often an engine was found to hold what it served. Raises: `StandFailed` with everything that is wrong."""
    before = len(await stand.events())
    async with watching(stand) as watch:
        await stand.kill(plan.role)
        await stand.start(plan.role, plan.at, plan.nth)
        await stand.killed(plan.role)
        seen = await stand.newest()
        await stand.start(plan.role)
        await stand.converge(beyond=seen)
        try:
            await watch.settled()
        except TimeoutError:
            raise await stand.failure("an engine does not answer, will not say what it holds, or stays paused", *watch.problems) from None
    await stand.check_alive()
    problems = [*watch.problems, *unfit_problems(stand, (await stand.events())[before:], plan.role, KILLS)]
    if problems:
        raise await stand.failure(*problems)
    return watch.compared.total()
