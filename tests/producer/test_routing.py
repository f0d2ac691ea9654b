from __future__ import annotations

import doctest
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer import order, routing
from producer.breaker import FIRST_EXILE_S, FIRST_REST_S
from producer.routing import Engine, Routing, cost_of
from protocol.versions import Fork, Lineage, Version

LINE = Lineage({1: Fork(0, 0), 2: Fork(1, 7)}, head=2)


def engine(name: str, version: Version, boot: str = "boot:1", **fields: Any) -> Engine:
    return Engine(key=(name, boot), url=f"http://{name}", version=version, **fields)


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


def place(core: Routing, *, now: float = 0.0, **request: Any) -> str:
    """The id of the engine that the next request went to."""
    one = core.choose(None, avoid=(), now=now, **request)
    assert one is not None
    core.started(one.key, cost=request.get("cost", 1.0), prefix=request.get("prefix", ""))
    return one.id


def test_tokens_count_and_not_requests() -> None:
    assert cost_of(400, 1000) == 1100.0
    core = seen(engine("a", Version(2, 8)), engine("b", Version(2, 8)))
    assert place(core, cost=1000.0) == "a"
    assert [place(core, cost=100.0) for _ in range(10)] == ["b"] * 10
    assert place(core, cost=100.0) == "a"
    core.finished(("a", "boot:1"), answered=True, cost=1000.0)
    assert place(core, cost=100.0) == "a"


def test_siblings_go_where_their_prefix_is_until_that_engine_is_far_ahead() -> None:
    a, b = (engine(name, Version(2, 8), prefix_cache=True) for name in "ab")
    core = seen(a, b)
    assert [place(core, prefix="g") for _ in range(8)] == ["a"] * 5 + ["b"] * 3
    assert [place(core, prefix="h") for _ in range(3)] == ["b"] * 3
    without = seen(*(engine(name, Version(2, 8)) for name in "ab"))
    assert Counter(place(without, prefix="g") for _ in range(8)) == {"a": 4, "b": 4}, "engines that keep nothing are no home"


def test_a_prefix_is_gone_once_its_engine_has_acked_another_version() -> None:
    a, b = (engine(name, Version(2, 8), prefix_cache=True) for name in "ab")
    core = seen(a, b)
    core.trained = 9
    assert [place(core, prefix="g") for _ in range(2)] == ["a", "a"]
    core.seen([engine("a", Version(2, 9), prefix_cache=True), b], LINE)
    assert place(core, prefix="g") == "b"


def test_prefixes_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_PREFIXES", 3)
    core = seen(engine("a", Version(2, 8), prefix_cache=True))
    for prefix in "ghigjk":
        place(core, prefix=prefix)
    assert list(core._homes) == ["g", "j", "k"]


def test_engines_of_the_evaluation_take_nothing_else_and_are_preferred_by_it() -> None:
    own, shared = engine("e", Version(2, 8), fleet="eval"), engine("r", Version(2, 8))
    core = seen(own, shared)
    assert [place(core) for _ in range(3)] == ["r"] * 3
    assert [place(core, fleet="eval") for _ in range(5)] == ["e"] * 5
    assert seen(own).choose(None, avoid=(), now=0.0) is None
    assert seen(shared).choose(None, avoid=(), now=0.0, fleet="eval") == shared
    assert core.choose(None, avoid={own.key}, now=0.0, fleet="eval") == own


def test_a_pinned_request_gets_its_very_version_on_the_line_or_not() -> None:
    core = seen(engine("new", Version(2, 9)), engine("old", Version(2, 8)), engine("off", Version(1, 9)))
    for version, name in ((Version(2, 8), "old"), (Version(2, 9), "new"), (Version(1, 9), "off")):
        one = core.choose(None, avoid=(), now=0.0, exact=version)
        assert one is not None
        assert one.id == name
    assert core.choose(None, avoid=(), now=0.0, exact=Version(2, 7)) is None


def test_an_engine_that_rests_gets_one_request_and_all_again_once_that_is_answered() -> None:
    a = engine("a", Version(2, 8))
    core = seen(a)
    for _ in range(5):
        place(core)
    assert [core.refused(a.key, now=0.0, reason="broke") for _ in range(3)] == [False, False, True]
    assert core.resting == {a.key: "broke"}
    assert core.choose(None, avoid=(), now=0.0) is None
    ends = core.rest_ends(0.0)
    assert ends == FIRST_REST_S
    probe = core.choose(None, avoid=(), now=ends)
    assert probe == a
    number = core.started(a.key)
    assert number
    assert core.choose(None, avoid=(), now=ends) is None
    assert not core.finished(a.key, answered=True), "one of before"
    assert core.choose(None, avoid=(), now=ends) is None
    assert core.answered(a.key, probe=number)
    assert core.choose(None, avoid=(), now=ends) == a
    assert core.resting == {}


