"""What became of every token, on runs computed by hand; and that nothing is missing on a real one."""

from __future__ import annotations

import doctest
from collections.abc import Mapping

import pytest

from buffer import bias
from buffer.bias import UNKNOWN, Bias, BiasTally, Flow, length_bucket, read_bias
from protocol.messages import Event, JsonValue


class Events:
    """Audit events in order."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.add("attached", incarnation=1, parent=0, fork_step=0)

    def add(self, op: str, **fields: JsonValue) -> None:
        self.all.append(Event(id=f"1700000000000-{len(self.all)}", op=op, fields=fields))

    def put(self, seq: int, lengths: list[JsonValue], *, attempt: int = 1, version: str = "1:0", lag: int = 0) -> None:
        tokens = sum(int(length) for length in lengths if isinstance(length, int))
        self.add("put", seq=seq, attempt=attempt, tokens={version: tokens}, lag={str(lag): tokens}, lengths=lengths)

    def trained(
        self,
        step: int,
        seqs: list[JsonValue],
        *,
        lengths: Mapping[str, JsonValue],
        ages: Mapping[str, JsonValue],
        masked: Mapping[str, JsonValue] | None = None,
        masked_age: Mapping[str, JsonValue] | None = None,
        incarnation: int = 1,
        weights: str = "",
    ) -> None:
        self.add("leased", step=step, chunk=0, seqs=seqs, incarnation=incarnation)
        told: JsonValue = {"trained": dict(lengths), "masked": dict(masked or {}), "masked_age": dict(masked_age or {})}
        stats: JsonValue = {"staleness": dict(ages), "bias": told}
        self.add("trained", step=step, incarnation=incarnation, digest=weights or f"{incarnation}:{step}", stats=stats)

    @property
    def report(self) -> Bias:
        return read_bias(self.all)


def by_hand() -> Events:
    """Four groups of two rollouts: one trained whole, one with masked tokens, one stale, one filtered before it was stored; a fifth is READY."""
    run = Events()
    run.put(0, [3, 4])
    run.put(1, [2, 9])
    run.trained(1, [0], lengths={"4": 7}, ages={"0": 7})
    run.put(2, [8, 16], lag=1)
    run.trained(2, [1], lengths={"2": 2, "16": 7}, ages={"1": 9}, masked={"16": 2}, masked_age={"1": 2})
    run.add("released", seq=2, attempt=1, reason="stale")
    run.add("dead", seq=3, attempt=1, reason="filtered", lengths=[5, 0])
    run.put(4, [1, 1], version="1:2")
    return run


def test_doctests_hold() -> None:
    assert doctest.testmod(bias).failed == 0


def test_a_report_is_what_is_counted_by_hand() -> None:
    found = by_hand().report
    assert found.lengths == {
        1: Flow(generated=2, trained=0, masked=0, dropped={}, outstanding=2),
        2: Flow(generated=2, trained=2, masked=0, dropped={}, outstanding=0),
        4: Flow(generated=7, trained=7, masked=0, dropped={}, outstanding=0),
        8: Flow(generated=8 + 5, trained=0, masked=0, dropped={"stale": 8, "filtered": 5}, outstanding=0),
        16: Flow(generated=9 + 16, trained=7, masked=2, dropped={"stale": 16}, outstanding=0),
    }
    assert found.ages == {
        UNKNOWN: Flow(generated=5, trained=0, masked=0, dropped={"filtered": 5}, outstanding=0),
        0: Flow(generated=20, trained=7, masked=0, dropped={}, outstanding=2),
        1: Flow(generated=24, trained=9, masked=2, dropped={}, outstanding=0),
        2: Flow(generated=0, trained=0, masked=0, dropped={"stale": 24}, outstanding=0),
    }
    assert found.total == Flow(generated=49, trained=16, masked=2, dropped={"filtered": 5, "stale": 24}, outstanding=2)
    assert found.total.trained_share == 16 / 49
    assert found.dropped_groups == {"filtered": 1, "stale": 1}
    assert found.unaccounted == 0


def test_a_step_that_is_taken_back_counts_once_it_is_trained_again() -> None:
    run = by_hand()
    run.add("attached", incarnation=2, parent=1, fork_step=1)
    back = run.report
    assert (back.total.trained, back.total.masked, back.total.outstanding) == (7, 0, 2 + 11)
    assert back.unaccounted == 0
    run.trained(2, [1], lengths={"2": 2, "16": 9}, ages={"1": 11}, incarnation=2)
    again = run.report
    assert (again.total.trained, again.total.masked, again.total.outstanding, again.unaccounted) == (18, 0, 2, 0)
    assert again.lengths[16] == Flow(generated=25, trained=9, masked=0, dropped={"stale": 16}, outstanding=0)


def test_a_step_given_up_is_dropped_as_rewound_and_a_retry_is_generated_anew() -> None:
    run = by_hand()
    run.add("released", seq=1, attempt=1, reason="rewound")
    run.add("attached", incarnation=2, parent=1, fork_step=1)
    run.put(1, [4, 4], attempt=2, version="2:1")
    found = run.report
    assert found.total.dropped == {"filtered": 5, "rewound": 11, "stale": 24}
    assert (found.total.generated, found.total.outstanding, found.unaccounted) == (49 + 8, 2 + 8, 0)


def test_a_step_trained_again_to_the_same_weights_leaves_its_versions_on_the_line() -> None:
    run = Events()
    run.put(0, [4])
    run.trained(1, [0], lengths={"4": 4}, ages={"0": 4}, weights="same")
    run.put(1, [4], version="1:1")
    run.add("attached", incarnation=2, parent=1, fork_step=0)
    assert run.report.ages[0].outstanding == 8, "1:1 shares only step 0 with the new line, and so does 1:0"
    run.trained(1, [0], lengths={"4": 4}, ages={"0": 4}, incarnation=2, weights="same")
    assert run.report.ages[0].outstanding == 4, "the weights of 1:1 are those of 2:1"


def test_what_a_checkpoint_covers_is_no_longer_held_in_memory() -> None:
    tally = BiasTally()
    for event in by_hand().all:
        tally.take(event)
    assert sum(len(step.groups) for step in tally._steps) == 2
    tally.take(Event(id="1-0", op="checkpoint", fields={"kept": [[1, 1], [2, 1]]}))
    assert sum(len(step.groups) for step in tally._steps) == 1


def test_a_step_that_is_known_from_its_trainer_alone_counts_once() -> None:
    run = by_hand()
    run.put(5, [4, 2])
    run.add("regressed", incarnation=1, trained=1)
    for step, seqs in ((2, [1]), (3, [5])):
        known: list[JsonValue] = [*seqs]
        run.add("reasserted", step=step, incarnation=1, digest=f"1:{step}", seqs=known)
    found = run.report
    assert (found.total.trained, found.total.masked, found.total.outstanding, found.unaccounted) == (16 + 6, 2, 2, 0)
    assert found.ages[UNKNOWN].trained == 6


def test_a_record_without_lengths_is_of_unknown_length_and_loses_no_token() -> None:
    run = Events()
    run.add("put", seq=0, attempt=1, tokens={"1:0": 6}, lag={"0": 6})
    run.add("leased", step=1, chunk=0, seqs=[0], incarnation=1)
    run.add("trained", step=1, incarnation=1, digest="d", stats={"tokens": 5, "masked": 1, "staleness": {"0": 5}})
    assert run.report.lengths == {UNKNOWN: Flow(generated=6, trained=5, masked=1, dropped={}, outstanding=0)}


def test_tokens_whose_end_is_not_in_the_events_are_said_to_be_missing() -> None:
    run = Events()
    run.put(0, [4])
    run.trained(1, [0], lengths={"4": 3}, ages={"0": 3})
    assert run.report.unaccounted == 1


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_a_bucket_is_the_next_power_of_two(tokens: int, bucket: int) -> None:
    assert length_bucket(tokens) == bucket
