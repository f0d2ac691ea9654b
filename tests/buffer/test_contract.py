"""The ledger's contract, on both implementations: one file, because it is one contract, read from reserve to drain."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from buffer.contract import Blocked, CheckpointRef, ChunkRecord, Granted, PutResult, RunState
from buffer.staleness import kept_tokens
from protocol.errors import (
    ConfigError,
    DecodeError,
    Fenced,
    IdentityMismatch,
    PayloadLost,
    PayloadTooLarge,
    RunEnded,
    RunMissing,
    SlotLost,
    StepOrder,
)
from protocol.messages import Edge, Reason, Seq, SlotToken
from protocol.versions import Fork, Version

from .conftest import IDENTITY, Harness, header_for, reference, seqs_of, settings

# -- creation ----------------------------------------------------------------------------------------------------------------------------------


async def test_a_run_is_created_once_and_its_settings_are_what_everyone_gets(world: Harness) -> None:
    assert await world.ledger.create(IDENTITY, settings(max_staleness=3))
    assert not await world.ledger.create(IDENTITY, settings(max_staleness=5))
    assert (await world.ledger.join(IDENTITY)).max_staleness == 3


async def test_joining_a_missing_run_says_so(world: Harness) -> None:
    with pytest.raises(RunMissing):
        await world.ledger.join(IDENTITY)


async def test_joining_with_another_identity_names_every_difference(world: Harness) -> None:
    await world.start()
    with pytest.raises(IdentityMismatch, match=r"rollout\.group_size.*run has 2, this process 4|run\.seed"):
        await world.ledger.join(dataclasses.replace(IDENTITY, seed=7, group_size=4))


# -- admission ---------------------------------------------------------------------------------------------------------------------------------


async def test_no_slot_is_granted_before_a_trainer_attached(world: Harness) -> None:
    await world.ledger.create(IDENTITY, settings())
    await world.serve(Version(1, 0))
    assert await world.ask(1) == Blocked(edge=Edge.NO_TRAINER)


async def test_reserve_grants_what_is_free_and_waits_when_nothing_is(world: Harness) -> None:
    await world.start()
    assert [slot.seq for slot in await world.reserve(3)] == [0, 1, 2]
    assert len(await world.reserve(50)) == 5  # ceil((1 + 1) * 4) - 3
    assert await world.ask(1) == Blocked(edge=Edge.NO_SLOT)


async def test_a_fractional_depth_rounds_the_limit_up(world: Harness) -> None:
    await world.start(settings(groups_per_step=3, chunk_groups=1, pipeline_depth=0.5))
    assert len(await world.reserve(50)) == 5


async def test_a_reserve_asked_again_answers_the_same_and_takes_nothing_more(world: Harness) -> None:
    await world.start()
    first = await world.ledger.reserve("p1", "same", 3, max_bytes=100)
    again = await world.ledger.reserve("p1", "same", 3, max_bytes=100)
    other = await world.ledger.reserve("p2", "same", 3, max_bytes=100)
    assert first == again
    assert isinstance(other, Granted)
    assert [slot.seq for slot in other.slots] == [3, 4, 5]
    assert (await world.ledger.status()).bytes_used == 600


async def test_two_producers_that_reserve_at_once_share_no_slot(world: Harness) -> None:
    await world.start()
    answers = await asyncio.gather(*(world.ask(2, owner=f"p{i % 2}") for i in range(6)))
    slots = [slot.seq for answer in answers if isinstance(answer, Granted) for slot in answer.slots]
    assert sorted(slots) == list(range(8))


async def test_without_a_routable_engine_reserve_names_that_edge(world: Harness) -> None:
    await world.start()
    await world.serve()
    assert await world.ask(1) == Blocked(edge=Edge.NO_ENGINE)


async def test_reserve_waits_for_an_engine_whose_tokens_the_guard_would_take(world: Harness) -> None:
    incarnation = await world.start(settings(max_staleness=0))
    slots = await world.reserve(50)
    assert len(slots) == 4  # the fifth would be used in step 2, which takes no token of version 0
    assert {slot.min_version for slot in slots} == {Version(1, 0)}
    for slot in slots:
        await world.put(slot, Version(1, 0))
    await world.train(incarnation, 1)
    assert await world.ask(1) == Blocked(edge=Edge.NO_VERSION)
    await world.serve(Version(1, 0), Version(1, 1))
    assert (await world.reserve(1))[0].min_version == Version(1, 1)


async def test_on_policy_admits_one_step_and_asks_for_the_version_just_trained(world: Harness) -> None:
    incarnation = await world.start(settings(pipeline_depth=0.0))
    for step in range(1, 4):
        await world.serve(Version(1, step - 1))
        slots = await world.reserve(50)
        assert len(slots) == 4
        assert {slot.min_version for slot in slots} == {Version(1, step - 1)}
        assert await world.ask(1) == Blocked(edge=Edge.NO_SLOT)
        for slot in slots:
            await world.put(slot, Version(1, step - 1))
        chunks = await world.lease(incarnation, step)
        ages = [chunk.record.lineage.staleness(header.oldest, step) for chunk in chunks for header in chunk.headers]
        assert ages == [0, 0, 0, 0]
        await world.ledger.trained(incarnation, step, f"w{step}", {})
        assert await world.ask(1) == Blocked(edge=Edge.NO_VERSION)


async def test_on_policy_refuses_a_group_of_an_older_version_whatever_k_is(world: Harness) -> None:
    incarnation = await world.start(settings(pipeline_depth=0.0, groups_per_step=1, chunk_groups=1))
    await world.produce(1, Version(1, 0))
    await world.train(incarnation, 1)
    await world.serve(Version(1, 1))
    await world.put((await world.reserve(1))[0], Version(1, 0))
    await world.ledger.open_step(incarnation, 2)
    assert await world.ledger.lease(incarnation, 2, 0) == Blocked(edge=Edge.NO_GROUP)
    assert (await world.ledger.status()).releases == {Reason.STALE: 1}
    (slot,) = await world.reserve(1)
    assert (slot.seq, slot.attempt) == (1, 2)


async def test_a_late_repeat_of_an_attach_does_not_replace_the_trainer_that_attached_since(world: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may deliver a request again after its sender has died and another trainer has taken over."""
    await world.start()
    for incarnation_id in ("lost", "next"):
        monkeypatch.setattr("secrets.token_hex", lambda _size, made=incarnation_id: made)
        attachment = await world.ledger.attach(None, trainer_id=incarnation_id)
    monkeypatch.setattr("secrets.token_hex", lambda _size: "lost")
    with pytest.raises(Fenced):
        await world.ledger.attach(None, trainer_id="lost")
    await world.ledger.open_step(attachment.incarnation, 1)


