"""Rule R1 on both ledgers: the server comes back with an older copy of its data, and the trainer tells it what became of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest

from buffer.contract import Attachment, CheckpointRef, ChunkRecord, Granted, History, PastStep, PutResult
from buffer.ledger import LocalLedger
from buffer.redis_ledger import RedisLedger
from protocol.errors import Fenced, LedgerRegressed, SlotLost
from protocol.messages import BlobRef, Reason, Seq
from protocol.versions import Fork, Version

from .conftest import IDENTITY, Harness, PureHarness, RedisHarness, reference, seqs_of, settings

FIRST = Version(1, 0)


class Memory:
    """What a trainer remembers of its steps."""

    def __init__(self, attachment: Attachment, *, checkpoints: tuple[CheckpointRef, ...] = (), steps: dict[int, PastStep] | None = None) -> None:
        self.attachment = attachment
        self.incarnation = attachment.incarnation
        self.steps = dict(steps or {})
        self.checkpoints = checkpoints

    async def train(self, world: Harness, step: int, digest: str | None = None) -> list[int]:
        chunks = await world.lease(self.incarnation, step)
        self.took(step, chunks, digest or f"w{step}")
        await world.ledger.trained(self.incarnation, step, self.steps[step].digest, {})
        return seqs_of(*chunks)

    def took(self, step: int, chunks: list[ChunkRecord], digest: str) -> None:
        seqs = tuple(Seq(seq) for seq in seqs_of(*chunks))
        self.steps[step] = PastStep(step=step, incarnation=self.incarnation, digest=digest, seqs=seqs, chunks=tuple(chunks))

    async def checkpoint(self, world: Harness, step: int) -> None:
        self.checkpoints = await world.checkpoint(self.incarnation, step)

    def history(self) -> History:
        covered = self.checkpoints[0].step if len(self.checkpoints) > 1 else 0
        steps = (dataclasses.replace(past, chunks=()) if step <= covered else past for step, past in sorted(self.steps.items()))
        forks = {one: (*fork, "") for one, fork in self.attachment.lineage.forks.items()}
        forks[self.incarnation] = (*forks[self.incarnation][:2], self.attachment.incarnation_id)
        return History(incarnations=forks, checkpoints=self.checkpoints, steps=tuple(steps))

    async def reassert(self, world: Harness) -> None:
        await world.ledger.reassert(self.incarnation, self.attachment.incarnation_id, self.history())
        assert await world.violations() == []
        with contextlib.suppress(LedgerRegressed):
            await world.ledger.renew("p1", [])  # the same object's producer is told once


async def begin(world: Harness, **changes: object) -> Memory:
    assert await world.ledger.create(IDENTITY, settings(**changes))
    attachment = await world.ledger.attach(None, trainer_id="trainer")
    await world.serve(FIRST)
    return Memory(attachment)


async def taken_after(world: Harness, incarnation: int, step: int) -> list[int]:
    await world.produce(8 - (await world.ledger.status()).outstanding, FIRST)
    return await world.train(incarnation, step)


# -- the loss is seen --------------------------------------------------------------------------------------------------------------------------


async def test_a_trainer_is_told_when_the_ledger_forgot_one_of_its_calls(world: Harness) -> None:
    memory = await begin(world)
    await world.produce(8, FIRST)
    await memory.train(world, 1)
    before = await world.copy()
    await memory.train(world, 2)
    await world.go_back(before)
    calls = (
        world.ledger.open_step(1, 3),
        world.ledger.lease(1, 3, 0),
        world.ledger.trained(1, 3, "w3", {}),
        world.ledger.payload_lost(1, 3, 0, Seq(0)),
        world.ledger.checkpoint(1, reference(2, 1), keep=2),
        world.ledger.drain(1, "end"),
    )
    for call in calls:
        with pytest.raises(LedgerRegressed, match="lost writes"):
            await call
    status = await world.ledger.status()
    assert (status.trained, status.leased, status.ready) == (1, 0, 4)


async def test_a_later_producers_writes_hide_the_loss_from_a_plain_number_and_the_trainer_still_sees_it(world: Harness) -> None:
    """The number of changes is the same or larger again when the trainer calls next: comparing it would say that nothing happened."""
    memory = await begin(world)
    await world.produce(8, FIRST)
    await memory.train(world, 1)
    before = await world.copy()
    await memory.train(world, 2)
    seen = (await world.ledger.status()).sequence
    await world.go_back(before)
    other = other_client(world)
    while (await other.status()).sequence <= seen:
        await other.renew("p2", [])
    assert (await world.ledger.status()).sequence > seen
    with pytest.raises(LedgerRegressed):
        await world.ledger.trained(1, 2, "w2", {})
    await memory.reassert(world)
    assert (await world.ledger.status()).trained == 2


def other_client(world: Harness) -> LocalLedger | RedisLedger:
    """Another process's ledger object, which has seen nothing yet."""
    if isinstance(world, RedisHarness):
        return RedisLedger(world.client, world.keys)
    assert isinstance(world, PureHarness)
    other = LocalLedger()
    other._pure = world.local.pure
    return other


