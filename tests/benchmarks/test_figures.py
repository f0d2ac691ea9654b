from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks.gpu.device_memory import _by_part
from benchmarks.gpu.figures import figures, quantiles, table
from deploy.history import read_history
from deploy.summary import summarise
from tests.deploy.recorded import Recorder


def a_run(steps: int) -> dict[str, Any]:
    """Step s ends at second 10 s; its weights are served 3 s later, after a pause of s ms; its two groups were put 4 s before it ended."""
    run = Recorder()
    run.begin()
    for step in range(1, steps + 1):
        seqs = [2 * step, 2 * step + 1]
        run.generated(10 * step - 4, seqs, version=f"1:{step - 1}")
        run.trained(10 * step, step, seqs, reward=step / 100, staleness={"0": 10, "1": 10})
        run.published(10 * step + 1, f"1:{step}")
        run.applied(10 * step + 3, f"1:{step}", pause_s=step / 1000)
    metrics = [{"step": step, "seconds": 1.0, "wait_s": 0.5, "train_s": 0.25, "ratio_dev": 0.01} for step in range(1, steps + 1)]
    return figures(read_history(run.events), metrics, summarise(run.events, run.witness))


def test_rates_are_of_the_steps_after_the_first_few():
    told = a_run(16)
    assert told["measured"] == {"from_step": 7, "steps": 10, "seconds": 100.0}, "step 6 ends where the measuring begins"
    assert told["tokens_per_s"] == {"generated": pytest.approx(2.0), "trained": pytest.approx(2.0)}
    assert told["trainer_busy_fraction"] == pytest.approx(10 * 0.25 / 100)
    assert told["a_step"]["elsewhere_s"] == pytest.approx(0.25)
    assert told["staleness_steps"]["mean"] == pytest.approx(0.5)
    assert told["trained_to_served_s"]["mean"] == pytest.approx(3.0)
    assert told["pause_ms"] == quantiles([6.0 + at for at in range(10)]), "of versions 6 to 15: the last is served after the measuring"
    assert len(told["reward_curve"]["reward"]) == 16, "the curve has every step"


def test_a_run_that_came_to_nothing_has_no_rates():
    told = a_run(1)
    assert told["steps"] == 1
    assert "tokens_per_s" not in told


def test_the_table_has_a_column_for_each_run_also_for_one_that_failed():
    good = a_run(16) | {"name": "apart-in_place-store", "gpu_memory": {"peak_bytes": {"0": 2 << 30, "1": 1 << 30}}, "logprob_difference": {}, "failed": ""}
    bad = {"name": "turns-abort-store", "failed": "SGLang did not start", "logprob_difference": {}, "gpu_memory": {"peak_bytes": {}}}
    text = table([good, bad])
    lines = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    assert lines["tokens/s generated"] == ["2", "-"]
    assert lines["GPU memory, GiB, peak"] == ["2.0", "+", "1.0", "-"]
    assert "turns-abort-store: SGLang did not start" in text


def test_a_process_belongs_to_the_part_that_it_descends_from():
    parts = {os.getppid(): "engine-0"}
    assert _by_part({os.getpid(): 5, os.getppid(): 7}, parts) == {"engine-0": 12}
    assert _by_part({os.getpid(): 5}, {}) == {}
