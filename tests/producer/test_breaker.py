from __future__ import annotations

import doctest

from hypothesis import given, settings
from hypothesis import strategies as st

from producer import breaker as module
from producer.breaker import FIRST_EXILE_S, FIRST_REST_S, IN_A_ROW, LONGEST_EXILE_S, LONGEST_REST_S, WINDOW, Breaker


def opened(**how: bool) -> Breaker:
    breaker = Breaker()
    assert breaker.failed(now=0.0, reason="dead", **({"certain": True} | how))
    return breaker


def test_the_examples_in_the_docstring_run() -> None:
    assert doctest.testmod(module).failed == 0


def test_failures_in_a_row_open_it_and_a_success_between_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(IN_A_ROW - 1):
            assert not breaker.failed(now=0.0, reason="dead")
        breaker.succeeded(probe=False)
    assert breaker.admits(0.0)
    assert [breaker.failed(now=0.0, reason="dead") for _ in range(IN_A_ROW)][-1]
    assert not breaker.admits(0.0)
    assert breaker.reason == "dead"


def test_half_of_the_last_requests_open_it_although_no_row_of_them_does() -> None:
    breaker, opens = Breaker(), []
    for _ in range(WINDOW // 2):
        breaker.succeeded(probe=False)
        opens.append(breaker.failed(now=0.0, reason="flaky"))
    assert opens == [False] * (WINDOW // 2 - 1) + [True]


def test_a_request_in_twenty_that_fails_never_opens_it() -> None:
    breaker = Breaker()
    for n in range(10_000):
        if n % 20 == 7:
            assert not breaker.failed(now=float(n), reason="flaky")
        else:
            breaker.succeeded(probe=False)
    assert breaker.admits(0.0)


def test_it_rests_twice_as_long_each_time_until_a_probe_is_answered() -> None:
    for exile, first_s, longest_s in ((False, FIRST_REST_S, LONGEST_REST_S), (True, FIRST_EXILE_S, LONGEST_EXILE_S)):
        breaker, now, rests = opened(exile=exile), 0.0, []
        for _ in range(8):
            rests.append(breaker.until - now)
            assert not breaker.admits(breaker.until - 0.01)
            now = breaker.until
            assert breaker.admits(now)
            assert breaker.started()
            assert breaker.failed(now=now, reason="still dead", probe=True, exile=exile)
        assert rests[:3] == [first_s, 2 * first_s, 4 * first_s]
        assert rests[-1] == longest_s
        assert breaker.started()
        assert breaker.succeeded(probe=True)
        assert breaker.failed(now=now, reason="dead", certain=True)
        assert breaker.until == now + FIRST_REST_S


def test_what_was_under_way_when_it_opened_says_nothing() -> None:
    breaker = opened()
    until = breaker.until
    assert not breaker.failed(now=0.1, reason="late", certain=True)
    assert not breaker.succeeded(probe=False)
    assert (breaker.until, breaker.reason) == (until, "dead")
    assert breaker.started()
    assert not breaker.failed(now=until, reason="later still")
    assert not breaker.succeeded(probe=False)
    assert breaker.probing


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = opened()
    assert breaker.started()
    assert not breaker.admits(100.0)
    breaker.dropped(probe=False)
    assert not breaker.admits(100.0)
    breaker.dropped(probe=True)
    assert breaker.admits(100.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", "success", "failure", "certain", "drop"]), st.integers(0, 5), st.floats(0, 3)), max_size=80))
def test_one_probe_at_most_is_under_way_and_only_its_outcome_ends_a_rest(events: list[tuple[str, int, float]]) -> None:
    breaker, now, running = Breaker(), 0.0, list[bool]()
    for event, which, passes in events:
        now += passes
        if event == "start":
            if breaker.admits(now):
                running.append(breaker.started())
            continue
        if not running:
            continue
        probe = running.pop(which % len(running))
        was, until = breaker.reason, breaker.until
        if event == "success":
            closed = breaker.succeeded(probe=probe)
            assert closed is (bool(was) and probe)
            assert bool(breaker.reason) is (bool(was) and not probe)
        elif event == "drop":
            breaker.dropped(probe=probe)
            assert breaker.reason == was
        else:
            breaker.failed(now=now, reason="dead", probe=probe, certain=event == "certain")
            assert not was or probe or breaker.until == until
        assert sum(running) <= 1
        assert breaker.probing is any(running)
