from __future__ import annotations

import doctest

from hypothesis import given, settings
from hypothesis import strategies as st

from producer import pace as module
from producer.pace import DECREASE, FULL, Load, Pace

FINE, FULL_ONE = Load(kv_usage=0.5, running=10), Load(kv_usage=0.95, running=10)


def test_the_examples_in_the_docstring_run() -> None:
    assert doctest.testmod(module).failed == 0


def test_engines_that_tell_nothing_limit_nothing() -> None:
    pace = Pace(most=8)
    for loads in ([], [Load()], [Load(running=5), Load(running=0)]):
        assert pace.seen(loads, inflight=8) == 8


def test_a_decrease_waits_until_the_one_before_has_shown() -> None:
    pace = Pace(most=100)
    assert pace.seen([FULL_ONE], inflight=100) == 80
    for inflight in (100, 95, 81):
        assert pace.seen([FULL_ONE], inflight=inflight) == 80, "the groups that fill the cache are still under way"
    assert pace.seen([FULL_ONE], inflight=80) == 64


def test_it_grows_only_while_the_limit_is_reached() -> None:
    pace = Pace(most=64, limit=0)
    pace.seen([FULL_ONE], inflight=40)
    assert pace.limit == 32
    assert pace.seen([FINE], inflight=10) == 32
    limits = [pace.seen([FINE], inflight=pace.limit) for _ in range(20)]
    assert limits[:3] == [34, 36, 38]
    assert limits[-1] == 64


def test_full_is_judged_over_all_engines_that_tell() -> None:
    pace = Pace(most=64)
    assert pace.seen([FULL_ONE, FINE, Load(running=3)], inflight=64) == 64
    assert pace.seen([FULL_ONE, FULL_ONE, Load(running=3)], inflight=64) == 51


def test_a_long_queue_counts_once_it_stays_and_a_short_one_stops_growth() -> None:
    pace = Pace(most=64)
    long, longer, shorter = Load(running=40, queued=20), Load(running=40, queued=30), Load(running=40, queued=15)
    assert pace.seen([long], inflight=64) == 64
    assert pace.seen([shorter], inflight=64) == 64
    assert pace.seen([longer], inflight=64) == 51
    short = Load(running=40, queued=2)
    assert [pace.seen([short], inflight=51) for _ in range(3)] == [51, 51, 51]
    assert pace.seen([FINE], inflight=51) == 53


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 50), st.integers(0, 50), st.integers(0, 250)), max_size=60))
def test_the_limit_stays_between_one_and_what_is_configured(most: int, looks: list[tuple[float, int, int, int]]) -> None:
    pace = Pace(most=most)
    for kv_usage, running, queued, inflight in looks:
        before = pace.limit
        after = pace.seen([Load(kv_usage=kv_usage, running=running, queued=queued)], inflight=inflight)
        assert 1 <= after <= most
        if kv_usage >= FULL:
            assert after <= before
        if after < before:
            assert after >= int(DECREASE * min(before, inflight))


def test_a_cache_that_holds_so_many_groups_is_found_and_held() -> None:
    """A model of an engine: every group takes a fiftieth of its cache, a third of them end between two looks."""
    pace, inflight, seen = Pace(most=256), 0, []
    for _ in range(300):
        inflight = max(inflight - inflight // 3, min(pace.limit, inflight + 30))
        pace.seen([Load(kv_usage=min(1.0, inflight / 50), running=inflight)], inflight=inflight)
        seen.append(inflight)
    settled = seen[100:]
    assert max(settled) <= 56
    assert sum(settled) / len(settled) >= 0.75 * FULL * 50