async def test_on_policy_what_a_rewind_made_old_is_masked_even_where_the_loss_was_to_correct(world: Harness) -> None:
    """An engine takes the rewound weights in the middle of a group; the same steps are trained again, and what the rewound weights wrote is old."""
    incarnation = await world.start(settings(pipeline_depth=0.0, groups_per_step=1, chunk_groups=1, staleness_guard="correct"))
    for step in (1, 2):
        await world.serve(Version(1, step - 1))
        await world.produce(1, Version(1, step - 1))
        await world.train(incarnation, step)
        await world.checkpoint(incarnation, 1)
    await world.serve(Version(1, 2))
    (slot,) = await world.reserve(1)
    second = (await world.ledger.attach(reference(1, 1), trainer_id="next")).incarnation
    await world.put(slot, {Version(1, 2): 90, Version(2, 1): 10})
    await world.train(second, 2)
    (chunk,) = await world.lease(second, 3)
    assert chunk.record.guard == "mask"
    assert kept_tokens(chunk.headers[0], chunk.record) == 90


async def test_an_engine_off_the_current_line_does_not_qualify(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=2, chunk_groups=1, max_staleness=0))
    for step in (1, 2):
        await world.serve(Version(1, step - 1))
        await world.produce(2, Version(1, step - 1))
        await world.train(incarnation, step)
        if step == 1:
            await world.checkpoint(incarnation, 1)
    second = await world.ledger.attach(reference(1, 1), trainer_id="next")
    await world.train(second.incarnation, 2, "another")
    await world.serve(Version(1, 2))
    assert await world.ask(1) == Blocked(edge=Edge.NO_VERSION)
    await world.serve(Version(2, 2))
    assert (await world.reserve(1))[0].min_version == Version(2, 2)


# -- bytes -------------------------------------------------------------------------------------------------------------------------------------


async def test_bytes_are_charged_at_reserve_and_trued_up_at_put(world: Harness) -> None:
    await world.start(settings(byte_budget=350))
    slots = await world.reserve(8, max_bytes=100)
    assert len(slots) == 3
    assert await world.ask(1, max_bytes=100) == Blocked(edge=Edge.NO_BUDGET)
    await world.put(slots[0], Version(1, 0), size=40)
    assert (await world.ledger.status()).bytes_used == 240
    assert len(await world.reserve(8, max_bytes=100)) == 1
    assert await world.ask(1, max_bytes=11) == Blocked(edge=Edge.NO_BUDGET)
    assert len(await world.reserve(8, max_bytes=10)) == 1


