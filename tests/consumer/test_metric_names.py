"""One table names every figure, and its page says the same."""

from __future__ import annotations

from pathlib import Path

from consumer.backend import StepReport
from consumer.metric_names import METRICS, SECTIONS, metric_of, page
from consumer.stats import step_diagnostics, step_stats

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_table():
    assert (DOCS / "metrics.md").read_text("utf-8") == page(), "write it again: python -m consumer.metric_names > docs/metrics.md"


def test_every_figure_has_one_name_and_a_meaning():
    assert sum(map(len, SECTIONS.values())) == len(METRICS)
    assert all(metric.meaning.endswith(".") for metric in METRICS.values())


def test_what_a_step_tells_is_in_the_table():
    report = StepReport(loss=0.0, grad_norm=0.0, lr=0.0, entropy=0.0, clip_fraction=0.0, ratio_dev=0.0)
    told = step_stats([], report, seconds=1.0, wait_s=0.0, train_s=1.0) | step_diagnostics([], report)
    assert [name for name in told if metric_of(name) is None] == []


def test_a_figure_by_age_is_known_by_the_name_before_it():
    assert metric_of("ratio_mean/age_2_3") is METRICS["ratio_mean"]
    assert metric_of("ratio_mean/age_5") is None
    assert metric_of("loss/age_0") is None
    assert metric_of("no_such") is None