async def test_an_attachment_that_the_ledger_forgot_is_a_loss_and_one_that_another_took_is_not(world: Harness) -> None:
    memory = await begin(world)
    await world.produce(4, FIRST)
    await memory.train(world, 1)
    before = await world.copy()
    second = await world.ledger.attach(None, trainer_id="second")
    await world.ledger.open_step(2, 1)
    await world.go_back(before)
    with pytest.raises(LedgerRegressed):
        await world.ledger.lease(2, 1, 0)
    third = await other_client(world).attach(None, trainer_id="third")  # it gets the same number
    assert (third.incarnation, third.incarnation_id == second.incarnation_id) == (2, False)
    for call in (world.ledger.lease(2, 1, 0), world.ledger.reassert(2, second.incarnation_id, Memory(second).history())):
        with pytest.raises(Fenced):
            await call


async def test_a_producer_is_told_once_and_the_same_call_then_goes_through(world: Harness) -> None:
    await begin(world)
    before = await world.copy()
    asked = await world.ledger.reserve("p1", "same", 2, max_bytes=100)
    await world.go_back(before)
    with pytest.raises(LedgerRegressed, match="ask again"):
        await world.ledger.reserve("p1", "next", 2, max_bytes=100)
    again = await world.ledger.reserve("p1", "next", 2, max_bytes=100)
    assert isinstance(asked, Granted)
    assert isinstance(again, Granted)
    assert [slot.seq for slot in again.slots] == [slot.seq for slot in asked.slots]
    with pytest.raises(SlotLost):
        await world.put(asked.slots[0], FIRST)
    await world.put(again.slots[0], FIRST)
    assert (await world.ledger.status()).ready == 1


# -- and mended --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_from", ["start", "reserved", "ready", "leased", "first step", "checkpoint", "second checkpoint"])
async def test_whatever_was_lost_what_was_trained_is_trained_once_and_everything_else_is_handed_out_again(world: Harness, lost_from: str) -> None:
    memory = await begin(world)
    copies = {"start": await world.copy()}
    slots = await world.reserve(8)
    copies["reserved"] = await world.copy()
    for slot in slots:
        await world.put(slot, FIRST)
    copies["ready"] = await world.copy()
    await world.lease(1, 1)
    copies["leased"] = await world.copy()
    await memory.train(world, 1)
    copies["first step"] = await world.copy()
    await memory.train(world, 2)
    await memory.checkpoint(world, 2)
    copies["checkpoint"] = await world.copy()
    (filtered,) = await world.reserve(1)
    await world.ledger.release(filtered.seq, filtered.token, Reason.FILTERED)
    for step in (3, 4, 5):
        await world.produce(4, FIRST)
        await memory.train(world, step)
        if step == 4:
            await memory.checkpoint(world, 4)
            copies["second checkpoint"] = await world.copy()
    await world.go_back(copies[lost_from])
    with pytest.raises(LedgerRegressed):
        await world.ledger.open_step(1, 6)

    for _ in range(2):  # a reassert whose reply was lost is asked again
        await memory.reassert(world)
        status = await world.ledger.status()
        assert (status.trained, status.trained_groups, status.checkpoints, status.incarnation) == (5, 20, memory.checkpoints, 1)
        assert (status.leased, status.dropped) == (0, 2)
    assert status.next_seq == 21
    assert status.outstanding + status.released == 1 - sum(status.dead.values()), "the filtered group, if that is lost, is tried again"
    journal = await world.ledger.chunks(1, 99)
    assert [chunk.step for chunk in journal] == [3, 3, 4, 4, 5, 5]
    assert journal == tuple(chunk for step in (3, 4, 5) for chunk in memory.steps[step].chunks)
    assert (await world.ledger.trained(1, 5, "w5", {})).trained == 5  # the call whose reply it never got

    done = {seq for past in memory.steps.values() for seq in past.seqs}
    assert not done & set(await taken_after(world, 1, 6))
    attachment = await world.ledger.attach(reference(4, 1), trainer_id="next")
    assert attachment.resume_step == 4
    assert [seqs_of(*await world.lease(2, 5))] == [[int(seq) for seq in memory.steps[5].seqs]], "the journal it was told replays"