async def test_a_slot_that_no_budget_can_hold_is_a_configuration_error(world: Harness) -> None:
    await world.start(settings(byte_budget=99))
    with pytest.raises(ConfigError, match=r"buffer\.byte_budget"):
        await world.ask(1, max_bytes=100)


async def test_a_payload_over_its_charge_is_refused_and_the_slot_is_kept(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1, max_bytes=100)
    with pytest.raises(PayloadTooLarge, match="100 were charged"):
        await world.put(slot, Version(1, 0), size=101)
    assert await world.payload_count() == 0
    await world.ledger.release(slot.seq, slot.token, Reason.FAILED)
    assert (await world.reserve(1))[0].attempt == 2


async def test_a_checkpoint_is_wanted_when_trained_bytes_fill_half_the_budget(world: Harness) -> None:
    incarnation = await world.start(settings(byte_budget=1000, groups_per_step=2, chunk_groups=2))
    wanted = []
    for step in range(1, 9):
        for slot in await world.reserve(2):
            await world.put(slot, Version(1, 0), size=100)
        await world.lease(incarnation, step)
        reply = await world.ledger.trained(incarnation, step, f"w{step}", {})
        wanted.append(reply.checkpoint_wanted)
        if reply.checkpoint_wanted:
            await world.checkpoint(incarnation, step)
    assert wanted == [False, False, True, True, False, True, True, False]


# -- put, release, expiry ----------------------------------------------------------------------------------------------------------------------


async def test_put_is_idempotent(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1)
    payload = b"x" * 50
    header = header_for(slot, {Version(1, 0): 7}, payload)
    assert await world.ledger.put(header, payload) is PutResult.STORED
    assert await world.ledger.put(header, payload) is PutResult.DUPLICATE
    status = await world.ledger.status()
    assert (status.generating, status.ready, status.bytes_used, status.ready_versions) == (0, 1, 50, {Version(1, 0): 7})
    assert await world.ledger.payload(header) == payload


async def test_put_by_a_dead_token_changes_nothing(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1)
    for wrong in (
        dataclasses.replace(slot, token=SlotToken("stolen")),
        dataclasses.replace(slot, attempt=2),
        dataclasses.replace(slot, seq=Seq(99)),
    ):
        with pytest.raises(SlotLost):
            await world.put(wrong, Version(1, 0))
    assert await world.payload_count() == 0
    assert (await world.ledger.status()).generating == 1


async def test_put_of_a_version_the_run_never_had_is_refused(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1)
    for version in (Version(1, 1), Version(3, 0)):
        with pytest.raises(DecodeError, match=str(version)):
            await world.put(slot, version)
    assert await world.payload_count() == 0


async def test_an_expired_slot_is_handed_out_again_and_its_old_owner_is_refused(world: Harness) -> None:
    await world.start(settings(max_attempts=1))
    (slot,) = await world.reserve(1)
    await world.advance(61)
    (again,) = await world.reserve(1, owner="p2")
    assert (again.seq, again.attempt) == (slot.seq, 2)
    assert again.token != slot.token
    with pytest.raises(SlotLost):
        await world.put(slot, Version(1, 0))
    with pytest.raises(SlotLost):
        await world.ledger.release(slot.seq, slot.token, Reason.FAILED)
    await world.put(again, Version(1, 0))
    status = await world.ledger.status()
    assert (status.releases, status.dead) == ({Reason.EXPIRED: 1}, {})  # expiry is no failed attempt


async def test_a_heartbeat_renews_what_it_names_and_nothing_else(world: Harness) -> None:
    await world.start()
    kept, dropped = await world.reserve(2)
    await world.advance(40)
    assert await world.ledger.renew("p1", [(kept.seq, kept.token), (dropped.seq, SlotToken("other"))]) == (dropped.seq,)
    await world.advance(40)
    status = await world.ledger.status()
    assert (status.generating, status.released) == (1, 1)
    await world.put(kept, Version(1, 0))
    with pytest.raises(SlotLost):
        await world.put(dropped, Version(1, 0))


