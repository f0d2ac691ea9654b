from __future__ import annotations

import doctest
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer import order, routing
from producer.routing import FIRST_REST_S, LONGEST_REST_S, Engine, Routing
from protocol.versions import Fork, Lineage, Version

LINE = Lineage({1: Fork(0, 0), 2: Fork(1, 7)}, head=2)


def engine(name: str, version: Version, boot: str = "boot:1") -> Engine:
    return Engine(key=(name, boot), url=f"http://{name}", version=version)


def seen(*engines: Engine, lineage: Lineage = LINE) -> Routing:
    core = Routing()
    core.seen(engines, lineage)
    return core


@pytest.mark.parametrize("module", [routing, order])
def test_the_examples_in_the_docstrings_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("serves", "minimum", "qualifies"),
    [
        (Version(2, 9), Version(2, 9), True),
        (Version(2, 8), Version(2, 9), False),
        (Version(1, 7), Version(2, 7), True),
        (Version(1, 6), Version(1, 5), True),
        (Version(1, 9), Version(1, 5), False),
        (Version(3, 9), Version(2, 9), False),
        (Version(2, 9), Version(3, 9), False),
        (Version(1, 3), None, True),
        (Version(1, 9), None, False),
    ],
)
def test_an_engine_qualifies_on_the_current_line_at_the_minimum_or_newer(serves: Version, minimum: Version | None, qualifies: bool) -> None:
    assert (seen(engine("a", serves)).choose(minimum, avoid=(), now=0.0) is not None) is qualifies


def test_nothing_qualifies_before_a_trainer_has_attached() -> None:
    core = seen(engine("a", Version(1, 0)), lineage=Lineage({0: Fork(0, 0)}, head=0))
    assert core.choose(None, avoid=(), now=0.0) is None
    assert Routing().choose(Version(1, 0), avoid=(), now=0.0) is None


@pytest.mark.parametrize(
    ("version", "known"),
    [(Version(2, 9), True), (Version(2, 10), False), (Version(1, 9), True), (Version(3, 1), False)],
)
def test_a_version_newer_than_anything_trained_is_unknown(version: Version, known: bool) -> None:
    core = seen(engine("a", Version(2, 8)))
    core.trained = 9
    assert core.knows(version) is known


def test_requests_spread_evenly_and_follow_what_is_outstanding() -> None:
    core = seen(engine("a", Version(2, 8)), engine("b", Version(2, 8)))
    chosen = []
    for _ in range(10):
        one = core.choose(None, avoid=(), now=0.0)
        assert one is not None
        core.started(one.key)
        chosen.append(one)
    assert Counter(e.id for e in chosen) == {"a": 5, "b": 5}
    for one in [e for e in chosen if e.id == "a"]:
        core.finished(one.key, answered=True)
    assert core.choose(None, avoid=(), now=0.0) == engine("a", Version(2, 8))


def test_an_engine_that_failed_the_sample_is_taken_only_if_no_other_is_there() -> None:
    a, b = engine("a", Version(2, 8)), engine("b", Version(2, 8))
    assert seen(a, b).choose(None, avoid={a.key}, now=0.0) == b
    assert seen(a).choose(None, avoid={a.key}, now=0.0) == a


def test_an_engine_that_does_not_answer_rests_twice_as_long_each_time_until_it_answers() -> None:
    a = engine("a", Version(2, 8))
    core = seen(a)
    now, rests = 0.0, []
    for _ in range(8):
        core.started(a.key)
        core.started(a.key)
        core.refused(a.key, now=now)
        core.refused(a.key, now=now)  # its sibling: no longer rest
        assert core.choose(None, avoid=(), now=now) is None
        ends = core.rest_ends(now)
        assert ends is not None
        rests.append(ends - now)
        now = ends
        assert core.choose(None, avoid=(), now=now) == a
    assert rests[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert rests[-1] == LONGEST_REST_S
    core.started(a.key)
    core.finished(a.key, answered=True)
    core.started(a.key)
    core.refused(a.key, now=now)
    assert core.rest_ends(now) == now + FIRST_REST_S


def test_a_restarted_engine_is_another_engine() -> None:
    old, new = engine("a", Version(2, 8)), engine("a", Version(2, 8), boot="boot:2")
    core = seen(old)
    core.started(old.key)
    core.refused(old.key, now=0.0)
    core.seen([new], LINE)
    assert core.choose(None, avoid={old.key}, now=0.0) == new


def test_an_unfit_engine_is_not_chosen_until_the_registry_lists_it_again() -> None:
    a = engine("a", Version(2, 8))
    core = seen(a)
    core.unfit(a.key)
    assert core.choose(None, avoid=(), now=0.0) is None
    core.seen([a], LINE)
    assert core.choose(None, avoid=(), now=0.0) == a


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["start", "finish", "refuse", "vanish", "return"])), max_size=60))
def test_outstanding_is_started_less_ended_whatever_happens(events: list[tuple[str, str]]) -> None:
    engines = {name: engine(name, Version(2, 8)) for name in "abc"}
    core, here, running = seen(*engines.values()), set("abc"), Counter[str]()
    for now, (name, event) in enumerate(events):
        key = engines[name].key
        if event == "start" and name in here:
            core.started(key)
            running[name] += 1
        elif event in {"finish", "refuse"} and running[name]:
            core.finished(key) if event == "finish" else core.refused(key, now=float(now))
            running[name] -= 1
        elif event in {"vanish", "return"}:
            here = here - {name} if event == "vanish" else here | {name}
            core.seen([engines[n] for n in sorted(here)], LINE)
        for n in here:
            assert core._loads[engines[n].key].outstanding == running[n]
