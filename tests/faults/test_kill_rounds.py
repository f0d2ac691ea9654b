"""Whole runs of real processes, somebody killed with -9 in each, judged by witness, audit, weights and keys (`verdict.py`)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.failpoints import Failpoint
from tests.consumer.conftest import save_model
from tests.faults.nursery import nursery
from tests.faults.plans import SPILL_POINTS, Plan, every_point, loss_plan, random_plan
from tests.faults.rounds import PRODUCERS, STEPS, TRAINER, Kill, Round
from tests.faults.verdict import judge

pytestmark = pytest.mark.faults

SPILLING = {"buffer": {"spill": "spill", "pipeline_depth": 1.0}, "checkpoint": {"every_steps": 1}}
WITH_REDIS = (Failpoint.TRAINER_CHUNK_LEASED, Failpoint.TRAINER_WITNESSED, Failpoint.TRAINER_TRAINED, Failpoint.CHECKPOINT_RENAMED)
PLANS = [
    *every_point(),
    *(Plan(kills=(Kill(role=TRAINER, at=at),), changes=SPILLING) for at in SPILL_POINTS),
    *(Plan(kills=(Kill(role=TRAINER, at=at, nth=2, redis=True),)) for at in WITH_REDIS),
    Plan(kills=(Kill(role=PRODUCERS[0], at=Failpoint.PRODUCER_MADE, nth=3, redis=True),)),
    *(random_plan(seed) for seed in range(4)),
    *(loss_plan(seed) for seed in range(4)),
]


@pytest.fixture(scope="module")
def nest() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-n") as folder, nursery(Path(folder)) as path:
        yield path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="rs-"))
    yield path / "r"
    shutil.rmtree(path)


def named(plan: Plan) -> str:
    kills = "+".join(f"{'redis-' if kill.redis else ''}{kill.role}-{kill.at}" for kill in plan.kills)
    return "-".join(
        filter(None, [kills, f"{plan.chance}-by-chance" if plan.chance else "", "loss" if plan.lose else "", f"seed-{plan.seed}" * bool(plan.seed)])
    )


def test_there_are_at_least_thirty_rounds_and_every_failpoint_has_one() -> None:
    assert len(PLANS) >= 30
    reached = {kill.at for plan in PLANS for kill in plan.kills}
    only_elsewhere = {Failpoint.PRODUCER_SET, Failpoint.TRAINER_BEFORE_REASSERT, Failpoint.TRAINER_REASSERTING, Failpoint.TRAINER_REASSERTED}
    assert set(Failpoint) - reached <= only_elsewhere, "a failpoint at which nobody is killed proves nothing"


@pytest.mark.parametrize("plan", PLANS, ids=named)
async def test_nothing_is_lost_or_trained_twice_whoever_is_killed(plan: Plan, folder: Path, nest: Path) -> None:
    async with Round(folder, nursery=nest, **plan.arguments()) as one:
        await one.run()
        line = await judge(one)
    assert len(line) == STEPS


@pytest.mark.parametrize("at", [Failpoint.TRAINER_WITNESSED, Failpoint.CHECKPOINT_RENAMED])
async def test_the_real_trainer_survives_its_kill_too(at: Failpoint, folder: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    plan = Plan(kills=(Kill(role=TRAINER, at=at, nth=2),))
    async with Round(folder, backend="torch", model=model, expected=lambda line: line[-1].digest, **plan.arguments()) as one:
        await one.run()
        line = await judge(one)
    assert len({step.digest for step in line}) == STEPS, "every step changes the weights"


async def test_the_verdict_notices_a_group_that_was_trained_twice(folder: Path, nest: Path) -> None:
    """The judge is worth something: a witness file that names a group twice is refused."""
    async with Round(folder, nursery=nest) as one:
        await one.run()
        witness = one.run_folder / "witness.jsonl"
        lines = witness.read_text().splitlines()
        first = lines[0].split('"seqs":[', 1)[1].split(",", 1)[0]
        head, tail = lines[-1].split('"seqs":[', 1)
        lines[-1] = head + '"seqs":[' + first + "," + tail.split(",", 1)[1]
        witness.write_text("\n".join(lines) + "\n")
        with pytest.raises(AssertionError, match="was trained 2 times"):
            await judge(one)


def test_rounds_are_the_same_for_the_same_seed() -> None:
    assert [dataclasses.asdict(random_plan(seed)) for seed in range(20)] == [dataclasses.asdict(random_plan(seed)) for seed in range(20)]
    assert os.environ.get("ROLLSTREAM_FAILPOINT") is None
