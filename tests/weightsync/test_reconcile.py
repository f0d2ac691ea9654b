from __future__ import annotations

import doctest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import EngineState
from protocol.versions import Version
from weightsync import reconcile
from weightsync.reconcile import MAX_BACKOFF_S, Apply, Core, Pause, Prepare, Sight, Wait


def sight(incarnation: int, n: int, state: EngineState = EngineState.ROUTABLE) -> Sight:
    return Sight(Version(incarnation, n), state)


def serve(core: Core, version: Version, now: float = 0.0) -> None:
    core.seen(Sight(version, EngineState.ROUTABLE))
    core.prepared(version)
    core.granted()
    core.applied(version, now)


def test_the_worked_example_holds():
    assert doctest.testmod(reconcile).failed == 0


def test_nothing_is_done_without_a_version_or_a_registration():
    core = Core()
    for look in (Sight(None, EngineState.STARTING), Sight(Version(1, 1), None), sight(1, 1, EngineState.LEAVING)):
        core.seen(look)
        assert core.next(0.0) == Wait(None)


def test_versions_in_between_are_skipped():
    core = Core()
    serve(core, Version(1, 1))
    core.seen(sight(1, 7))
    assert core.next(0.0) == Prepare(Version(1, 7))


def test_a_newer_version_seen_while_waiting_for_a_pause_takes_its_place():
    core = Core()
    core.seen(sight(1, 2, EngineState.STARTING))
    core.prepared(Version(1, 2))
    assert core.next(0.0) == Pause(Version(1, 2))
    core.refused()
    assert core.next(0.0) == Wait(None, for_pause=True)
    core.seen(sight(1, 3, EngineState.STARTING))
    assert core.next(0.0) == Prepare(Version(1, 3))
    core.prepared(Version(1, 3))
    assert core.next(0.0) == Pause(Version(1, 3))


def test_a_right_to_pause_that_ran_out_unused_is_asked_for_again_after_a_look():
    core = Core()
    core.seen(sight(1, 2))
    core.prepared(Version(1, 2))
    core.granted()
    assert core.next(0.0) == Apply(Version(1, 2))
    core.lapsed()
    assert core.next(0.0) == Wait(None, for_pause=True)
    core.seen(sight(1, 2))
    assert core.next(0.0) == Pause(Version(1, 2))


def test_an_engine_is_up_to_date_only_with_the_newest_version_that_the_registry_knows_of():
    core = Core()
    assert not core.up_to_date
    serve(core, Version(1, 2))
    assert core.up_to_date
    for look in (sight(1, 3), sight(1, 2, EngineState.UNFIT), Sight(Version(1, 2), EngineState.ROUTABLE, Version(1, 1)), Sight(None, EngineState.ROUTABLE)):
        core.seen(look)
        assert not core.up_to_date


def test_failures_wait_longer_and_longer_up_to_a_bound_and_success_forgets_them():
    core, now, waits = Core(), 0.0, []
    for _ in range(12):
        core.seen(sight(1, 2, EngineState.UNFIT))
        core.prepared(Version(1, 2))
        core.granted()
        assert core.next(now) == Apply(Version(1, 2))
        core.apply_failed(now)
        wait = core.next(now)
        assert isinstance(wait, Wait)
        waits.append(round(wait.until - now, 6))
        now = wait.until
        assert core.next(now) == Prepare(Version(1, 2))
    assert waits == sorted(waits)
    assert waits[0] < 1
    assert waits[-1] == MAX_BACKOFF_S
    serve(core, Version(1, 2), now)
    core.seen(sight(1, 3))
    assert core.next(now) == Prepare(Version(1, 3))


def test_an_engine_called_unfit_from_outside_is_brought_up_again_in_full():
    core = Core()
    serve(core, Version(1, 4))
    core.seen(sight(1, 4))
    assert core.next(0.0) == Wait(None)
    core.seen(sight(1, 4, EngineState.UNFIT))
    assert core.next(0.0) == Prepare(Version(1, 4))


def test_an_engine_goes_to_a_lower_n_only_in_a_higher_incarnation():
    core = Core()
    serve(core, Version(1, 9))
    core.seen(sight(1, 8))
    assert core.next(0.0) == Wait(None)
    core.seen(sight(2, 7))
    assert core.next(0.0) == Prepare(Version(2, 7))


def test_a_minimum_interval_spaces_updates():
    core = Core(min_interval_s=5.0)
    serve(core, Version(1, 1), now=10.0)
    core.seen(sight(1, 2))
    assert core.next(12.0) == Wait(15.0)
    assert core.next(15.0) == Prepare(Version(1, 2))


def test_an_ack_that_the_registry_forgot_is_made_again():
    core = Core()
    serve(core, Version(1, 2))
    core.seen(Sight(Version(1, 2), EngineState.ROUTABLE, Version(1, 2)))
    assert core.next(1.0) == Wait(None)
    core.seen(Sight(Version(1, 2), EngineState.ROUTABLE, Version(1, 1)))
    assert core.next(1.0) == Prepare(Version(1, 2))


def test_an_engine_never_goes_back_within_an_incarnation_and_leaves_one_that_redis_has_lost():
    core = Core()
    serve(core, Version(3, 7))
    core.seen(Sight(Version(3, 6), EngineState.UNFIT))
    assert core.next(1.0) == Wait(None)
    core.seen(Sight(Version(2, 8), EngineState.STARTING))
    assert core.next(1.0) == Prepare(Version(2, 8))


def test_what_this_boot_acked_before_this_core_began_is_no_way_back_either():
    core = Core()
    core.seen(Sight(Version(1, 4), EngineState.UNFIT, Version(1, 5)))
    assert core.next(1.0) == Wait(None)
    core.seen(Sight(Version(1, 6), EngineState.UNFIT, Version(1, 5)))
    assert core.next(1.0) == Prepare(Version(1, 6))


STATES = st.sampled_from([None, *EngineState])
EVENTS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("seen"), STATES),
    st.tuples(st.sampled_from(["step", "fail", "refuse", "lost"])),
)


@given(st.lists(EVENTS, max_size=60))
def test_any_history_applies_only_prepared_versions_never_goes_back_and_ends_at_the_newest(history: list[Any]):
    core, newest, applied, prepared, now = Core(), Version(1, 0), [], set(), 0.0

    def step(*, fail: bool = False, refuse: bool = False) -> None:
        match core.next(now):
            case Prepare(version) if fail:
                core.prepare_failed(now)
            case Prepare(version):
                prepared.add(version)
                core.prepared(version)
            case Pause():
                core.refused() if refuse else core.granted()
            case Apply(version):
                assert version in prepared
                assert version == core.due
                if fail:
                    core.apply_failed(now)
                else:
                    core.applied(version, now)
                    applied.append(version)

    for kind, *rest in history:
        now += 1.0
        if kind == "publish":
            bump, n = rest
            newest = Version(newest.incarnation + 1, max(0, newest.n - n)) if bump == 2 else Version(newest.incarnation, newest.n + n)
        elif kind == "seen":
            core.seen(Sight(newest, rest[0]))
        elif kind == "lost":
            core.lost()
        else:
            step(fail=kind == "fail", refuse=kind == "refuse")
    for _ in range(4):
        now += MAX_BACKOFF_S
        core.seen(Sight(newest, EngineState.ROUTABLE))
        step()
    assert applied == sorted(applied)
    assert core.serving == newest == applied[-1]
