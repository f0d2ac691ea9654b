"""Selection, admission for a served version, and the ways back: the policy by itself and as both ledgers apply it."""

from __future__ import annotations

import itertools

import pytest

from buffer.contract import Blocked, ChunkRecord
from buffer.policy import Policy
from protocol.errors import SlotLost, StepOrder
from protocol.messages import Attempt, Edge, Reason, Seq, SlotToken
from protocol.versions import Fork, Lineage, Version

from .conftest import IDENTITY, Harness, header_for, reference, seqs_of, settings
from .conftest import Slot as SlotOf

FIRST = Version(1, 0)


# -- the policy by itself ----------------------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_module() -> None:
    policy = Policy(settings(groups_per_step=4, pipeline_depth=1.0, max_staleness=2))
    assert policy.limit == 8
    assert policy.needed(trained=5, outstanding=7) == 4
    assert policy.cutoff(7) == 4


@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_the_bound_is_read_from_an_audit_as_the_policy_has_it(depth: float) -> None:
    config = settings(pipeline_depth=depth, max_staleness=3)
    assert Policy.recorded_bound(config.model_dump(mode="json")) == Policy(config).bound
    assert Policy.recorded_bound({}) is None


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_what_is_admitted_in_order_is_never_too_old_for_the_step_that_takes_it(max_staleness: int) -> None:
    policy = Policy(settings(max_staleness=max_staleness))
    for trained, outstanding in itertools.product(range(6), range(policy.limit)):
        step = trained + 1 + outstanding // 4
        assert policy.needed(trained=trained, outstanding=outstanding) == max(0, policy.cutoff(step))


def test_freshest_orders_by_what_a_writer_shares_with_the_line_not_by_its_name() -> None:
    lineage, policy = Lineage({1: Fork(0, 0), 2: Fork(1, 3)}, head=2), Policy(settings(selection="freshest"))

    def score(seq: int, *versions: Version) -> int:
        slot = SlotOf(seq=Seq(seq), attempt=Attempt(1), token=SlotToken("t"), min_version=FIRST, prompt_id=None, max_bytes=1)
        return policy.score(header_for(slot, dict.fromkeys(versions, 1), b""), lineage, arrival=seq)

    of_both_lines = [score(0, Version(1, 9)), score(1, Version(2, 5)), score(2, Version(2, 4), Version(2, 5)), score(3, Version(2, 5))]
    assert sorted(range(4), key=lambda seq: of_both_lines[seq]) == [1, 3, 2, 0]
    assert float(score(2**31, Version(2, 2**20))) == score(2**31, Version(2, 2**20)), "exact in the doubles that Redis sorts by"


# -- on both ledgers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "expected"),
    [("oldest", [0, 1, 2, 3, 4, 5]), ("fifo", [5, 0, 4, 1, 3, 2]), ("freshest", [0, 5, 3, 4, 1, 2])],
)
async def test_a_step_takes_groups_in_the_order_of_the_selection(world: Harness, selection: str, expected: list[int]) -> None:
    incarnation = await world.start(settings(selection=selection, groups_per_step=2, chunk_groups=1, pipeline_depth=3.0))
    early = await world.reserve(6)
    taken = [header.seq for header in await _put_and_train(world, incarnation, steps=2)]
    ages = {5: 2, 0: 2, 4: 1, 1: 0, 3: 1, 2: 0}
    for seq in (5, 0, 4, 1, 3, 2):
        await world.put(early[seq], Version(1, ages[seq]))
    for seq in taken:
        assert seq >= 6
    order: list[int] = []
    for step in range(3, 6):
        order += seqs_of(*await world.lease(incarnation, step))
        await world.ledger.trained(incarnation, step, f"w{step}", {})
    assert order == expected


async def _put_and_train(world: Harness, incarnation: int, *, steps: int) -> list[object]:
    headers = []
    for step in range(1, steps + 1):
        await world.serve(Version(1, step - 1))
        headers += await world.produce(2, Version(1, step - 1))
        await world.train(incarnation, step)
    return headers


async def test_what_freshest_passes_over_grows_stale_and_is_retried(world: Harness) -> None:
    incarnation = await world.start(settings(selection="freshest", groups_per_step=1, chunk_groups=1, pipeline_depth=1.0, max_staleness=1))
    waiting, first = await world.reserve(2)
    await world.put(waiting, FIRST)
    await world.put(first, FIRST)
    assert await world.train(incarnation, 1) == [0]
    for step in (2, 3):
        assert (await world.ledger.status()).releases == {}
        await world.serve(Version(1, step - 1))
        await world.produce(1, Version(1, step - 1))
        assert await world.train(incarnation, step) == [step], "there is always something fresher"
    assert (await world.ledger.status()).releases == {Reason.STALE: 1}
    await world.serve(Version(1, 3))
    (again,) = await world.reserve(1)
    assert (again.seq, again.attempt) == (1, 2)