async def test_payloads_that_went_with_the_loss_hold_no_bytes_and_those_that_stayed_do(world: Harness) -> None:
    memory = await begin(world)
    await world.produce(4, FIRST)
    copy = await world.copy()
    await memory.train(world, 1)
    await world.produce(4, FIRST)
    await memory.train(world, 2)
    await world.go_back(copy)
    await memory.reassert(world)
    status = await world.ledger.status()
    assert (status.trained_groups, status.bytes_used) == (8, 4 * 50)
    assert len(await world.ledger.payloads(memory.steps[1].chunks[0].headers)) == 2


async def test_a_step_that_was_lost_in_its_middle_keeps_the_payloads_that_the_ledger_still_has(world: Harness) -> None:
    memory = await begin(world)
    await world.produce(4, FIRST)
    await world.ledger.open_step(1, 1)
    await world.ledger.lease(1, 1, 0)
    copy = await world.copy()
    await memory.train(world, 1)
    await world.go_back(copy)
    await memory.reassert(world)
    headers = [header for chunk in await world.ledger.chunks(1, 1) for header in chunk.headers]
    assert len(await world.ledger.payloads(headers)) == 4
    assert (await world.ledger.status()).bytes_used == 4 * 50


async def test_a_group_that_the_ledger_gave_to_somebody_else_meanwhile_stays_trained(world: Harness) -> None:
    memory = await begin(world)
    copy = await world.copy()
    headers = await world.produce(4, FIRST)
    await memory.train(world, 1)
    await world.go_back(copy)
    other = other_client(world)
    answer = await other.reserve("p2", "r", 4, max_bytes=100)
    assert isinstance(answer, Granted)
    assert {slot.seq for slot in answer.slots} == {header.seq for header in headers}
    await memory.reassert(world)
    for slot in answer.slots:
        with pytest.raises(SlotLost):
            await world.put(slot, FIRST)
    assert await world.ledger.put(headers[0], headers[0].token.encode().ljust(50, b".")) is PutResult.DUPLICATE
    status = await world.ledger.status()
    assert (status.trained_groups, status.generating, status.ready, status.bytes_used) == (4, 0, 0, 0)


async def test_what_a_replaced_trainer_did_behind_the_loss_of_its_replacement_is_undone(world: Harness) -> None:
    """The loss takes the attachment of the new trainer back, so the old one is let in again, and trains step 2 with other groups."""
    old = await begin(world)
    await world.produce(4, FIRST)
    await old.train(world, 1)
    await world.produce(4, FIRST)
    copy = await world.copy()
    attachment = await world.ledger.attach(None, trainer_id="new")
    new = Memory(attachment)
    await new.train(world, 1, "other1")
    await world.serve(Version(2, 1))
    await new.train(world, 2, "other2")
    await world.go_back(copy)
    await world.serve(FIRST)
    await old.train(world, 2)
    with pytest.raises(LedgerRegressed):
        await world.ledger.open_step(2, 3)
    await new.reassert(world)
    with pytest.raises(Fenced):
        await world.ledger.open_step(1, 3)
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.incarnation) == (2, 8, 2)
    assert status.lineage.forks[2] == Fork(1, 0)
    assert await world.ledger.chunks(1, 9) == tuple(chunk for step in (1, 2) for chunk in new.steps[step].chunks)


