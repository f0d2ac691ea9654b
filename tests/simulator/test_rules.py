"""Every rule has a switch, and the simulator notices when it is off.

Where a rule stands beside another that does the same, both are off: which they are is said here. `Bias` only looks where the harm is likely; the first seconds
of each search run the same worlds with all rules, and they hold.
"""

from __future__ import annotations

import pytest

from benchmarks.simulator.faults import NO_BIAS, Bias
from benchmarks.simulator.scenario import ALL_RULES, REDUNDANT
from benchmarks.simulator.shrink import rule_of
from benchmarks.simulator.world import simulate

SEEDS = 150
LOSSY = Bias(message_rate=0.1, settings={"pipeline_depth": 1.0})
FALLS = Bias(kinds=("redis falls back",), count=6)
FALLS_ON_POLICY = Bias(kinds=("redis falls back",), count=6, settings={"pipeline_depth": 0.0}, scenario={"publish_every": 1})
FORGOTTEN = Bias(kinds=("trainers fall with redis",), count=3, scenario={"waits": False, "checkpoint_every": 1})
TAKEN_OVER = Bias(kinds=("kill at", "freeze at"), points=("paused", "loaded"), count=12)
HUNG_BOOT = Bias(kinds=("freeze at", "kill trainer", "resume older"), points=("status read",), count=12, scenario={"checkpoint_every": 1})
LATE_ATTACH = Bias(message_rate=0.4, kinds=("kill trainer", "freeze trainer"), count=12)
UPDATED_AT_ONCE = Bias(message_rate=0.2, settings={"pipeline_depth": 1.0}, scenario={"publish_every": 1, "mean_s": 1.0, "apply_s": 0.02})
LATE_LOOKS = Bias(
    message_rate=0.2,
    kinds=("letters again",),
    count=2,
    settings={"groups_per_step": 1, "chunk_groups": 1, "pipeline_depth": 3.0, "max_staleness": 8},
    scenario={
        "publish_every": 1,
        "keep_versions": 1,
        "engines": 3,
        "max_paused": 3,
        "apply_s": 0.2,
        "train_s": 0.02,
        "mean_s": 0.2,
        "fail_rate": 0.0,
        "filter_rate": 0.0,
    },
)
REPLACED = Bias(
    message_rate=0.2,
    kinds=("freeze at", "kill trainer"),
    points=("attached",),
    count=12,
    settings={"pipeline_depth": 0.0},
    scenario={"publish_every": 1, "engines": 1, "exact": True, "checkpoint_every": 3},
)

CAUGHT: list[tuple[str, str, Bias]] = [
    # of the ledger
    ("partial_grant", "I4", NO_BIAS),
    ("named_heartbeat request_id_reused", "S2", LOSSY),  # a slot whose grant was lost leaks only if heartbeats keep it
    ("named_heartbeat request_id", "S2", LOSSY),
    ("persist_in_put", "P1", Bias(kinds=("kill at",), points=("put",), count=12)),
    ("fencing", "T1", NO_BIAS),
    ("floor", "I2", Bias(kinds=("resume older",), count=4)),
    ("min_version", "S3", NO_BIAS),
    ("slot_token", "after put", FALLS),
    ("checkpoint_commit", "I2", HUNG_BOOT),
    ("regress", "T1", FALLS),
    ("reassert", "T1", FALLS),
    ("rewound", "I3", Bias(kinds=("kill trainer",), count=8, settings={"pipeline_depth": 0.0}, scenario={"exact": False, "publish_every": 1})),
    ("attach_once", "T1", LATE_ATTACH),
    ("reassert_once", "T1", Bias(message_rate=0.3, kinds=("redis falls back",), count=6, settings={"pipeline_depth": 1.0})),
    ("ledger_clock", "S4", Bias(kinds=("redis pauses",), count=4)),
    # of producers and trainers
    ("names_what_it_holds", "S2", LOSSY),
    ("verify_payload", "P2", Bias(kinds=("payload damaged",), count=12)),
    ("lost_is_reported", "P2", Bias(kinds=("payload gone",), count=12)),
    ("resume_registered", "I4", Bias(kinds=("kill at",), points=("saved",), count=4)),
    ("witness_first", "R3", Bias(kinds=("kill at",), points=("trained",), count=4)),
    ("pointer_after_trained", "T4", UPDATED_AT_ONCE),
    ("lineage_compare", "S3", Bias(kinds=("kill trainer",), count=8)),
    ("answers_outrank", "W3", Bias(kinds=("engine restarts",), count=8)),
    ("pointer_again", "I4", FALLS_ON_POLICY),
    ("resume_ahead", "T5", FORGOTTEN),
    ("incarnation_above", "V1", FORGOTTEN),
    ("seen", "T1", FALLS),
    # of the weight channel
    ("incarnation_order", "I4", Bias(kinds=("kill trainer",), count=4)),
    ("boot_nonce reconciler_lock", "W3", Bias(kinds=("freeze",), count=12)),  # an old boot has no lock either
    ("reconciler_lock", "V3", Bias(kinds=("reconciler stalls", "freeze at"), points=("paused", "loaded"), count=12)),
    ("take_over acks_again", "I4", TAKEN_OVER),  # an ack that does not fit is made again, in full
    ("acks_again", "I4", FALLS_ON_POLICY),
    ("pause_limit", "W8", NO_BIAS),
    ("idle_off_routes", "W8", NO_BIAS),
    ("pause_in_time", "W8", NO_BIAS),
    ("lets_go_its_own", "W1", Bias(kinds=("reconciler stalls", "freeze at"), points=("paused", "loaded"), count=12)),
    ("version_floor", "V3", FALLS),
    ("pins", "W5", NO_BIAS),
    ("pins_what_it_applies", "W5", LATE_LOOKS),
    ("own_leftovers", "I4", REPLACED),
]


@pytest.mark.parametrize(("off", "rule", "bias"), CAUGHT, ids=[off.replace(" ", "+") for off, _, _ in CAUGHT])
def test_a_missing_rule_is_noticed(off: str, rule: str, bias: Bias):
    missing = frozenset(off.split())
    assert any(rule_of(simulate(seed, without=missing, bias=bias).problem).startswith(rule) for seed in range(SEEDS))
    assert [simulate(seed, bias=bias).problem for seed in range(3)] == [None] * 3


def test_every_rule_is_noticed_or_said_to_be_a_second_lock():
    noticed = {rule for off, _, _ in CAUGHT for rule in off.split()}
    assert noticed | REDUNDANT.keys() == ALL_RULES
    assert not noticed & REDUNDANT.keys()


@pytest.mark.parametrize("rule", sorted(REDUNDANT))
def test_a_second_lock_is_not_missed(rule: str):
    """If it is one day, it belongs among those that are noticed."""
    assert [simulate(seed, without=frozenset({rule})).problem for seed in range(10)] == [None] * 10