async def test_an_outage_expires_nobody(world: Harness) -> None:
    await world.start()
    slots = await world.reserve(8)
    await world.outage(3600)
    assert (await world.ledger.status()).generating == 8
    assert await world.ledger.renew("p1", [(slot.seq, slot.token) for slot in slots]) == ()
    await world.outage(-7200)  # a clock that goes back does no harm either
    assert (await world.ledger.status()).generating == 8


async def test_failures_are_bounded_then_the_group_is_dead(world: Harness) -> None:
    await world.start(settings(max_attempts=3))
    for attempt in (1, 2, 3):
        (slot,) = await world.reserve(1)
        assert (slot.seq, slot.attempt) == (0, attempt)
        await world.ledger.release(slot.seq, slot.token, Reason.FAILED)
        await world.ledger.release(slot.seq, slot.token, Reason.FAILED)  # the reply was lost
    (slot,) = await world.reserve(1)
    assert slot.seq == 1
    status = await world.ledger.status()
    assert (status.dead, status.releases) == ({Reason.FAILED: 1}, {Reason.FAILED: 2})


async def test_a_filtered_group_is_dead_and_the_next_takes_its_place(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1)
    await world.ledger.release(slot.seq, slot.token, Reason.FILTERED)
    assert (await world.reserve(1))[0].seq == 1
    assert (await world.ledger.status()).dead == {Reason.FILTERED: 1}


async def test_what_is_given_back_is_retried_first_and_not_counted(world: Harness) -> None:
    await world.start(settings(max_attempts=1))
    first, second = await world.reserve(2)
    await world.ledger.release(second.seq, second.token, Reason.GIVEN_BACK)
    await world.ledger.release(first.seq, first.token, Reason.GIVEN_BACK)
    assert [(slot.seq, slot.attempt) for slot in await world.reserve(3)] == [(0, 2), (1, 2), (2, 1)]


async def test_a_prompt_is_bound_once_and_stays_over_attempts(world: Harness) -> None:
    await world.start()
    (slot,) = await world.reserve(1)
    assert slot.prompt_id is None
    assert await world.ledger.bind(slot.seq, slot.token, "row-7") == "row-7"
    assert await world.ledger.bind(slot.seq, slot.token, "row-8") == "row-7"
    await world.ledger.release(slot.seq, slot.token, Reason.FAILED)
    with pytest.raises(SlotLost):
        await world.ledger.bind(slot.seq, slot.token, "row-9")
    (again,) = await world.reserve(1)
    assert again.prompt_id == "row-7"


# -- steps -------------------------------------------------------------------------------------------------------------------------------------


async def test_a_step_takes_exactly_b_groups_oldest_first_in_chunks(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=5, chunk_groups=2))
    slots = await world.reserve(7)
    for slot in reversed(slots):
        await world.put(slot, Version(1, 0))
    chunks = await world.lease(incarnation, 1)
    assert [seqs_of(chunk) for chunk in chunks] == [[0, 1], [2, 3], [4]]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    status = await world.ledger.status()
    assert (status.leased, status.ready, status.outstanding) == (5, 2, 7)


async def test_a_chunk_waits_until_it_is_whole(world: Harness) -> None:
    incarnation = await world.start()
    await world.ledger.open_step(incarnation, 1)
    slots = await world.reserve(2)
    await world.put(slots[0], Version(1, 0))
    assert await world.ledger.lease(incarnation, 1, 0) == Blocked(edge=Edge.NO_GROUP)
    assert (await world.ledger.status()).leased == 0
    await world.put(slots[1], Version(1, 0))
    chunk = await world.ledger.lease(incarnation, 1, 0)
    assert isinstance(chunk, ChunkRecord)
    assert seqs_of(chunk) == [0, 1]