async def test_what_freshest_passes_over_and_the_guard_would_take_stays(world: Harness) -> None:
    """Half of its tokens may be over K: it is judged by what is left, and is there when nothing fresher is."""
    incarnation = await world.start(settings(selection="freshest", groups_per_step=1, chunk_groups=1, pipeline_depth=2.0, max_staleness=1))
    half, first = await world.reserve(2)
    await world.put(first, FIRST)
    await world.train(incarnation, 1)
    await world.put(half, {FIRST: 5, Version(1, 1): 5})
    for step in (2, 3):
        await world.serve(Version(1, step - 1))
        if step == 2:
            await world.produce(1, Version(1, 1))
        assert await world.train(incarnation, step) == [2 if step == 2 else 0]
    assert (await world.ledger.status()).releases == {}


async def test_a_released_group_of_any_selection_leaves_the_queue_and_may_come_again(world: Harness) -> None:
    incarnation = await world.start(settings(selection="fifo", groups_per_step=2, chunk_groups=2, pipeline_depth=2.0))
    slots = await world.reserve(3)
    for slot in (slots[2], slots[1], slots[0]):
        await world.put(slot, FIRST)
    (chunk,) = await world.lease(incarnation, 1)
    assert seqs_of(chunk) == [2, 1]
    await world.lose_payload(chunk.headers[0])
    answer = await world.ledger.payload_lost(incarnation, 1, 0, Seq(2))
    assert isinstance(answer, ChunkRecord)
    assert seqs_of(answer) == [1, 0]
    assert (await world.reserve(1))[0].seq == 2


async def test_a_served_version_takes_the_place_of_an_engine(world: Harness) -> None:
    incarnation = await world.start(settings(groups_per_step=2, chunk_groups=2, max_staleness=1))
    await world.serve()
    assert await world.ask(1) == Blocked(edge=Edge.NO_ENGINE)
    slots = await world.reserve(4, served=FIRST)
    assert len(slots) == 4
    for slot in slots:
        await world.put(slot, FIRST)
    for step in (1, 2):
        await world.train(incarnation, step)
    assert await world.ask(1, served=FIRST) == Blocked(edge=Edge.NO_VERSION)  # step 3 takes nothing older than version 1
    assert await world.ask(1, served=Version(9, 2)) == Blocked(edge=Edge.NO_VERSION)
    assert len(await world.reserve(1, served=Version(1, 1))) == 1


# -- rule T6 -----------------------------------------------------------------------------------------------------------------------------------


async def _on_policy_to(world: Harness, steps: int) -> dict[int, list[int]]:
    assert await world.ledger.create(IDENTITY, settings(pipeline_depth=0.0))
    await world.ledger.attach(None, trainer_id="trainer")
    taken = {}
    for step in range(1, steps + 1):
        await world.serve(Version(1, step - 1))
        await world.produce(4, Version(1, step - 1))
        taken[step] = await world.train(1, step)
    return taken


async def test_on_policy_a_replay_with_other_weights_releases_what_the_old_ones_wrote(world: Harness) -> None:
    taken = await _on_policy_to(world, 3)
    await world.serve(Version(1, 3))
    await world.produce(4, Version(1, 3))
    await world.ledger.attach(None, trainer_id="next")
    assert await world.train(2, 1) == taken[1]  # equal weights: nothing happens
    assert (await world.ledger.status()).leased == 8
    assert await world.train(2, 2, "other") == taken[2]
    status = await world.ledger.status()
    assert (status.leased, status.ready, status.released) == (0, 0, 8)
    assert status.releases == {Reason.REWOUND: 8}
    assert await world.ledger.step_record(3) is None
    await world.serve(Version(2, 2))
    slots = await world.reserve(8)
    assert [slot.seq for slot in slots] == taken[3]
    for slot in slots:
        await world.put(slot, Version(2, 2))
    chunks = await world.lease(2, 3)
    assert [chunk.record.lineage.contains(header.oldest) for chunk in chunks for header in chunk.headers] == [True] * 4


async def test_off_policy_a_replay_with_other_weights_trains_the_same_batches(world: Harness) -> None:
    incarnation = await world.start()
    await world.produce(8, FIRST)
    first, second = await world.train(incarnation, 1), await world.train(incarnation, 2)
    await world.ledger.attach(None, trainer_id="next")
    assert (await world.train(2, 1, "other"), await world.train(2, 2, "other")) == (first, second)


