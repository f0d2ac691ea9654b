"""Simulated runs with faults at every turn: the rules hold in all of them, and a rule that is left out is noticed."""

from __future__ import annotations

import pytest

from benchmarks.simulator.scenario import ALL_RULES, LEDGER_RULES
from benchmarks.simulator.shrink import readable, shrink
from benchmarks.simulator.world import simulate

SEEDS, BLOCK = 250, 50
CAUGHT = {
    "answers_outrank": 3,
    "fencing": 0,
    "floor": 13,
    "incarnation_order": 7,
    "ledger_clock": 3,
    "lineage_compare": 7,
    "lost_is_reported": 0,
    "min_version": 7,
    "partial_grant": 2,
    "pause_limit": 0,
    "pins": 13,
    "reassert": 6,
    "regress": 11,
    "resume_registered": 7,
    "seen": 11,
    "verify_payload": 0,
    "witness_first": 6,
}
"""Rule → a seed whose run breaks without it. The ledger's rules that are not here break in the random model of tests/buffer/test_ledger_model.py."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", range(0, SEEDS, BLOCK))
def test_every_invariant_holds_after_every_event(start: int) -> None:
    outcomes = [simulate(seed) for seed in range(start, start + BLOCK)]
    failed = next((outcome for outcome in outcomes if outcome.problem is not None), None)
    assert failed is None, "\n".join(readable(shrink(failed)))
    assert sum(outcome.steps for outcome in outcomes) > BLOCK, "runs that train nothing prove nothing"


@pytest.mark.parametrize("rule", sorted(CAUGHT))
def test_a_rule_that_is_left_out_is_noticed(rule: str) -> None:
    outcome = simulate(CAUGHT[rule], without=frozenset({rule}))
    assert outcome.problem is not None
    assert simulate(CAUGHT[rule]).problem is None


def test_a_failing_run_is_cut_down_to_fewer_faults_that_still_break_it() -> None:
    failed = simulate(CAUGHT["regress"], without=frozenset({"regress"}))
    shrunk = shrink(failed, without=frozenset({"regress"}))
    assert shrunk.problem is not None
    assert len(shrunk.faults) <= len(failed.faults)
    assert readable(shrunk)[1] == "faults:"


def test_the_rules_that_are_tried_exist() -> None:
    assert set(CAUGHT) <= ALL_RULES
    assert set(LEDGER_RULES) <= ALL_RULES


def test_the_same_seed_is_the_same_run() -> None:
    one, other = simulate(17), simulate(17)
    assert (one.events, one.steps, one.faults) == (other.events, other.steps, other.faults)