async def test_a_lease_asked_again_answers_the_same_chunk(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(4, Version(1, 0))
    chunks = await world.lease(incarnation, 1)
    assert await world.lease(incarnation, 1) == chunks
    assert (await world.ledger.status()).leased == 4


async def test_steps_and_chunks_out_of_order_are_refused(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    with pytest.raises(StepOrder):
        await world.ledger.lease(incarnation, 1, 0)  # not opened
    with pytest.raises(StepOrder):
        await world.ledger.open_step(incarnation, 2)
    await world.ledger.open_step(incarnation, 1)
    for chunk in (1, 2, -1):
        with pytest.raises(StepOrder):
            await world.ledger.lease(incarnation, 1, chunk)
    await world.ledger.lease(incarnation, 1, 0)
    with pytest.raises(StepOrder, match="chunk 1"):
        await world.ledger.trained(incarnation, 1, "w1", {})
    await world.ledger.lease(incarnation, 1, 1)
    await world.ledger.trained(incarnation, 1, "w1", {})
    for call in (world.ledger.open_step(incarnation, 1), world.ledger.lease(incarnation, 1, 0), world.ledger.trained(incarnation, 3, "w", {})):
        with pytest.raises(StepOrder):
            await call
    with pytest.raises(StepOrder):
        await world.ledger.trained(incarnation, 1, "another", {})


async def test_trained_asked_again_answers_the_same(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    await world.train(incarnation, 1)
    before = await world.ledger.status()
    reply = await world.ledger.trained(incarnation, 1, "w1", {})
    assert reply.trained == 1
    after = await world.ledger.status()
    assert dataclasses.replace(after, sequence=before.sequence) == before
    assert (before.trained_groups, before.leased) == (4, 0)


async def test_trained_frees_the_capacity_of_its_groups(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    assert await world.ask(1) == Blocked(edge=Edge.NO_SLOT)
    await world.train(incarnation, 1)
    assert len(await world.reserve(50)) == 4


# -- the guard ---------------------------------------------------------------------------------------------------------------------------------


async def _train_to(world: Harness, incarnation: int, step: int) -> None:
    """Train up to `step`, with one group a step, each on the newest weights."""
    trained = (await world.ledger.status()).trained
    for s in range(trained + 1, step + 1):
        await world.serve(Version(incarnation, s - 1))
        await world.produce(1, Version(incarnation, s - 1))
        await world.train(incarnation, s)
    await world.serve(Version(incarnation, step))


async def test_the_guard_masks_by_token_and_releases_what_has_too_little_left(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=1, chunk_groups=1, max_staleness=2, min_kept_share=0.5))
    await _train_to(world, incarnation, 4)  # step 5 takes tokens of version 2 and newer
    first, second = await world.reserve(2)
    await world.put(first, {Version(1, 1): 51, Version(1, 4): 49})
    await world.put(second, {Version(1, 1): 50, Version(1, 2): 50})
    (chunk,) = await world.lease(incarnation, 5)
    assert seqs_of(chunk) == [second.seq]
    assert chunk.record.cutoff == 2
    assert kept_tokens(chunk.headers[0], chunk.record) == 50
    assert (await world.ledger.status()).releases == {Reason.STALE: 1}
    await world.ledger.trained(incarnation, 5, "w5", {})
    (again,) = await world.reserve(1)
    assert (again.seq, again.attempt) == (first.seq, 2)


async def test_the_guard_drops_by_the_oldest_token_when_asked_to(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=1, chunk_groups=1, max_staleness=2, staleness_guard="drop"))
    await _train_to(world, incarnation, 4)
    first, second = await world.reserve(2)
    await world.put(first, {Version(1, 1): 1, Version(1, 4): 99})
    await world.put(second, {Version(1, 2): 99, Version(1, 4): 1})
    (chunk,) = await world.lease(incarnation, 5)
    assert seqs_of(chunk) == [second.seq]


async def test_the_guard_leaves_everything_to_the_loss_when_asked_to(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=1, chunk_groups=1, max_staleness=2, staleness_guard="correct"))
    await _train_to(world, incarnation, 4)
    (slot,) = await world.reserve(1)
    await world.put(slot, Version(1, 0))
    (chunk,) = await world.lease(incarnation, 5)
    assert kept_tokens(chunk.headers[0], chunk.record) == 10


async def test_stale_retries_are_bounded(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=1, chunk_groups=1, max_staleness=0, max_attempts=2))
    await _train_to(world, incarnation, 1)
    await world.ledger.open_step(incarnation, 2)
    for _ in range(2):
        (slot,) = await world.reserve(1)
        assert slot.seq == 1
        await world.put(slot, Version(1, 0))
        assert await world.ledger.lease(incarnation, 2, 0) == Blocked(edge=Edge.NO_GROUP)
    assert (await world.ledger.status()).dead == {Reason.STALE: 1}
    assert (await world.reserve(1))[0].seq == 2


