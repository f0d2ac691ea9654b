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
        breaker.succeeded(probe=0)
    assert breaker.admits(0.0)
    assert [breaker.failed(now=0.0, reason="dead") for _ in range(IN_A_ROW)][-1]
    assert not breaker.admits(0.0)
    assert breaker.reason == "dead"


def test_half_of_the_last_requests_open_it_although_no_row_of_them_does() -> None:
    breaker, opens = Breaker(), []
    for _ in range(WINDOW // 2):
        breaker.succeeded(probe=0)
        opens.append(breaker.failed(now=0.0, reason="flaky"))
    assert opens == [False] * (WINDOW // 2 - 1) + [True]


def test_a_request_in_twenty_that_fails_never_opens_it() -> None:
    breaker = Breaker()
    for n in range(10_000):
        if n % 20 == 7:
            assert not breaker.failed(now=float(n), reason="flaky")
        else:
            breaker.succeeded(probe=0)
    assert breaker.admits(0.0)


def test_of_many_that_start_at_once_one_in_twenty_that_fails_before_any_other_is_over_opens_nothing() -> None:
    breaker = Breaker()
    for _ in range(256):
        breaker.started()
    assert not any(breaker.failed(now=0.0, reason="flaky", number=number) for number in range(7, 257, 20))
    assert breaker.admits(0.0)
    for number in range(1, 257):
        breaker.succeeded(probe=0, number=number)
    assert not breaker.failed(now=1.0, reason="flaky", number=3)
    assert breaker.failed(now=1.0, reason="flaky", number=2) is False
    assert breaker.failed(now=1.0, reason="flaky", number=1), "three that started in a row, in whatever order they failed"


def test_it_rests_twice_as_long_each_time_until_a_probe_is_answered() -> None:
    for exile, first_s, longest_s in ((False, FIRST_REST_S, LONGEST_REST_S), (True, FIRST_EXILE_S, LONGEST_EXILE_S)):
        breaker, now, rests = opened(exile=exile), 0.0, []
        for _ in range(8):
            rests.append(breaker.until - now)
            assert not breaker.admits(breaker.until - 0.01)
            now = breaker.until
            assert breaker.admits(now)
            probe = breaker.started()
            assert breaker.failed(now=now, reason="still dead", probe=probe, exile=exile)
        assert rests[:3] == [first_s, 2 * first_s, 4 * first_s]
        assert rests[-1] == longest_s
        assert breaker.succeeded(probe=breaker.started())
        assert breaker.failed(now=now, reason="dead", certain=True)
        assert breaker.until == now + FIRST_REST_S


def test_what_was_under_way_when_it_opened_says_nothing() -> None:
    breaker = opened()
    until = breaker.until
    assert not breaker.failed(now=0.1, reason="late", certain=True)
    assert not breaker.succeeded(probe=0)
    assert (breaker.until, breaker.reason) == (until, "dead")
    assert breaker.started()
    assert not breaker.failed(now=until, reason="later still")
    assert not breaker.succeeded(probe=0)
    assert breaker.probing


def test_what_was_under_way_at_an_opening_says_nothing_after_it_either() -> None:
    breaker = Breaker()
    early = [(breaker.started(), breaker.number)[1] for _ in range(12)]
    assert [breaker.failed(now=0.0, reason="away", number=number) for number in early[:3]] == [False, False, True]
    assert breaker.succeeded(probe=breaker.started(), number=breaker.number)
    assert [breaker.failed(now=1.0, reason="away", number=number) for number in early[3:]] == [False] * 9


def test_a_request_of_an_engine_that_left_and_came_back_says_nothing_of_it() -> None:
    assert not Breaker().failed(now=0.0, reason="rejects", number=10)


def test_a_probe_that_tells_nothing_makes_room_for_another() -> None:
    breaker = opened()
    probe = breaker.started()
    assert not breaker.admits(100.0)
    assert not breaker.dropped(probe=0)
    assert not breaker.admits(100.0)
    assert breaker.dropped(probe=probe)
    assert breaker.admits(100.0)


def test_a_probe_that_goes_on_says_nothing_of_a_later_opening() -> None:
    """Its first token closed the breaker; what becomes of its last ones is of a time before the engine failed again."""
    breaker = opened()
    old = breaker.started()
    assert breaker.succeeded(probe=old)
    assert breaker.failed(now=1.0, reason="dead again", certain=True)
    until = breaker.until
    assert not breaker.succeeded(probe=old)
    assert not breaker.failed(now=1.5, reason="late", probe=old, certain=True)
    new = breaker.started()
    assert not breaker.succeeded(probe=old)
    assert not breaker.failed(now=until, reason="late", probe=old)
    assert not breaker.dropped(probe=old)
    assert (breaker.reason, breaker.until, breaker.probing) == ("dead again", until, True)
    assert breaker.succeeded(probe=new)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["start", "sign", "success", "failure", "certain", "drop"]), st.integers(0, 5), st.floats(0, 3)), max_size=80))
def test_one_probe_at_most_is_under_way_and_only_its_outcome_ends_a_rest(events: list[tuple[str, int, float]]) -> None:
    """A sign: the first token of a request that goes on. `speaks`: the one request that may end the rest now."""
    breaker, now, running, speaks = Breaker(), 0.0, list[int](), 0
    for event, which, passes in events:
        now += passes
        if event == "start":
            if breaker.admits(now):
                running.append(breaker.started())
                speaks = running[-1]
                assert bool(speaks) is bool(breaker.reason)
            continue
        if not running:
            continue
        at = which % len(running)
        probe = running[at] if event == "sign" else running.pop(at)
        was, until, heard = breaker.reason, breaker.until, probe > 0 and probe == speaks
        if event in {"sign", "success"}:
            assert breaker.succeeded(probe=probe) is heard
            assert bool(breaker.reason) is (bool(was) and not heard)
        elif event == "drop":
            assert breaker.dropped(probe=probe) is heard
            assert breaker.reason == was
        else:
            opened_now = breaker.failed(now=now, reason="dead", probe=probe, certain=event == "certain")
            assert not (was and opened_now) or heard
            assert not was or heard or breaker.until == until
        speaks = 0 if heard else speaks
        assert breaker.probing is bool(speaks)
