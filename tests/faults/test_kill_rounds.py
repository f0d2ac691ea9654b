"""kill -9 of real processes at every edge of their state, of Redis too: a round each, and what is left is judged by `verdict.judge`."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer.witness import WitnessLine
from protocol.failpoints import Failpoint
from tests.faults.plans import ELSEWHERE, PRODUCER_POINTS, SPILL_POINTS, TRAINER_POINTS, WEIGHT_POINTS, Plan, every_point, loss_plan, random_plan, redis_points
from tests.faults.rounds import CHUNK, KILLED, PRODUCERS, REDIS, SEED, TRAINER, Kill, Round, RoundFailed, client_of, has_ended
from tests.faults.synthetic import group_of
from tests.faults.verdict import judge

pytestmark = [pytest.mark.redis, pytest.mark.faults, pytest.mark.timeout(900)]


async def judged(folder: Path, plan: Plan, **options: Any) -> Round:
    async with Round(folder, **plan.arguments(), **options) as round_:
        await round_.run()
        await judge(round_)
    return round_


def test_every_failpoint_has_its_round():
    assert set(Failpoint) == {*TRAINER_POINTS, *PRODUCER_POINTS, *SPILL_POINTS, *ELSEWHERE, *WEIGHT_POINTS}


@pytest.mark.parametrize("plan", every_point(), ids=str)
async def test_a_process_killed_at(plan: Plan, tmp_path: Path, nest: Path):
    round_ = await judged(tmp_path, plan, nursery=nest)
    assert round_.exits[plan.kills[0].role] == [KILLED, 0]


@pytest.mark.parametrize("plan", redis_points(), ids=str)
async def test_redis_killed_at(plan: Plan, tmp_path: Path, nest: Path):
    round_ = await judged(tmp_path, plan, nursery=nest)
    assert round_.exits == {REDIS: [KILLED], TRAINER: [0], **{producer: [0] for producer in PRODUCERS}}, "the others live through it"


async def test_a_producer_killed_between_payload_and_ledger(tmp_path: Path, nest: Path):
    """Two round trips only where the server does not know the script yet: the first put of all."""
    kills = tuple(Kill(role=producer, at=Failpoint.PRODUCER_SET) for producer in PRODUCERS)
    round_ = await judged(tmp_path, Plan(kills=kills, must_kill=False), nursery=nest)
    assert KILLED in {code for producer in PRODUCERS for code in round_.exits[producer]}


@pytest.mark.parametrize("seed", range(10))
async def test_several_killed_by_chance(seed: int, tmp_path: Path, nest: Path):
    await judged(tmp_path, random_plan(seed), nursery=nest)


@pytest.mark.parametrize("seed", [0, 3, 5, 6, 200, 202, 207, 211])
async def test_redis_comes_back_without_writes_that_it_had_acknowledged(seed: int, tmp_path: Path, nest: Path):
    round_ = await judged(tmp_path, loss_plan(seed), nursery=nest)
    assert round_.exits[REDIS] == [KILLED]


# -- the real trainer --------------------------------------------------------------------------------------------------------------------------


def torch_digest(model: Path, line: Sequence[WitnessLine]) -> str:
    """Of the weights that the real backend has after these steps, in this process and without a ledger."""
    import torch

    from buffer.contract import StepRecord
    from consumer.advantages import group_std
    from consumer.batch import collate
    from consumer.config import TrainerConfig
    from consumer.torch_backend import TorchBackend
    from protocol.codec import encode_group
    from protocol.versions import Fork, Lineage, Version
    from tests.consumer.conftest import header_of
    from weightsync.snapshot import weights_digest

    backend = TorchBackend(model, TrainerConfig(lr=1e-3, warmup_steps=2), temperature=1.0, seed=SEED)
    try:
        for one in line:
            record = StepRecord(step=one.step, incarnation=1, groups=4, chunk=CHUNK, guard="mask", cutoff=-1000, lineage=Lineage({1: Fork(0, 0)}, head=1))
            for at in range(0, len(one.seqs), CHUNK):
                groups = {seq: group_of(seq, [Version(1, 0)]) for seq in one.seqs[at : at + CHUNK]}
                headed = [(header_of(group, seq=seq, attempt=1, token="t", payload=encode_group(group)), group) for seq, group in groups.items()]
                backend.accumulate(collate(record, headed, group_std))
            backend.finish_step(one.step, one.tokens)
        return weights_digest(backend.snapshot())
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "kill", [Kill(role=TRAINER, at=Failpoint.TRAINER_WITNESSED, nth=8), Kill(role=TRAINER, at=Failpoint.CHECKPOINT_RENAMED, nth=2)], ids=str
)
async def test_the_real_trainer_killed_at(kill: Kill, tmp_path: Path, nest: Path):
    from tests.consumer.conftest import save_model

    model = save_model(tmp_path / "tiny")
    plan = Plan(kills=(kill,), changes={"buffer": {"max_staleness": 1000, "spill": "spill"}})
    round_ = await judged(tmp_path / "round", plan, nursery=nest, backend="torch", model=model, expected=lambda line: torch_digest(model, line))
    assert round_.exits[TRAINER] == [KILLED, 0]


# -- the judge ---------------------------------------------------------------------------------------------------------------------------------


async def tampered(folder: Path, nest: Path, name: str) -> Sequence[str]:
    """What the judge says of a round in which nobody was killed, and somebody changed one thing afterwards."""
    async with Round(folder, nursery=nest) as round_:
        await round_.run()
        await judge(round_)
        await TAMPERING[name](round_)
        with pytest.raises(RoundFailed) as failed:
            await judge(round_)
    return [line.removeprefix("  * ") for line in str(failed.value).splitlines() if line.startswith("  * ")]


async def _group_twice(round_: Round) -> None:
    lines = [json.loads(line) for line in (round_.run_folder / "witness.jsonl").read_text().splitlines()]
    lines[7]["seqs"][0] = lines[6]["seqs"][0]
    (round_.run_folder / "witness.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


async def _step_gone(round_: Round) -> None:
    path = round_.run_folder / "witness.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


async def _half_a_checkpoint(round_: Round) -> None:
    (round_.run_folder / "checkpoint" / ".tmp-step-000013-1").mkdir()


async def _another_checkpoint(round_: Round) -> None:
    shutil.copytree(round_.run_folder / "checkpoint" / "step-000012-1", round_.run_folder / "checkpoint" / "step-000011-1")


async def _slot_leaked(round_: Round) -> None:
    async with client_of(round_.url) as client:
        await client.hset(round_.keys.key("groups"), "999", json.dumps({"s": "generating", "a": 1, "f": 0, "t": "t", "o": "nobody", "m": 10}))


async def _payload_of_nobody(round_: Round) -> None:
    async with client_of(round_.url) as client:
        await client.set(round_.keys.payload(0, 9, "t"), b"x")


async def _group_forgotten(round_: Round) -> None:
    async with client_of(round_.url) as client:
        seq = next(iter(await client.zrange(round_.keys.key("ready"), 0, 0)), b"999")  # there need be none
        await client.hset(round_.keys.key("groups"), seq, "T")


TAMPERING = {
    "a group trained twice": _group_twice,
    "a step that no witness saw": _step_gone,
    "half a checkpoint": _half_a_checkpoint,
    "a checkpoint that is not registered": _another_checkpoint,
    "a slot of nobody": _slot_leaked,
    "a payload of nobody": _payload_of_nobody,
    "a group counted as trained": _group_forgotten,
}


@pytest.mark.parametrize("name", TAMPERING)
async def test_the_judge_sees(name: str, tmp_path: Path, nest: Path):
    assert await tampered(tmp_path, nest, name)


async def test_a_round_that_is_stuck_or_fails_says_so_with_its_events_and_ends_its_processes(tmp_path: Path, nest: Path):
    round_ = Round(tmp_path, nursery=nest, changes={"stop": {"steps": 10_000}})
    async with round_:
        running = asyncio.create_task(round_.run())
        while TRAINER not in round_._alive or len(round_._alive) < 4:
            await asyncio.sleep(0)
        alive = dict(round_._alive)
        alive[REDIS].send_signal(signal.SIGTERM)
        with pytest.raises(RoundFailed, match="redis ended with exit code 0"):
            await running
    assert all(has_ended(process.pid) for process in alive.values())