async def test_on_policy_what_was_written_by_the_lost_line_is_not_used(world: Harness) -> None:
    memory = await begin(world, pipeline_depth=0.0)
    await world.produce(4, FIRST)
    await memory.train(world, 1)
    await world.serve(Version(1, 1))
    await world.produce(4, Version(1, 1))
    await memory.train(world, 2)
    copy = await world.copy()
    new = Memory(await world.ledger.attach(None, trainer_id="new"))
    await new.train(world, 1, "other1")
    assert (await world.ledger.status()).leased == 0
    await world.go_back(copy)
    await new.reassert(world)
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.released, status.ready, status.leased) == (1, 4, 4, 0, 0)
    assert status.releases[Reason.REWOUND] == 4


async def test_a_reassert_that_stops_half_way_leaves_a_ledger_that_a_resume_mends(on_redis: RedisHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    world = on_redis
    memory = await begin(world)
    await world.produce(8, FIRST)
    copy = await world.copy()
    for step in (1, 2):
        await memory.train(world, step)
    await memory.checkpoint(world, 2)
    await world.produce(8, FIRST)
    for step in (3, 4):
        await memory.train(world, step)
    ledger, passed = world.ledger, []
    assert isinstance(ledger, RedisLedger)
    call = ledger._call

    async def dies(script: object, *args: object, **rest: object) -> object:
        if getattr(script, "name", "") == "lua/reassert_step.lua":
            passed.append(args)
            if len(passed) == cut:
                raise RuntimeError("killed")
        return await call(script, *args, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(ledger, "_call", dies)
    for cut in (1, 2, 3, 4):
        await world.go_back(copy)
        passed.clear()
        with pytest.raises(RuntimeError):
            await ledger.reassert(1, memory.attachment.incarnation_id, memory.history())
        assert await world.violations() == []
        status = await ledger.status()
        assert status.trained == cut - 1
        assert [one.step for one in status.checkpoints] == [2] * (cut > 2)
        with pytest.raises(LedgerRegressed):  # nothing of this trainer is let in until it is done
            await ledger.open_step(1, status.trained + 1)
    cut = 0
    await memory.reassert(world)
    assert (await ledger.status()).trained == 4


async def test_a_resume_from_a_checkpoint_that_the_ledger_forgot_goes_on_above_every_incarnation_on_disk(world: Harness) -> None:
    memory = await begin(world)
    await world.produce(4, FIRST)
    copy = await world.copy()
    await memory.train(world, 1)
    await memory.checkpoint(world, 1)
    second = Memory(await world.ledger.attach(reference(1, 1), trainer_id="second"), checkpoints=memory.checkpoints, steps=memory.steps)
    await world.produce(4, FIRST)
    await second.train(world, 2)
    await second.checkpoint(world, 2)
    await world.go_back(copy)
    resumed = other_client(world)
    await resumed.reassert(2, second.attachment.incarnation_id, second.history())
    attachment = await resumed.attach(reference(2, 2), trainer_id="third", above=7)
    assert (attachment.incarnation, attachment.resume_step) == (8, 2)
    assert attachment.lineage.forks == {1: Fork(0, 0), 2: Fork(1, 1), 8: Fork(2, 2)}
    assert not set(await world_train(world, resumed, 8, 3)) & {int(seq) for past in second.steps.values() for seq in past.seqs}


async def world_train(world: Harness, ledger: LocalLedger | RedisLedger, incarnation: int, step: int) -> list[int]:
    mine, world.ledger = world.ledger, ledger
    await world.serve(Version(incarnation, step - 1))
    await world.produce(4, Version(incarnation, step - 1))
    seqs = await world.train(incarnation, step)
    world.ledger = mine
    return seqs


# -- what a checkpoint covers -------------------------------------------------------------------------------------------------------------------


async def fill_and_train(world: Harness, memory: Memory, step: int) -> None:
    await world.produce(8 - (await world.ledger.status()).outstanding, FIRST)
    await memory.train(world, step)


async def retained(world: Harness, **changes: object) -> Memory:
    """Four trained steps with checkpoints of steps 2 and 4; all are in the journal, for replay."""
    memory = await begin(world, retention=5, **changes)
    for step in range(1, 5):
        await fill_and_train(world, memory, step)
        if step % 2 == 0:
            await memory.checkpoint(world, step)
    return memory


async def test_steps_that_both_sides_know_stay_for_replay(world: Harness) -> None:
    memory = await retained(world)
    before = await world.copy()
    await fill_and_train(world, memory, 5)
    await world.go_back(before)
    await memory.reassert(world)
    status = await world.ledger.status()
    assert (status.trained, status.dropped, status.checkpoints[0].step) == (5, 0, 2)
    assert [seqs_of(*await world.ledger.chunks(step, step)) for step in range(1, 6)] == [list(memory.steps[step].seqs) for step in range(1, 6)]
    await memory.reassert(world)
    assert (await world.ledger.status()).dropped == 0


async def test_with_a_spill_nothing_leaves_the_ledger_that_the_spill_has_not_got(world: Harness) -> None:
    memory = await retained(world, spill="/spill")
    before = await world.copy()
    await fill_and_train(world, memory, 5)
    await world.go_back(before)
    held = await world.payload_count()
    await memory.reassert(world)
    assert (await world.ledger.status()).dropped == 0
    assert await world.payload_count() == held


async def test_a_covered_step_that_the_trainer_took_otherwise_leaves_with_all_before_it(world: Harness) -> None:
    memory = await retained(world)
    before = await world.copy()
    await fill_and_train(world, memory, 5)
    await world.go_back(before)
    memory.steps[1] = dataclasses.replace(memory.steps[1], digest="other")
    await memory.reassert(world)
    status = await world.ledger.status()
    assert (status.trained, status.dropped) == (5, 1)


async def test_a_reassert_that_the_network_repeats_late_takes_nothing_back(world: Harness) -> None:
    memory = await begin(world)
    await fill_and_train(world, memory, 1)
    before = await world.copy()
    await fill_and_train(world, memory, 2)
    await world.go_back(before)
    told, seen = memory.history(), copy.copy(world.ledger._attached[memory.incarnation])
    await memory.reassert(world)
    await fill_and_train(world, memory, 3)
    await memory.checkpoint(world, 3)
    known = world.ledger._attached[memory.incarnation]
    world.ledger._attached[memory.incarnation] = seen
    await world.ledger.reassert(memory.incarnation, memory.attachment.incarnation_id, told)
    world.ledger._attached[memory.incarnation] = known
    status = await world.ledger.status()
    assert (status.trained, [one.step for one in status.checkpoints]) == (3, [3])
    await fill_and_train(world, memory, 4)


async def test_blobs_that_a_lost_spill_of_a_step_may_refer_to_stay(world: Harness) -> None:
    """The ledger forgot that it had trained the step, and that it is spilled; its groups are READY there, and TRAINED and freed once they are settled."""
    memory = await begin(world, spill="/spill", blobs="/blobs")
    blob = BlobRef(name="demo/x", dtype="<f4", shape=(1,), bytes=4, digest="d")
    for slot in await world.reserve(4):
        await world.put(slot, FIRST, blobs={"x": blob})
    before = await world.copy()
    for step in (1, 2):
        await fill_and_train(world, memory, step)
        await memory.checkpoint(world, step)
    await world.ledger.spilled(1, 1)
    await world.go_back(before)
    await memory.reassert(world)
    deleted: list[Seq] = []

    async def delete(seq: Seq, _attempt: object, _token: object) -> None:
        deleted.append(seq)

    await world.ledger.sweep(delete)
    assert deleted == []