# -- going further back ------------------------------------------------------------------------------------------------------------------------


async def test_abandoning_gives_up_what_followed_the_checkpoint(world: Harness) -> None:
    incarnation = await world.start()
    trained = {}
    for step in range(1, 6):
        await world.produce(4, FIRST)
        trained[step] = await world.train(incarnation, step)
        if step in (2, 4):
            await world.checkpoint(incarnation, step, keep=3)
    await world.produce(3, FIRST)
    attachment = await world.ledger.attach(reference(2, 1), trainer_id="next", abandon=())
    assert (attachment.resume_step, attachment.lineage.forks[2]) == (2, Fork(1, 2))
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.leased, status.released, status.ready) == (2, 8, 0, 12, 3)
    assert (status.releases, [one.step for one in status.checkpoints]) == ({Reason.REWOUND: 12}, [2])
    assert await world.ledger.chunks(3, 9) == ()
    assert [slot.seq for slot in await world.reserve(5)] == [*trained[3], trained[4][0]]


async def test_with_the_groups_of_freed_steps_a_run_goes_back_further_than_what_is_kept(world: Harness) -> None:
    incarnation = await world.start()
    trained = {}
    for step in range(1, 6):
        await world.produce(4, FIRST)
        trained[step] = await world.train(incarnation, step)
        await world.checkpoint(incarnation, step)
    assert (await world.ledger.status()).dropped == 4
    with pytest.raises(StepOrder):
        await world.ledger.attach(reference(2, 1), trainer_id="next")
    with pytest.raises(StepOrder):
        await world.ledger.attach(reference(2, 1), trainer_id="next", abandon=())
    freed = [Seq(seq) for step in (3, 4, 5) for seq in trained[step]]
    attachment = await world.ledger.attach(reference(2, 1), trainer_id="next", abandon=freed)
    assert attachment.resume_step == 2
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.released, status.dropped) == (2, 8, 12, 2)
    assert [one.step for one in status.checkpoints] == [2]
    for step in (3, 4, 5):
        await world.serve(Version(2, step - 1))
        slots = await world.reserve(4)
        assert [slot.seq for slot in slots] == trained[step]
        for slot in slots:
            await world.put(slot, Version(2, step - 1))
        assert await world.train(2, step, f"other{step}") == trained[step]
        await world.checkpoint(2, step)
    assert (await world.ledger.status()).trained_groups == 20


async def test_a_run_may_begin_again_from_the_starting_weights(world: Harness) -> None:
    incarnation = await world.start()
    for step in range(1, 4):
        await world.produce(4, FIRST)
        await world.train(incarnation, step)
        await world.checkpoint(incarnation, step)
    attachment = await world.ledger.attach(None, trainer_id="next", abandon=[Seq(seq) for seq in range(12)])
    assert attachment.resume_step == 0
    status = await world.ledger.status()
    assert (status.trained, status.trained_groups, status.released, status.checkpoints) == (0, 0, 12, ())
    await world.serve(Version(2, 0))
    assert [slot.seq for slot in await world.reserve(8)] == list(range(8))


async def test_on_policy_abandoned_weights_leave_nothing_that_may_be_used(world: Harness) -> None:
    """What 1:3 wrote shares version 2 with the line that forks there: its number says on-policy, its weights are gone. An engine may still serve it."""
    await _on_policy_to(world, 2)
    await world.checkpoint(1, 2)
    await world.serve(Version(1, 2))
    await world.produce(4, Version(1, 2))
    await world.train(1, 3)
    await world.serve(Version(1, 3))
    late, *slots = await world.reserve(4)
    for slot in slots:
        await world.put(slot, Version(1, 3))
    await world.ledger.attach(reference(2, 1), trainer_id="next", abandon=())
    assert (await world.ledger.status()).ready == 0
    with pytest.raises(SlotLost):
        await world.put(late, Version(1, 3))
    await world.serve(Version(2, 2))
    await world.produce(3, Version(2, 2))
    await world.produce(1, Version(1, 3))
    assert await world.train_blocked(2, 3) == Blocked(edge=Edge.NO_GROUP)
    assert (await world.ledger.status()).releases[Reason.STALE] == 1


async def test_an_attachment_is_newer_than_any_the_caller_has_seen(world: Harness) -> None:
    await world.start()
    attachment = await world.ledger.attach(None, trainer_id="next", above=6)
    assert (attachment.incarnation, attachment.lineage.forks) == (7, {1: Fork(0, 0), 7: Fork(1, 0)})
    assert (await world.ledger.attach(None, trainer_id="next", above=3)).incarnation == 8