async def test_a_token_of_a_forked_line_is_as_old_as_what_it_shares(world: Harness) -> None:
    """Fork step 7, a token by 1:9, used in step 11 of incarnation 2: staleness 3."""
    incarnation = await world.start(settings(groups_per_step=1, chunk_groups=1, pipeline_depth=2.0, max_staleness=3))
    await _train_to(world, incarnation, 7)
    await world.checkpoint(incarnation, 7)
    await _train_to(world, incarnation, 9)
    kept, refused = await world.reserve(2)
    await world.put(kept, Version(1, 9))
    second = (await world.ledger.attach(reference(7, 1), trainer_id="next")).incarnation
    for step in (8, 9):
        await world.train(second, step, f"other{step}")
    await world.serve(Version(2, 9))
    record = await world.ledger.open_step(second, 10)
    assert record.lineage.forks[2] == Fork(1, 7)
    await world.ledger.lease(second, 10, 0)
    await world.ledger.trained(second, 10, "other10", {})
    await world.put(refused, {Version(1, 9): 10})
    (chunk,) = await world.lease(second, 11)
    assert chunk.record.lineage.staleness(chunk.headers[0].oldest, 11) == 3
    await world.ledger.trained(second, 11, "other11", {})
    (late,) = await world.reserve(1)
    await world.put(late, Version(1, 9))
    await world.ledger.open_step(second, 12)
    assert await world.ledger.lease(second, 12, 0) == Blocked(edge=Edge.NO_GROUP)  # staleness 4 > 3


# -- resume ------------------------------------------------------------------------------------------------------------------------------------


async def test_attach_rewinds_exactly_and_the_same_chunks_come_back(world: Harness) -> None:
    incarnation = await world.start(settings(max_staleness=1))
    history: dict[int, list[ChunkRecord]] = {}
    for step in range(1, 6):
        await world.serve(Version(1, step - 1))
        await world.produce(4, Version(1, step - 1))
        history[step] = await world.lease(incarnation, step)
        await world.ledger.trained(incarnation, step, f"w{step}", {})
        if step == 2:
            await world.checkpoint(incarnation, 2)
    await world.serve(Version(1, 5))
    await world.produce(2, Version(1, 5))
    await world.ledger.open_step(incarnation, 6)
    torn = await world.ledger.lease(incarnation, 6, 0)

    attachment = await world.ledger.attach(reference(2, 1), trainer_id="next")
    assert (attachment.incarnation, attachment.resume_step) == (2, 2)
    assert attachment.lineage.forks == {1: Fork(0, 0), 2: Fork(1, 2)}
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.leased) == (2, 8, 14)
    for step in (3, 4, 5):
        assert await world.lease(2, step) == history[step]
        reply = await world.ledger.trained(2, step, f"w{step}", {})
        assert reply.lineage.forks[2] == Fork(1, step)  # rule V1: the same weights are the same version
    record = await world.ledger.open_step(2, 6)
    assert record.incarnation == 2
    assert await world.ledger.lease(2, 6, 0) == torn
    await world.serve(Version(2, 5))
    await world.produce(2, Version(2, 5))
    chunk = await world.ledger.lease(2, 6, 1)
    assert isinstance(chunk, ChunkRecord)
    assert chunk.record.lineage.staleness(Version(2, 5), 6) == 0
    assert isinstance(torn, ChunkRecord)
    assert torn.record.incarnation == 1
    await world.ledger.trained(2, 6, "w6", {})