def test_an_engine_that_is_unfit_for_a_while_comes_back_with_its_rest() -> None:
    a, b = engine("a", Version(2, 8)), engine("b", Version(2, 8))
    core = seen(a, b)
    core.started(a.key)
    core.refused(a.key, now=0.0, certain=True, exile=True, reason="of no use")
    core.unfit(a.key)
    core.seen([b], LINE)
    assert core.rest_ends(0.0) is None
    core.seen([a, b], LINE)
    assert core.resting == {a.key: "of no use"}
    assert {place(core, now=FIRST_EXILE_S - 1) for _ in range(4)} == {"b"}
    assert place(core, now=FIRST_EXILE_S) == "a"


def test_a_probe_that_was_given_up_makes_room_for_another() -> None:
    a = engine("a", Version(2, 8))
    core = seen(a)
    core.started(a.key)
    core.refused(a.key, now=0.0, certain=True)
    number = core.started(a.key)
    assert core.choose(None, avoid=(), now=9.0) is None
    assert core.finished(a.key, answered=False, probe=number)
    assert core.choose(None, avoid=(), now=9.0) == a


def test_what_others_took_makes_the_one_that_rejected_it_rest() -> None:
    a, b = engine("a", Version(2, 8)), engine("b", Version(2, 8))
    core = seen(a, b)
    assert [core.blamed(a.key, now=0.0, reason="rejects") for _ in range(3)] == [False, False, True]
    assert {place(core) for _ in range(4)} == {"b"}
    assert not core.blamed(("gone", "boot:1"), now=0.0, reason="rejects")


def test_a_restarted_engine_is_another_engine() -> None:
    old, new = engine("a", Version(2, 8)), engine("a", Version(2, 8), boot="boot:2")
    core = seen(old)
    core.started(old.key)
    core.refused(old.key, now=0.0, certain=True)
    core.seen([new], LINE)
    assert core.choose(None, avoid={old.key}, now=0.0) == new


def test_an_unfit_engine_is_not_chosen_until_the_registry_lists_it_again() -> None:
    a = engine("a", Version(2, 8))
    core = seen(a)
    core.unfit(a.key)
    assert core.choose(None, avoid=(), now=0.0) is None
    core.seen([a], LINE)
    assert core.choose(None, avoid=(), now=0.0) == a


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["start", "finish", "refuse", "drop", "vanish", "return"]), st.integers(1, 40), st.sampled_from("gh")
        ),
        max_size=80,
    )
)
def test_outstanding_is_started_less_ended_whatever_happens(events: list[tuple[str, str, int, str]]) -> None:
    engines = {name: engine(name, Version(2, 8), prefix_cache=name != "c") for name in "abc"}
    core, here = seen(*engines.values()), set("abc")
    running: dict[str, list[tuple[float, int]]] = {name: [] for name in "abc"}
    for now, (name, event, tokens, prefix) in enumerate(events):
        cost = cost_of(tokens, 2 * tokens)
        if event == "start":
            one = core.choose(None, avoid={engines[name].key}, now=float(now), prefix=prefix, cost=cost)
            if one is not None:
                assert one.id in here
                running[one.id].append((cost, core.started(one.key, cost=cost, prefix=prefix)))
        elif event in {"finish", "refuse", "drop"} and running[name]:
            was, probe = running[name].pop(tokens % len(running[name]))
            key = engines[name].key
            if event == "refuse":
                core.refused(key, now=float(now), cost=was, probe=probe, certain=tokens > 20)
            else:
                core.finished(key, answered=event == "finish", cost=was, probe=probe)
        elif event in {"vanish", "return"}:
            here = here - {name} if event == "vanish" else here | {name}
            core.seen([engines[n] for n in sorted(here)], LINE)
        for n in here:
            load = core._loads[engines[n].key]
            assert (load.outstanding, load.cost) == (len(running[n]), sum(cost for cost, _ in running[n]))
            assert sum(probe > 0 for _, probe in running[n]) <= 1
