from __future__ import annotations

from pathlib import Path

import pytest

from buffer.audit import read_audit
from buffer.report import RunTotals, surviving, totals
from buffer.witness import WitnessLine
from protocol.messages import Event, JsonValue, Reason
from protocol.versions import Version

from .conftest import RedisHarness, reference, seqs_of, settings


def line(step: int, seqs: tuple[int, ...], incarnation: int = 1, parent: int = 0, fork_step: int = 0, *, staleness: int = 1) -> WitnessLine:
    return WitnessLine(
        incarnation=incarnation, parent=parent, fork_step=fork_step, step=step, seqs=seqs, tokens=10, masked=1, max_staleness=staleness,
        digest=f"w{incarnation}:{step}", at=0.0,
    )  # fmt: skip


def events(*rows: tuple[str, dict[str, JsonValue]]) -> list[Event]:
    return [Event(id=f"{n}-0", op=op, fields=fields) for n, (op, fields) in enumerate(rows)]


def test_what_a_rewind_undid_does_not_survive() -> None:
    witness = [line(1, (0,)), line(2, (1,)), line(3, (2,)), line(2, (1,), 2, 1, 1), line(3, (3,), 2, 1, 1), line(3, (3,), 3, 2, 2), line(4, (4,), 3, 2, 2)]
    assert [(one.incarnation, one.step) for one in surviving(witness)] == [(1, 1), (2, 2), (3, 3), (3, 4)]


def test_a_trainer_that_attached_and_did_nothing_still_undoes() -> None:
    attached: dict[str, JsonValue] = {"incarnation": 2, "incarnation_id": "x", "parent": 1, "fork_step": 1, "trainer_id": "t"}
    found = surviving([line(1, (0,)), line(2, (1,))], events(("attached", attached)))
    assert [one.step for one in found] == [1]


def test_a_group_with_two_effects_and_a_group_with_none_are_counted() -> None:
    found = totals(events(("reserved", {"owner": "p", "slots": [[0, 1], [1, 1], [2, 1]]})), [line(1, (0, 1)), line(2, (1, 7))])
    assert (found.groups_trained, found.groups_duplicated, found.groups_outstanding) == (3, 1, 1)
    assert "never reserved: [7]" in found.disagreements[-1]


def test_a_step_in_one_record_only_is_a_disagreement() -> None:
    trained = {"step": 2, "incarnation": 1, "digest": "w1:2", "groups": 1, "stats": {}}
    found = totals(events(("reserved", {"owner": "p", "slots": [[0, 1]]}), ("trained", dict(trained))), [line(1, (0,)), line(3, (0,))])
    assert len([text for text in found.disagreements if "not in" in text or "are not 1 to" in text]) == 3


@pytest.mark.redis
async def test_a_group_that_was_queued_again_is_not_dead_any_more(on_redis: RedisHarness, tmp_path: Path) -> None:
    await on_redis.start(settings(groups_per_step=2, chunk_groups=2, max_attempts=1))
    again, failed, recorded, *taken = await on_redis.reserve(4)
    for slot in (again, failed):
        await on_redis.ledger.release(slot.seq, slot.token, Reason.FAILED)
    header = await on_redis.put(recorded, Version(1, 0))
    await on_redis.ledger.set_aside(1, [(header.seq, header.token)])

    async def found(*witness: WitnessLine) -> RunTotals:
        return totals(await read_audit(tmp_path / "none", on_redis.client, on_redis.keys), witness, await on_redis.ledger.status())

    assert await on_redis.ledger.requeue([again.seq]) == (again.seq,)
    queued = await found()
    assert (queued.groups_dead, queued.groups_outstanding, queued.groups_lost) == ({Reason.FAILED: 1, Reason.RECORDED: 1}, 2, 0)
    (back,) = await on_redis.reserve(1)
    assert back.seq == again.seq
    for slot in (back, *taken):
        await on_redis.put(slot, Version(1, 0))
    await on_redis.train(1, 1, "w1:1")
    trained = await found(line(1, (back.seq, *(slot.seq for slot in taken))))
    assert (trained.groups_trained, trained.groups_dead, trained.groups_outstanding, trained.groups_lost) == (2, queued.groups_dead, 0, 0)
    assert trained.disagreements == ()


@pytest.mark.redis
async def test_totals_of_a_real_run_with_a_crash_lose_nothing_and_count_nothing_twice(on_redis: RedisHarness, tmp_path: Path) -> None:
    incarnation = await on_redis.start(settings(groups_per_step=2, chunk_groups=2, max_staleness=8))
    witness: list[WitnessLine] = []

    async def train(incarnation: int, step: int, parent: int, fork: int, *, told: bool = True) -> None:
        seqs = tuple(seqs_of(*await on_redis.lease(incarnation, step)))
        witness.append(line(step, seqs, incarnation, parent, fork, staleness=9 if step == 4 else 1))
        if told:
            await on_redis.ledger.trained(incarnation, step, f"w{incarnation}:{step}", {})

    await on_redis.produce(4, Version(1, 0))
    for step in (1, 2):
        await train(incarnation, step, 0, 0)
        if step == 1:
            await on_redis.checkpoint(incarnation, 1)
    await on_redis.produce(2, Version(1, 0))
    await train(incarnation, 3, 0, 0, told=False)  # killed between its witness line and the ledger
    await on_redis.ledger.attach(reference(1, 1), trainer_id="next")
    await on_redis.serve(Version(2, 1))
    for step in (2, 3):
        await train(2, step, 1, 1)
    (dead, slow, ready) = await on_redis.reserve(3)
    await on_redis.ledger.release(dead.seq, dead.token, Reason.FILTERED)
    await on_redis.put(ready, Version(2, 1))
    await on_redis.put(slow, Version(2, 1))
    await train(2, 4, 1, 1, told=False)

    found = totals(await read_audit(tmp_path / "none", on_redis.client, on_redis.keys), witness, await on_redis.ledger.status())
    assert found.disagreements == ()
    assert (found.groups_reserved, found.groups_trained, found.groups_lost, found.groups_duplicated) == (9, 6, 0, 0)
    assert (found.groups_dead, found.groups_outstanding, found.steps_trained, found.steps_over_k) == ({Reason.FILTERED: 1}, 2, 3, 1)
