from __future__ import annotations

import pytest

from deploy.history import read_history
from protocol.errors import DecodeError
from protocol.messages import Event
from protocol.versions import Version
from tests.deploy.recorded import Recorder, small_run


def test_a_small_run_is_read_as_it_was() -> None:
    history = read_history(small_run().events)
    assert [(step.step, step.reward, step.tokens) for step in history.steps] == [(1, 0.2, 20), (2, 0.6, 20)]
    assert [evaluation.exact for evaluation in history.evaluations] == [0.25, 0.75]
    assert (history.seconds, history.final, history.owners) == (8.0, Version(1, 2), {"p"})
    assert history.lag == {0: 20, 1: 20}
    assert [use.busy_s for use in history.uses] == [3.0]


def test_depth_follows_each_group_through_its_states() -> None:
    run = small_run()
    history = read_history(run.events)
    deepest = max(history.depth, key=lambda depth: depth.generating + depth.ready + depth.leased)
    assert (deepest.ready + deepest.generating, deepest.leased) == (4, 0)
    last = history.depth[-1]
    assert (last.generating, last.ready, last.leased) == (0, 0, 0)


def test_a_step_that_a_resume_trains_again_counts_once_as_it_stands() -> None:
    run = small_run()
    run.event(11, "attached", incarnation=2, incarnation_id="b", parent=1, fork_step=1, trainer_id="t2")
    rewound = read_history(run.events).depth[-1]
    assert (rewound.rewound, rewound.leased, rewound.ready) == (2, 0, 0)
    run.trained(12, 2, [2, 3], reward=0.7, staleness={"1": 20}, incarnation=2, replay=True)
    history = read_history(run.events)
    assert [(step.step, step.incarnation, step.reward) for step in history.steps] == [(1, 1, 0.2), (2, 2, 0.7)]
    assert len(history.every_step) == 3
    assert (history.depth[-2].leased, history.depth[-1].leased, history.depth[-1].rewound) == (2, 0, 0)


def test_a_released_group_leaves_the_depth_and_comes_back_with_its_next_attempt() -> None:
    run = Recorder()
    run.begin()
    run.event(1, "reserved", owner="p", slots=[[0, 1]])
    run.event(2, "released", seq=0, attempt=1, reason="expired")
    run.event(3, "reserved", owner="q", slots=[[0, 2]])
    depth = read_history(run.events).depth
    assert [one.generating for one in depth] == [0, 1, 0, 1]  # the first entry is the attachment


def test_an_engine_that_was_silent_and_comes_back_is_no_new_boot() -> None:
    run = small_run()
    run.event(11, "engine_started", engine_id="engine-0", boot_nonce="boot:a")
    run.event(12, "engine_started", engine_id="engine-0", boot_nonce="boot:b")
    assert read_history(run.events).boots == {"engine-0": ["boot:a", "boot:b"]}


def test_unknown_events_are_skipped_and_an_empty_run_has_no_figures() -> None:
    history = read_history([Event(id="5-0", op="something new", fields={"a": 1})])
    assert (history.steps, history.seconds, history.final) == ((), 0.0, None)
    assert read_history([]).seconds == 0.0


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("put", {"seq": "zero"}),
        ("put", {"seq": 0, "tokens": [1]}),
        ("put", {"seq": 0, "tokens": {"1:0": "many"}}),
        ("reserved", {"slots": [[0]]}),
        ("published", {"version": "seven"}),
        ("trained", {"stats": "none"}),
    ],
)
def test_an_event_with_fields_of_the_wrong_type_is_named(op: str, fields: dict[str, object]) -> None:
    with pytest.raises(DecodeError, match=rf"audit\.{op}|version"):
        read_history([Event(id="5-0", op=op, fields=fields)])  # type: ignore[arg-type]
