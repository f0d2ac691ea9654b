"""Which rounds there are: one for every place where a process can die, and any number by seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from protocol.failpoints import Failpoint
from tests.faults.rounds import CHUNK, PRODUCERS, STEPS, TRAINER, B, Kill
from tests.faults.weight_rounds import ENGINE_POINTS, RELAY_POINTS, SERVER_POINTS, VERSION_POINTS

TRAINER_POINTS: Mapping[Failpoint, int] = {
    Failpoint.TRAINER_CREATED: 1,
    Failpoint.TRAINER_BEFORE_ATTACH: 1,
    Failpoint.TRAINER_ATTACHED: 1,
    Failpoint.TRAINER_STEP_OPENED: 10,
    Failpoint.TRAINER_CHUNK_LEASED: 20,
    Failpoint.TRAINER_CHUNK_FETCHED: 20,
    Failpoint.TRAINER_ACCUMULATED: 20,
    Failpoint.TRAINER_BEFORE_OPTIMIZER: 10,
    Failpoint.TRAINER_STEPPED: 10,
    Failpoint.TRAINER_WITNESSED: 12,
    Failpoint.TRAINER_TRAINED: 12,
    Failpoint.TRAINER_BEFORE_DRAIN: 1,
    Failpoint.TRAINER_DRAINED: 1,
    Failpoint.VERSION_WRITTEN: 6,
    Failpoint.VERSION_RENAMED: 6,
    Failpoint.VERSION_PUBLISHED: 6,
    Failpoint.VERSION_DELETED: 2,
    Failpoint.CHECKPOINT_PART_WRITTEN: 3,
    Failpoint.CHECKPOINT_WRITTEN: 3,
    Failpoint.CHECKPOINT_RENAMED: 3,
    Failpoint.CHECKPOINT_REGISTERED: 3,
    Failpoint.AUDIT_APPENDED: 1,
}
"""How often a trainer passes each in any round, at least: up to there one may be killed."""
PRODUCER_POINTS: Mapping[Failpoint, int] = {
    Failpoint.PRODUCER_RESERVED: 6,
    Failpoint.PRODUCER_MADE: 6,
    Failpoint.PRODUCER_PUT: 5,
    Failpoint.PRODUCER_BEFORE_RELEASE: 1,
    Failpoint.PRODUCER_RELEASED: 1,
    Failpoint.PRODUCER_BEFORE_GIVE_BACK: 1,
    Failpoint.PRODUCER_RENEWED: 1,
}


SPILL_POINTS: Mapping[Failpoint, int] = {Failpoint.SPILL_WRITTEN: 1, Failpoint.SPILL_SPILLED: 1}
"""With buffer.spill: what the oldest kept checkpoint covers goes there, at the latest as the trainer leaves."""
WEIGHT_POINTS = frozenset({*ENGINE_POINTS, *SERVER_POINTS, *RELAY_POINTS, *VERSION_POINTS})
"""Those of updates have rounds of their own."""
ELSEWHERE = frozenset(
    {Failpoint.PRODUCER_SET, Failpoint.TRAINER_BEFORE_REASSERT, Failpoint.TRAINER_REASSERTING, Failpoint.TRAINER_REASSERTED},
)
"""Passed only by whoever is first to put, and where Redis lost writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a round is to be: arguments of `Round`."""

    kills: tuple[Kill, ...] = ()
    chance: int = 0
    seed: int = 0
    lose: int = 0
    must_kill: bool = True
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(map(str, self.kills)) or f"seed {self.seed}"

    def arguments(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


def every_point() -> list[Plan]:
    """One kill a round: of the process itself at every failpoint it passes, about half way through the run."""
    own = [Kill(role=TRAINER, at=at, nth=(most + 1) // 2) for at, most in TRAINER_POINTS.items()]
    own += [Kill(role=PRODUCERS[i % 2], at=at, nth=(most + 1) // 2) for i, (at, most) in enumerate(PRODUCER_POINTS.items())]
    spilling = [Plan(kills=(Kill(role=TRAINER, at=at, nth=most),), changes={"buffer": {"spill": "spill"}}) for at, most in SPILL_POINTS.items()]
    return [*(Plan(kills=(kill,)) for kill in own), *spilling]


def redis_points() -> list[Plan]:
    """As above, but Redis dies there: between each write of the trainer and the next, and under producers."""
    points = (
        (TRAINER, Failpoint.TRAINER_ATTACHED, 1),
        (TRAINER, Failpoint.TRAINER_STEP_OPENED, 4),
        (TRAINER, Failpoint.TRAINER_CHUNK_LEASED, 9),
        (TRAINER, Failpoint.TRAINER_WITNESSED, 6),
        (TRAINER, Failpoint.TRAINER_TRAINED, 5),
        (TRAINER, Failpoint.VERSION_RENAMED, 3),
        (TRAINER, Failpoint.CHECKPOINT_RENAMED, 2),
        (TRAINER, Failpoint.AUDIT_APPENDED, 1),
        (TRAINER, Failpoint.TRAINER_BEFORE_DRAIN, 1),
        (PRODUCERS[0], Failpoint.PRODUCER_RESERVED, 5),
        (PRODUCERS[1], Failpoint.PRODUCER_MADE, 4),
        (PRODUCERS[0], Failpoint.PRODUCER_PUT, 4),
        (PRODUCERS[1], Failpoint.PRODUCER_BEFORE_GIVE_BACK, 1),
    )
    return [Plan(kills=(Kill(role=role, at=at, nth=nth, redis=True),)) for role, at, nth in points]


def random_plan(seed: int) -> Plan:
    """Settings, kills and times by chance; the same for the same seed."""
    rng = random.Random(seed)
    depth = rng.choice((0.0, 0.5, 1.0, 1.0, 2.0))
    changes: dict[str, dict[str, Any]] = {
        "buffer": {
            "pipeline_depth": depth,
            "max_staleness": rng.choice((1, 2, 4)),
            "staleness_guard": rng.choice(("mask", "drop")),
            "chunk_groups": rng.choice((1, 2, 3, 4)),
            "selection": rng.choice(("oldest", "freshest", "fifo")),
            "retention": rng.choice((0, 0, 2)),
        },
        "checkpoint": {"every_steps": rng.choice((1, 2, 3, 5)), "keep": rng.choice((2, 3))},
        "weights": {"publish_every": 1 if depth == 0 else rng.choice((1, 1, 2))},
    }
    if rng.random() < 0.4:
        changes["buffer"]["spill"] = "spill"
    if rng.random() < 0.3:
        changes["buffer"] |= {"blobs": "blobs", "blob_bytes": 16}
    points = [(role, at, most) for role in (TRAINER, *PRODUCERS) for at, most in (TRAINER_POINTS if role == TRAINER else PRODUCER_POINTS).items()]
    kills = [Kill(role=role, at=at, nth=rng.randint(1, most)) for role, at, most in rng.choices(points, k=rng.randint(0, 4))]
    chance = 0 if kills and rng.random() < 0.5 else rng.randint(1, 5)
    if kills and not chance and rng.random() < 0.5:  # one: whoever is to kill it is told its number when it starts
        kills[0] = replace(kills[0], redis=True)
    return Plan(kills=tuple(kills), chance=chance, seed=seed, must_kill=False, changes=changes)


STEP_BYTES = 26_000
"""What a step of a round adds to the log of Redis, about."""


def loss_plan(seed: int) -> Plan:
    """Redis is killed in the midst of the run and comes back without its last writes, up to several steps of them; perhaps the trainer dies at the same time,
    over mending it, or both.
    """
    rng = random.Random(seed)
    step = rng.randint(4, STEPS - 2)
    per_step = {Failpoint.TRAINER_CHUNK_LEASED: B // CHUNK, Failpoint.TRAINER_CHUNK_FETCHED: B // CHUNK, Failpoint.TRAINER_ACCUMULATED: B // CHUNK}
    during = rng.choice((*per_step, Failpoint.TRAINER_STEP_OPENED, Failpoint.TRAINER_STEPPED, Failpoint.TRAINER_WITNESSED, Failpoint.TRAINER_TRAINED))
    at_step = Kill(role=TRAINER, at=during, nth=step * per_step.get(during, 1))
    by_a_producer = Kill(role=PRODUCERS[0], at=Failpoint.PRODUCER_PUT, nth=2 * step, redis=True)
    over_mending = Kill(role=TRAINER, at=rng.choice((Failpoint.TRAINER_BEFORE_REASSERT, Failpoint.TRAINER_REASSERTING, Failpoint.TRAINER_REASSERTED)))
    kills = rng.choice(((replace(at_step, redis=True),), (by_a_producer, over_mending), (by_a_producer, at_step), (by_a_producer, at_step, over_mending)))
    changes = {"checkpoint": {"every_steps": rng.choice((1, 2, 3, 5))}, "buffer": {"pipeline_depth": rng.choice((0.0, 1.0))}}
    return Plan(kills=kills, seed=seed, lose=rng.randint(500, STEP_BYTES * (step - 2)), must_kill=False, changes=changes)
