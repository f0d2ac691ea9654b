"""The contract beside the steps, on every implementation: retention, spill, dead letters, recordings, readers of the journal, blobs."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.contract import WHY_CHARS, Blocked, ChunkRecord, PutResult
from buffer.ledger_state import LETTER_LIMIT
from protocol.errors import Fenced, PayloadLost, ReplayGap, SlotLost, StepOrder
from protocol.messages import Attempt, BlobRef, Edge, Reason, Seq, SlotToken
from protocol.versions import Version

from .conftest import Harness, PureHarness, reference, seqs_of, settings

ONE = {"groups_per_step": 1, "chunk_groups": 1}
START = Version(1, 0)


def blob(name: str) -> dict[str, BlobRef]:
    return {"experts": BlobRef(name=name, dtype="<i4", shape=(2,), bytes=8, digest="00")}


async def train(world: Harness, *steps: int, incarnation: int = 1, size: int = 50) -> None:
    """Each of the steps with groups of its own."""
    for step in steps:
        record = await world.ledger.open_step(incarnation, step)
        for _ in range(record.groups):
            (slot,) = await world.reserve(1)
            await world.put(slot, START, size)
        await world.train(incarnation, step)


async def kill(world: Harness, why: str = "", *, attempts: int = 1) -> Seq:
    """The next group, failed until it is dead."""
    for _ in range(attempts):
        (slot,) = await world.reserve(1)
        await world.ledger.release(slot.seq, slot.token, Reason.FAILED, why=why, lengths=(7, 9))
    return slot.seq


async def journalled(world: Harness) -> list[int]:
    return sorted({chunk.step for chunk in await world.ledger.chunks(1, 99)})


# -- retention ---------------------------------------------------------------------------------------------------------------------------------


async def test_retention_keeps_no_more_steps_than_fit_into_its_bytes(world: Harness) -> None:
    await world.start(settings(**ONE, retention=10, retention_bytes=130))
    for step, size in enumerate((50, 50, 90, 30, 20), 1):
        await train(world, step, size=size)
        await world.checkpoint(1, step)
    assert await journalled(world) == [3, 4, 5]  # the oldest kept checkpoint is of step 4; steps 3 and 4 are 120 bytes, with step 2 they are 170
    await train(world, 6)
    await world.checkpoint(1, 6)
    assert await journalled(world) == [4, 5, 6]


async def test_bytes_of_retention_count_only_what_the_oldest_kept_checkpoint_covers(world: Harness) -> None:
    await world.start(settings(**ONE, retention=10, retention_bytes=100))
    for step in range(1, 8):
        await train(world, step)
        if step in (2, 6):
            await world.checkpoint(1, step)
    assert await journalled(world) == [1, 2, 3, 4, 5, 6, 7], "steps that a resume needs are no retention"


async def test_retention_keeps_no_step_longer_than_its_seconds_even_if_nobody_trains(world: Harness) -> None:
    await world.start(settings(**ONE, retention=10, retention_seconds=60.0))
    await train(world, 1, 2)
    await world.pass_time(40)
    await train(world, 3, 4, 5)
    await world.checkpoint(1, 4)
    await world.checkpoint(1, 5)
    assert await journalled(world) == [1, 2, 3, 4, 5]
    await world.pass_time(30)
    await world.ledger.sweep()
    assert await journalled(world) == [3, 4, 5]
    status = await world.ledger.status()
    assert (status.dropped, status.bytes_used) == (2, 150)
    await world.pass_time(3600)
    await world.ledger.sweep()
    assert await journalled(world) == [5], "what no kept checkpoint covers stays"


async def test_the_end_of_a_step_is_known_while_the_journal_has_it(world: Harness) -> None:
    before = time.time()
    await world.start(settings(**ONE))
    assert await world.ledger.trained_step(1) is None
    await train(world, 1, 2)
    ended = await world.ledger.trained_step(2)
    assert ended is not None
    assert (ended.step, ended.incarnation, ended.digest) == (2, 1, "w2")
    if not isinstance(world, PureHarness):
        assert before - 1 <= ended.at <= time.time() + 1
    await world.checkpoint(1, 1)
    await world.ledger.attach(reference(1, 1), trainer_id="next")
    assert await world.ledger.trained_step(2) is None, "it was rewound"
    await world.train(2, 2)
    ended = await world.ledger.trained_step(2)
    assert ended is not None
    assert ended.incarnation == 2
    await world.checkpoint(2, 2)
    assert await world.ledger.trained_step(1) is None


# -- spill -------------------------------------------------------------------------------------------------------------------------------------


async def test_without_a_spill_nothing_is_to_be_spilled(world: Harness) -> None:
    await world.start(settings(**ONE, byte_budget=400))
    await train(world, 1, 2, 3, size=100)
    assert await world.ledger.spillable(10) == ()
    assert (await world.ledger.status()).to_spill == 0


async def test_a_step_over_the_retention_stays_until_it_is_spilled(world: Harness) -> None:
    await world.start(settings(**ONE, spill="spill", retention=1))
    for step in range(1, 6):
        await train(world, step)
        await world.checkpoint(1, step)
    assert await world.ledger.spillable(10) == (1, 2, 3)
    assert await world.ledger.spillable(2) == (1, 2)
    assert (await world.ledger.status()).to_spill == 3
    assert await journalled(world) == [1, 2, 3, 4, 5]
    assert await world.payload_count() == 5
    for step in (1, 2):
        await world.ledger.spilled(1, step)
        await world.ledger.spilled(1, step)
    status = await world.ledger.status()
    assert (status.dropped, status.bytes_used, status.to_spill, status.low_seq) == (2, 150, 1, 2)
    assert await journalled(world) == [3, 4, 5]
    assert await world.payload_count() == 3
    with pytest.raises(StepOrder, match="in order"):
        await world.ledger.spilled(1, 4)
    with pytest.raises(StepOrder):
        await world.ledger.spilled(1, 6)


async def test_trained_bytes_over_half_the_budget_are_to_be_spilled_and_no_checkpoint_is_asked_for(world: Harness) -> None:
    await world.start(settings(**ONE, spill="spill", byte_budget=1000))
    for step in range(1, 7):
        (slot,) = await world.reserve(1)
        await world.put(slot, START, 100)
        await world.lease(1, step)
        assert not (await world.ledger.trained(1, step, f"w{step}", {})).checkpoint_wanted
    assert await world.ledger.spillable(10) == (1,)
    await train(world, 7, size=100)
    assert await world.ledger.spillable(10) == (1, 2)
    await world.ledger.spilled(1, 1)
    assert await world.ledger.spillable(10) == (2,)
    await world.ledger.spilled(1, 2)
    assert await world.ledger.spillable(10) == ()
    status = await world.ledger.status()
    assert (status.bytes_used, status.dropped, status.trained_groups, status.low_seq) == (500, 0, 7, 0)
    assert await journalled(world) == [1, 2, 3, 4, 5, 6, 7], "a rewind needs the headers of all of them"


async def test_a_run_whose_budget_holds_one_step_beside_what_is_outstanding_goes_on_without_a_checkpoint(world: Harness) -> None:
    config = settings(spill="spill", byte_budget=1200)
    assert config.least_byte_budget(group_bytes=100, checkpoints_kept=2, checkpoint_steps=50) == 1200
    assert settings(byte_budget=1200).least_byte_budget(group_bytes=100, checkpoints_kept=2, checkpoint_steps=1) == 1600
    await world.start(config)
    for step in range(1, 12):
        await world.serve(Version(1, step - 1))
        slots = await world.reserve(4)
        for slot in slots:
            await world.put(slot, Version(1, step - 1), 100)
        await world.train(1, step)
        for old in await world.ledger.spillable(10):
            await world.ledger.spilled(1, old)
    assert (await world.ledger.status()).trained == 11


async def test_a_rewind_brings_spilled_steps_back_without_a_byte(world: Harness) -> None:
    await world.start(settings(**ONE, spill="spill", byte_budget=400))
    headers = []
    for step in (1, 2, 3):
        (slot,) = await world.reserve(1)
        headers.append(await world.put(slot, START, 100))
        await world.train(1, step)
    await world.ledger.spilled(1, 1)
    assert await world.payload_count() == 2
    with pytest.raises(PayloadLost, match="gone"):
        await world.ledger.payload(headers[0])
    assert len(await world.ledger.payload(headers[1])) == 100
    before = await world.ledger.chunks(1, 3)
    await world.ledger.attach(None, trainer_id="next")
    status = await world.ledger.status()
    assert (status.leased, status.bytes_used, status.trained_groups, status.to_spill) == (3, 200, 0, 0)
    with pytest.raises(Fenced):
        await world.ledger.spilled(1, 2)
    await world.ledger.spilled(2, 1)  # it is in the spill, trained again or not
    assert await world.violations() == []
    for step in (1, 2, 3):
        chunks = await world.lease(2, step)
        assert chunks[0].headers == before[step - 1].headers
        await world.ledger.trained(2, step, f"w{step}", {})
    status = await world.ledger.status()
    assert (status.leased, status.bytes_used, status.trained_groups) == (0, 200, 3)
    with pytest.raises(StepOrder):
        await world.ledger.spilled(2, 2)  # what the spill has of the first is of the line that was given up
    for step in (1, 2):
        await world.ledger.spilled(2, step)
    assert (await world.ledger.status()).bytes_used == 100


async def test_a_spilled_payload_that_the_spill_lost_leaves_a_hole(world: Harness) -> None:
    await world.start(settings(groups_per_step=2, chunk_groups=2, spill="spill"))
    await train(world, 1)
    await world.ledger.spilled(1, 1)
    await world.ledger.attach(None, trainer_id="next")
    await world.lease(2, 1)
    chunk = await world.ledger.payload_lost(2, 1, 0, Seq(0))
    assert isinstance(chunk, ChunkRecord)
    assert seqs_of(chunk) == [1]
    await world.ledger.trained(2, 1, "w1", {})
    status = await world.ledger.status()
    assert (status.bytes_used, status.trained_groups, status.dead, status.letters) == (0, 1, {Reason.PAYLOAD_LOST: 1}, 1)
    (letter,) = await world.ledger.dead_letters(Seq(-1), 10)
    assert (letter.seq, letter.reason, letter.why) == (0, Reason.PAYLOAD_LOST, "payload lost in a replay of step 1")


async def test_a_late_put_of_a_spilled_group_leaves_no_payload(world: Harness) -> None:
    await world.start(settings(**ONE, spill="spill"))
    (slot,) = await world.reserve(1)
    header = await world.put(slot, START)
    await world.train(1, 1)
    await world.ledger.spilled(1, 1)
    assert await world.ledger.put(header, slot.token.encode().ljust(50, b".")) is PutResult.DUPLICATE
    assert await world.payload_count() == 0


# -- dead letters ------------------------------------------------------------------------------------------------------------------------------


async def test_a_dead_letter_says_what_its_group_died_of(world: Harness) -> None:
    await world.start(settings(max_attempts=2))
    (slot,) = await world.reserve(1)
    await world.ledger.bind(slot.seq, slot.token, 'row "7"')
    await world.ledger.release(slot.seq, slot.token, Reason.FAILED, why="first")
    assert await kill(world, 'engine said "no"') == 0
    assert await kill(world, "é" * 2000, attempts=2) == 1
    (filtered,) = await world.reserve(1)
    await world.ledger.release(filtered.seq, filtered.token, Reason.FILTERED, why="all rewards are 0")
    first, second = await world.ledger.dead_letters(Seq(-1), 10)
    assert (first.seq, first.attempt, first.reason, first.failures, first.prompt_id, first.why) == (0, 2, Reason.FAILED, 2, 'row "7"', 'engine said "no"')
    assert (second.seq, second.prompt_id, second.why) == (1, None, "é" * WHY_CHARS)
    assert first.at > 0
    assert await world.ledger.dead_letters(Seq(0), 1) == (second,)
    assert await world.ledger.dead_letters(Seq(1), 1) == ()
    assert (await world.ledger.status()).letters == 2


async def test_a_stale_group_that_dies_says_in_which_step(world: Harness) -> None:
    await world.start(settings(**ONE, max_staleness=0, max_attempts=1))
    await train(world, 1)
    await world.serve(Version(1, 1))
    (slot,) = await world.reserve(1)
    await world.put(slot, START)
    await world.ledger.open_step(1, 2)
    assert await world.ledger.lease(1, 2, 0) == Blocked(edge=Edge.NO_GROUP)
    (letter,) = await world.ledger.dead_letters(Seq(-1), 10)
    assert (letter.seq, letter.reason, letter.why) == (1, Reason.STALE, "stale in step 2")


async def test_a_letter_is_queued_again_with_its_failures_forgotten(world: Harness) -> None:
    await world.start(settings(max_attempts=2))
    (slot,) = await world.reserve(1)
    await world.ledger.bind(slot.seq, slot.token, "row-7")
    await world.ledger.release(slot.seq, slot.token, Reason.FAILED)
    await kill(world)
    await kill(world, attempts=2)
    assert (await world.ledger.status()).dead == {Reason.FAILED: 2}
    assert await world.ledger.requeue([Seq(0), Seq(99), Seq(0)]) == (0,)
    assert await world.ledger.requeue([Seq(0)]) == ()
    status = await world.ledger.status()
    assert (status.dead, status.letters, status.released) == ({Reason.FAILED: 1}, 1, 1)
    (again,) = await world.reserve(1)
    assert (again.seq, again.attempt, again.prompt_id) == (0, 3, "row-7")
    await world.ledger.release(again.seq, again.token, Reason.FAILED)
    assert (await world.ledger.status()).dead == {Reason.FAILED: 1}, "it has as many attempts as a new one"


async def test_a_letter_below_low_seq_comes_back_is_trained_and_leaves_no_row(world: Harness) -> None:
    await world.start(settings(**ONE, max_attempts=1))
    dead = [await kill(world), await kill(world)]
    for step in (1, 2, 3):
        await train(world, step)
        await world.checkpoint(1, step)
    assert (await world.ledger.status()).low_seq == 4
    assert await world.ledger.requeue(dead) == (0, 1)
    assert await world.violations() == []
    trained, again = await world.reserve(2)
    assert [(slot.seq, slot.attempt) for slot in (trained, again)] == [(0, 2), (1, 2)]
    await world.put(trained, START)
    assert await world.train(1, 4) == [0]
    await world.ledger.release(again.seq, again.token, Reason.FAILED)
    with pytest.raises(SlotLost):
        await world.ledger.release(again.seq, again.token, Reason.FAILED)  # nobody knows it any more
    assert [letter.seq for letter in await world.ledger.dead_letters(Seq(-1), 9)] == [1]
    assert await world.violations() == []
    await world.checkpoint(1, 4)
    await train(world, 5)
    await world.checkpoint(1, 5)
    status = await world.ledger.status()
    assert (status.low_seq, status.next_seq, status.trained_groups, status.bytes_used, status.dead) == (5, 6, 5, 50, {Reason.FAILED: 1})
    assert await world.violations() == []


async def test_only_the_newest_letters_are_kept(world: Harness) -> None:
    await world.start(settings(max_attempts=1))
    await world.fill_letters(LETTER_LIMIT - 1)
    await kill(world)
    assert (await world.ledger.status()).letters == LETTER_LIMIT
    await kill(world)
    assert (await world.ledger.status()).letters == LETTER_LIMIT
    assert [letter.seq for letter in await world.ledger.dead_letters(Seq(-1), 3)] == [0, 1, 1_000_001]


# -- capacity ----------------------------------------------------------------------------------------------------------------------------------


async def _ends_of_slots(world: Harness, fates: list[str]) -> None:
    """Whatever becomes of a slot, its capacity comes back once: what is outstanding and charged is what the slots still held say, after every event."""
    await world.start(settings(groups_per_step=4, chunk_groups=4, pipeline_depth=1.0, max_staleness=0, max_attempts=2, byte_budget=900))
    await world.produce(4, START)
    await world.train(1, 1)
    await world.checkpoint(1, 1)
    await world.serve(Version(1, 1))
    await world.ledger.open_step(1, 2)
    base = (await world.ledger.status()).bytes_used
    held = 0
    for fate in fates:
        answer = await world.ask(1)
        if isinstance(answer, Blocked):
            assert answer.edge in (Edge.NO_SLOT, Edge.NO_BUDGET, Edge.NO_VERSION)
            assert held >= 4, f"{held} outstanding, and no more is granted"
            continue
        (slot,) = answer.slots
        if fate == "hold":
            held += 1
        elif fate == "stale":
            await world.put(slot, START)
            await world.ledger.lease(1, 2, 0)
        elif fate == "aside":
            header = await world.put(slot, Version(1, 1))
            for count in (1, 0):
                assert await world.ledger.set_aside(1, [(header.seq, header.token)]) == count
        elif fate == "late":
            await world.ledger.release(slot.seq, slot.token, Reason.GIVEN_BACK)
            with pytest.raises(SlotLost):
                await world.put(slot, START)
        else:
            for _ in range(2):
                await world.ledger.release(slot.seq, slot.token, Reason(fate))
        status = await world.ledger.status()
        assert (status.outstanding, status.bytes_used) == (held, base + 100 * held), fate
    assert await world.violations() == []


FATES = ("filtered", "failed", "given_back", "stale", "aside", "late", "hold")


@given(st.lists(st.sampled_from(FATES), max_size=25))
def test_the_capacity_of_every_group_that_ends_comes_back_exactly_once(fates: list[str]) -> None:
    asyncio.run(_ends_of_slots(PureHarness(), fates))


@pytest.mark.parametrize("seed", range(3))
async def test_capacity_comes_back_exactly_once_everywhere(world: Harness, seed: int) -> None:
    await _ends_of_slots(world, random.Random(seed).choices(FATES, k=25))


# -- recordings --------------------------------------------------------------------------------------------------------------------------------


async def test_what_is_ready_is_shown_in_the_order_of_selection_and_not_taken(world: Harness) -> None:
    await world.start()
    assert await world.ledger.ready(5) == ()
    headers = await world.produce(4, START)
    assert await world.ledger.ready(3) == tuple(headers[:3])
    assert await world.ledger.ready(99) == tuple(headers)
    assert (await world.ledger.status()).ready == 4


async def test_ready_groups_whose_payloads_are_lost_are_made_again(world: Harness) -> None:
    await world.start()
    first, second = await world.produce(2, START)
    with pytest.raises(Fenced):
        await world.ledger.set_aside(0, [(first.seq, first.token)], lost=True)
    assert await world.ledger.set_aside(1, [(first.seq, first.token), (second.seq, SlotToken("another"))], lost=True) == 1
    assert await world.ledger.set_aside(1, [(first.seq, first.token)], lost=True) == 0
    status = await world.ledger.status()
    assert (status.ready, status.releases, status.dead, status.bytes_used) == (1, {Reason.PAYLOAD_LOST: 1}, {}, 50)
    (slot,) = await world.reserve(1)
    assert (slot.seq, slot.attempt) == (first.seq, 2)
    assert await world.violations() == []


async def test_recorded_groups_are_dead_and_their_capacity_is_free(world: Harness) -> None:
    await world.start(settings(max_attempts=1))
    first, second, third = await world.produce(3, START)
    groups = [(header.seq, header.token) for header in (first, second)]
    with pytest.raises(Fenced):
        await world.ledger.set_aside(0, groups)
    assert await world.ledger.set_aside(1, [*groups, (third.seq, SlotToken("another")), (Seq(77), third.token)]) == 2
    assert await world.ledger.set_aside(1, groups) == 0
    status = await world.ledger.status()
    assert (status.ready, status.dead, status.letters, status.bytes_used) == (1, {Reason.RECORDED: 2}, 0, 50)
    assert status.ready_versions == {START: 10}
    assert await world.payload_count() == 1
    assert [slot.seq for slot in await world.reserve(9)] == list(range(3, 10))


# -- readers -----------------------------------------------------------------------------------------------------------------------------------


async def test_a_reader_is_known_while_it_lives_and_holds_nothing_back(world: Harness) -> None:
    await world.start(settings(**ONE))
    assert await world.ledger.follow("shadow", 1, ttl_s=60) == 0
    await train(world, 1, 2)
    assert await world.ledger.follow("shadow", 2, ttl_s=60) == 2
    assert await world.ledger.follow("export", 1, ttl_s=600) == 2
    assert (await world.ledger.status()).readers == {"shadow": 2, "export": 1}
    await world.pass_time(120)
    assert (await world.ledger.status()).readers == {"export": 1}
    await world.checkpoint(1, 1)
    await world.checkpoint(1, 2)
    assert await journalled(world) == [2]
    with pytest.raises(ReplayGap, match="starts at step 2"):
        await world.ledger.follow("export", 1, ttl_s=60)
    assert (await world.ledger.status()).readers == {}
    assert await world.ledger.follow("shadow", 9, ttl_s=60) == 2, "it waits for a step that is still to come"


# -- blobs -------------------------------------------------------------------------------------------------------------------------------------


class Blobs:
    """Stands for a blob store: what was deleted, and a fault when asked for."""

    def __init__(self) -> None:
        self.deleted: list[tuple[int, int]] = []
        self.broken = False

    async def __call__(self, seq: Seq, attempt: Attempt, token: SlotToken) -> None:
        assert token
        if self.broken:
            raise OSError("disk")
        self.deleted.append((seq, attempt))


async def test_blobs_of_groups_that_are_gone_are_deleted_by_whoever_sweeps(world: Harness) -> None:
    await world.start(settings(**ONE, blobs="blobs", max_attempts=1))
    store = Blobs()
    for step in (1, 2, 3):
        (slot,) = await world.reserve(1)
        await world.put(slot, Version(1, step - 1), blobs=blob(f"b{step}") if step != 2 else {})
        await world.train(1, step)
        await world.checkpoint(1, step)
        await world.serve(Version(1, step))
    while await world.ledger.sweep():
        pass
    store.broken = True
    with pytest.raises(OSError, match="disk"):
        await world.ledger.sweep(store)
    store.broken = False
    assert await world.ledger.sweep(store) == 1
    assert await world.ledger.sweep(store) == 0
    assert store.deleted == [(0, 1)], "step 2 had none, step 3 is needed"
    failed, expired = await world.reserve(2)
    await world.ledger.release(failed.seq, failed.token, Reason.FAILED)
    await world.advance(3600)
    await world.ledger.sweep(store)
    assert sorted(store.deleted) == [(0, 1), (failed.seq, 1), (expired.seq, 1)], "they may have been written, with no put to follow"
    with pytest.raises(SlotLost):
        await world.put(expired, Version(1, 3), blobs=blob("late"))
    await world.ledger.sweep(store)
    assert store.deleted.count((expired.seq, 1)) == 2, "written after they had been deleted"


async def test_blobs_of_what_is_spilled_or_recorded_stay(world: Harness) -> None:
    await world.start(settings(**ONE, blobs="blobs", spill="spill"))
    store = Blobs()
    for step in (1, 2, 3):
        (slot,) = await world.reserve(1)
        await world.put(slot, START, blobs=blob(f"b{step}"))
        await world.train(1, step)
        await world.checkpoint(1, step)
    for step in await world.ledger.spillable(9):
        await world.ledger.spilled(1, step)
    assert await journalled(world) == [3]
    (slot,) = await world.reserve(1)
    header = await world.put(slot, START, blobs=blob("r"))
    assert await world.ledger.set_aside(1, [(header.seq, header.token)]) == 1
    with pytest.raises(SlotLost):
        await world.put(slot, START, blobs=blob("r"))
    while await world.ledger.sweep(store):
        pass
    assert store.deleted == []
