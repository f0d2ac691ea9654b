from __future__ import annotations

import itertools

import pytest

from benchmarks.simulator import __main__ as command
from benchmarks.simulator.faults import POINTS, Bias
from benchmarks.simulator.shrink import readable, rule_of, shrink
from benchmarks.simulator.weights import START
from benchmarks.simulator.world import simulate

SEEDS, BLOCK = 500, 25


@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_with_all_rules_nothing_breaks(start: int):
    broken = {outcome.seed: outcome.problem for outcome in map(simulate, range(start, start + BLOCK)) if outcome.problem is not None}
    assert broken == {}


def test_a_seed_is_a_run():
    once, again = simulate(7, tracing=True), simulate(7, tracing=True)
    assert once == again
    assert once.trace == again.trace
    assert len(once.trace) > 100


def test_every_fault_happens():
    happened = {kind for seed in range(60) for fault in simulate(seed).faults for kind in _kinds(fault)}
    timed = {"kill", "freeze", "cut", "engine restarts", "redis pauses", "clock jumps", "payload gone", "payload damaged", "reconciler stalls"}
    timed |= {"resume older", "letters again", "kill at", "freeze at", "redis falls back", "trainers fall with redis"}
    messages = {"request lost", "reply lost", "twice", "late"}
    assert timed | messages | {"apply fails", "a wake-up is lost"} | set(POINTS) <= happened


def _kinds(fault: str) -> list[str]:
    if fault.startswith("message"):
        return [fault.rpartition(": ")[2]]
    words = fault.split()
    return [" ".join(words[start:end]) for start, end in itertools.combinations(range(len(words) + 1), 2)]


def test_steps_are_trained_through_the_faults():
    outcomes = [simulate(seed) for seed in range(20)]
    assert sum(outcome.steps for outcome in outcomes) > 200
    assert sum(len(outcome.faults) for outcome in outcomes) > 100


def test_a_failing_seed_is_cut_down_to_what_it_takes():
    missing = frozenset({"floor"})
    failed = next(outcome for seed in range(100) if (outcome := simulate(seed, without=missing)).problem is not None and len(outcome.faults) > 8)
    small = shrink(failed, without=missing)
    assert rule_of(small.problem) == rule_of(failed.problem)
    assert len(small.faults) < len(failed.faults) / 2
    for fault in small.faults:
        fewer = simulate(failed.seed, without=missing, only=frozenset(small.faults) - {fault})
        assert rule_of(fewer.problem) != rule_of(failed.problem)
    text = "\n".join(readable(small))
    assert small.problem in text
    assert all(fault.strip() in text for fault in small.faults)
    assert "trainer" in text


def test_leaving_a_fault_out_leaves_the_others_where_they_were():
    bias = Bias(kinds=("kill",), count=6, message_rate=0.0)
    faults = simulate(3, bias=bias).faults
    timed = [fault for fault in faults if " kill " in fault]
    assert len(timed) == 6
    again = simulate(3, bias=bias, only=frozenset(faults) - {timed[0]}).faults
    assert [fault for fault in again if " kill " in fault] == timed[1:]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="no such rules: tidiness"):
        simulate(0, without=frozenset({"tidiness"}))


def test_the_command_tells_the_failing_seed_and_ends_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["simulator", "--seeds", "100", "--without", "floor"])
    assert command.main() == 1
    out = capsys.readouterr().out
    assert "fails: " in out
    assert "faults:" in out
    assert "--without floor" in out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_the_command_ends_with_0_when_nothing_broke(jobs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["simulator", "--seeds", "6", "--start", "4", "--jobs", jobs])
    assert command.main() == 0
    assert "6 of 6 runs" in capsys.readouterr().out


def test_equal_weights_have_an_equal_past():
    one = START.after([(1, "a"), (2, "b")], "")
    assert one == START.after([(1, "a"), (2, "b")], "")
    other = START.after([(2, "b"), (1, "a")], "")
    assert one.digest != other.digest
    assert one.after([(3, "c")], "").shared(other) == 0
    assert one.after([(3, "c")], "").shared(one.after([(4, "d")], "")) == 1