async def test_an_equal_digest_counts_only_on_an_unbroken_line(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    for step in (1, 2):
        await world.train(incarnation, step)
    await world.produce(4, Version(1, 2))
    await world.train(incarnation, 3)
    await world.ledger.attach(None, trainer_id="next")
    await world.train(2, 1, "other")
    reply_digest = "w2"
    await world.lease(2, 2)
    reply = await world.ledger.trained(2, 2, reply_digest, {})
    assert reply.lineage.forks[2] == Fork(1, 0)


async def test_lineage_follows_replays_of_replays(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    await world.train(incarnation, 1)
    await world.checkpoint(incarnation, 1)
    await world.train(incarnation, 2)
    await world.produce(4, Version(1, 2))
    await world.ledger.attach(reference(1, 1), trainer_id="second")
    await world.train(2, 2)
    await world.train(2, 3)
    await world.ledger.attach(reference(1, 1), trainer_id="third")
    await world.train(3, 2)
    await world.lease(3, 3)
    reply = await world.ledger.trained(3, 3, "w3", {})
    assert [reply.lineage.shared(version) for version in (Version(1, 2), Version(2, 3), Version(3, 3))] == [2, 3, 3]
    assert reply.lineage.contains(Version(2, 3))


async def test_a_fenced_trainer_changes_nothing(world: Harness) -> None:
    await world.start()
    await world.produce(8, Version(1, 0))
    await world.train(1, 1)
    await world.ledger.open_step(1, 2)
    await world.ledger.attach(None, trainer_id="next")
    before = await world.ledger.status()
    calls = (
        world.ledger.open_step(1, 2),
        world.ledger.lease(1, 2, 0),
        world.ledger.trained(1, 2, "w2", {}),
        world.ledger.payload_lost(1, 1, 0, Seq(0)),
        world.ledger.checkpoint(1, reference(1, 1), keep=2),
        world.ledger.drain(1, "end"),
    )
    for call in calls:
        with pytest.raises(Fenced, match="incarnation 2"):
            await call
    after = await world.ledger.status()
    assert dataclasses.replace(after, sequence=before.sequence) == before


async def test_only_a_registered_checkpoint_can_be_resumed(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    await world.train(incarnation, 1)
    with pytest.raises(StepOrder, match="not a registered checkpoint"):
        await world.ledger.attach(reference(1, 1), trainer_id="next")
    with pytest.raises(StepOrder):
        await world.ledger.checkpoint(incarnation, reference(2, 1), keep=2)


async def test_a_checkpoint_frees_only_what_the_oldest_kept_one_covers(world: Harness) -> None:
    incarnation = await world.start()
    counts = []
    for step in range(1, 5):
        await world.produce(4, Version(1, 0))
        await world.train(incarnation, step)
        kept = await world.checkpoint(incarnation, step)
        assert await world.checkpoint(incarnation, step) == kept  # the reply was lost
        assert [one.step for one in kept] == list(range(max(1, step - 1), step + 1))
        counts.append(await world.payload_count())
    assert counts == [4, 4, 4, 4]
    status = await world.ledger.status()
    assert (status.low_seq, status.trained_groups, status.bytes_used) == (12, 16, 200)
    assert [chunk.step for chunk in await world.ledger.chunks(1, 99)] == [4, 4]
    with pytest.raises(StepOrder):
        await world.ledger.attach(None, trainer_id="next")
    with pytest.raises(StepOrder):
        await world.ledger.attach(reference(2, 1), trainer_id="next")
    await world.ledger.attach(reference(3, 1), trainer_id="next")
    assert await world.train(2, 4) == [12, 13, 14, 15]


async def test_retention_keeps_payloads_for_replay(world: Harness) -> None:
    incarnation = await world.start(settings(retention=2))
    for step in range(1, 6):
        await world.produce(4, Version(1, 0))
        await world.train(incarnation, step)
        await world.checkpoint(incarnation, step)
    assert sorted({chunk.step for chunk in await world.ledger.chunks(1, 99)}) == [3, 4, 5]
    assert await world.payload_count() == 12


async def test_low_seq_stops_at_the_first_group_that_is_not_settled(world: Harness) -> None:
    incarnation = await world.start()
    (straggler,) = await world.reserve(1)
    (dead,) = await world.reserve(1)
    await world.ledger.release(dead.seq, dead.token, Reason.FILTERED)
    for step in range(1, 4):
        await world.produce(4, Version(1, 0))
        await world.train(incarnation, step)
        await world.checkpoint(incarnation, step)
    assert (await world.ledger.status()).low_seq == 0
    await world.put(straggler, Version(1, 0))
    await world.produce(3, Version(1, 0))
    assert await world.train(incarnation, 4) == [0, 14, 15, 16]
    for step in (5, 6):
        await world.produce(4, Version(1, 0))
        await world.train(incarnation, step)
        await world.checkpoint(incarnation, step)
    assert (await world.ledger.status()).low_seq == 21
    assert (await world.ledger.status()).dead == {Reason.FILTERED: 1}


# -- lost payloads -----------------------------------------------------------------------------------------------------------------------------


async def test_a_payload_lost_in_the_head_step_is_replaced(world: Harness) -> None:
    incarnation = await world.start()
    headers = await world.produce(4, Version(1, 0))
    await world.lease(incarnation, 1)
    await world.lose_payload(headers[1])
    with pytest.raises(PayloadLost) as lost:
        await world.ledger.payloads(headers)
    assert lost.value.seq == 1
    assert await world.ledger.payload_lost(incarnation, 1, 0, Seq(1)) == Blocked(edge=Edge.NO_GROUP)
    assert await world.ledger.payload_lost(incarnation, 1, 0, Seq(1)) == Blocked(edge=Edge.NO_GROUP)
    with pytest.raises(StepOrder):
        await world.ledger.trained(incarnation, 1, "w1", {})
    (again,) = await world.reserve(1)
    assert (again.seq, again.attempt) == (1, 2)
    await world.produce(1, Version(1, 0))
    chunk = await world.ledger.lease(incarnation, 1, 0)
    assert isinstance(chunk, ChunkRecord)
    assert (seqs_of(chunk), chunk.revision) == ([0, 4], 1)
    assert await world.ledger.payload_lost(incarnation, 1, 0, Seq(1)) == chunk
    await world.ledger.trained(incarnation, 1, "w1", {})


async def test_a_payload_lost_in_a_replayed_step_leaves_a_hole(world: Harness) -> None:
    incarnation = await world.start()
    headers = await world.produce(8, Version(1, 0))
    await world.train(incarnation, 1)
    await world.ledger.attach(None, trainer_id="next")
    await world.lease(2, 1)
    await world.lose_payload(headers[1])
    chunk = await world.ledger.payload_lost(2, 1, 0, Seq(1))
    assert isinstance(chunk, ChunkRecord)
    assert (seqs_of(chunk), chunk.revision) == ([0], 1)
    assert await world.ledger.lease(2, 1, 0) == chunk
    await world.ledger.trained(2, 1, "other", {})
    status = await world.ledger.status()
    assert (status.dead, status.trained_groups) == ({Reason.PAYLOAD_LOST: 1}, 3)


async def test_a_chunk_torn_by_a_lost_payload_is_judged_anew_by_the_next_trainer(world: Harness) -> None:
    incarnation = await world.start()
    headers = await world.produce(4, Version(1, 0))
    await world.lease(incarnation, 1)
    await world.lose_payload(headers[0])
    await world.ledger.payload_lost(incarnation, 1, 0, Seq(0))
    await world.ledger.attach(None, trainer_id="next")
    await world.serve(Version(2, 0))
    record = await world.ledger.open_step(2, 1)
    assert record.incarnation == 2
    assert await world.ledger.lease(2, 1, 0) == Blocked(edge=Edge.NO_GROUP)
    await world.produce(1, Version(2, 0))
    chunk = await world.ledger.lease(2, 1, 0)
    assert isinstance(chunk, ChunkRecord)
    assert (seqs_of(chunk), chunk.revision, chunk.record.incarnation) == ([1, 0], 2, 2)
    whole = await world.ledger.lease(2, 1, 1)
    assert isinstance(whole, ChunkRecord)
    assert whole.record.incarnation == 1
    await world.ledger.trained(2, 1, "w1", {})


async def test_a_damaged_payload_is_lost(world: Harness) -> None:
    await world.start()
    (header,) = await world.produce(1, Version(1, 0))
    with pytest.raises(PayloadLost, match="digest"):
        await world.ledger.payload(dataclasses.replace(header, payload_digest="0" * 32))


# -- the end -----------------------------------------------------------------------------------------------------------------------------------


async def test_a_draining_run_hands_out_nothing_and_takes_what_is_finished(world: Harness) -> None:
    incarnation = await world.start()
    slots = await world.reserve(3)
    await world.ledger.drain(incarnation, "steps")
    await world.ledger.drain(incarnation, "steps")
    with pytest.raises(RunEnded):
        await world.ask(1)
    await world.put(slots[0], Version(1, 0))
    await world.ledger.release(slots[1].seq, slots[1].token, Reason.GIVEN_BACK)
    await world.ledger.open_step(incarnation, 1)
    with pytest.raises(RunEnded):
        await world.ledger.lease(incarnation, 1, 0)
    status = await world.ledger.status()
    assert (status.state, status.ready, status.generating, status.released) == (RunState.DRAINING, 1, 1, 1)
    await world.ledger.attach(None, trainer_id="again")
    assert (await world.ledger.status()).state is RunState.OPEN
    assert len(await world.reserve(1)) == 1


async def test_status_and_journal_tell_the_same_story(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, Version(1, 0))
    await world.train(incarnation, 1)
    await world.checkpoint(incarnation, 1)
    await world.lease(incarnation, 2)
    status = await world.ledger.status()
    assert status.checkpoints == (CheckpointRef(step=1, incarnation=1, digest="w1", path="checkpoint/step-000001-1"),)
    assert (status.next_seq, status.trained, status.leased, status.byte_budget, status.admission_limit) == (8, 1, 4, 100_000, 8)
    assert seqs_of(*await world.ledger.chunks(1, 2)) == list(range(8))
    record = await world.ledger.step_record(2)
    assert record is not None
    assert (record.step, record.groups, record.chunk, record.guard, record.cutoff) == (2, 4, 2, "mask", -7)
    assert await world.ledger.step_record(3) is None
