"""Trackers get what metrics.jsonl has, read back from what they wrote; and one that fails, hangs or falls behind stops nothing."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from consumer.trackers import aside
from consumer.trackers.aside import Aside
from consumer.trackers.config import TrackersConfig
from consumer.trackers.tracked import TrackedMetrics, open_metrics
from protocol.errors import ConfigError
from protocol.messages import JsonValue
from tests.consumer.trackers.event_files import begun, scalars

LINES: list[dict[str, JsonValue]] = [
    {"step": step, "version": f"1:{step}", "at": 1e9 + step, "loss": 0.5 / step, "tokens": 7 * step, "staleness": {"0": step}, "ratio_max/age_2_3": 1.5}
    for step in (1, 2, 3)
]


def test_tensorboard_has_the_numbers_of_every_line(tmp_path: Path):
    with open_metrics(tmp_path, TrackersConfig(names=("tensorboard",)), run="a", settings={}) as metrics:
        for line in LINES:
            metrics.append(line)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == LINES
    expected = {(step, name): value for step in (1, 2, 3) for name, value in (("loss", 0.5 / step), ("tokens", 7 * step), ("ratio_max/age_2_3", 1.5))}
    seen = scalars(tmp_path / "tensorboard")
    assert len(seen) == len(expected)
    assert {(step, name): value for step, name, value in seen} == pytest.approx(expected)


def test_a_resumed_run_takes_the_place_of_the_steps_that_it_repeats(tmp_path: Path):
    config = TrackersConfig(names=("tensorboard",), tensorboard_dir=str(tmp_path / "all"))
    for lines in (LINES, LINES[1:]):
        with open_metrics(tmp_path, config, run="a", settings={}) as metrics:
            for line in lines:
                metrics.append(line)
    assert [step for step, name, _ in scalars(tmp_path / "all" / "a") if name == "loss"] == [1, 2, 3, 2, 3]
    assert begun(tmp_path / "all" / "a") == [1, 2]


class _Run:
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def define_metric(self, name: str, **options: Any) -> None:
        self.told.append(("axis", name, options))

    def log(self, values: Mapping[str, float]) -> None:
        self.told.append(("log", dict(values)))

    def finish(self) -> None:
        self.told.append(("finish",))


@pytest.fixture
def wandb_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the package, which itself is larger than all of the rest together."""
    told: list[Any] = []
    module = ModuleType("wandb")

    def init(**options: Any) -> _Run:
        told.append(("init", options))
        return _Run(told)

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return told


def test_wandb_goes_on_as_the_same_run_with_the_step_as_its_axis(tmp_path: Path, wandb_stand_in: list[Any]):
    config = TrackersConfig(names=("wandb",), wandb_project="p")
    with open_metrics(tmp_path, config, run="a run", settings={"loss": {"kind": "gspo"}}) as metrics:
        metrics.append(LINES[2])
        metrics.append(LINES[1])
    (_, how), *axes, first, second, last = wandb_stand_in
    expected = {"project": "p", "name": "a run", "id": "a-run", "resume": "allow", "mode": "offline", "dir": str(tmp_path)}
    assert {key: how[key] for key in expected} == expected
    assert how["config"] == {"loss": {"kind": "gspo"}}
    assert axes == [("axis", "step", {}), ("axis", "*", {"step_metric": "step"})]
    assert first == ("log", {"step": 3, "loss": 0.5 / 3, "tokens": 21, "ratio_max/age_2_3": 1.5})
    assert second[1]["step"] == 2
    assert last == ("finish",)


class _Broken:
    def __init__(self, at: int) -> None:
        self.at = at

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.at:
            raise OSError("disk full")

    def close(self) -> None:
        raise AssertionError("one that failed is not asked again")


def _no_tracker(_: int) -> Any:
    raise ImportError("no such thing")


@pytest.mark.parametrize(("make", "words"), [(lambda _: _Broken(2), "OSError: disk full"), (_no_tracker, "ImportError: no such thing")])
def test_one_that_fails_is_said_once_and_metrics_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any, words: str):
    broken = Aside("broken", make)
    metrics = TrackedMetrics(tmp_path / "metrics.jsonl", (broken,))
    for line in LINES:
        metrics.append(line)
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert words in record.message
    assert "training goes on" in record.message


class _Stuck:
    def __init__(self, release: threading.Event) -> None:
        self.release, self.seen = release, 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.release.wait()
        self.seen += 1

    def close(self) -> None: ...


def test_one_that_hangs_holds_up_neither_training_nor_its_end(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aside, "_LINES", 4)
    release = threading.Event()
    for lines, words in ((100, "4 steps behind"), (3, "did not end within 0.05 s")):
        caplog.clear()
        tracker = Aside("stuck", lambda _: _Stuck(release), close_s=0.05)
        for step in range(lines):
            tracker.log(step, {})
        tracker.close()
        assert [words in record.message for record in caplog.records] == [True]
    release.set()


def test_one_that_is_not_installed_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    TrackersConfig().check()
    with pytest.raises(ConfigError, match=r"trackers\.names wandb: wandb is not installed here: pip install 'rollstream\[wandb\]'"):
        TrackersConfig(names=("wandb",)).check()


def test_a_tracker_is_named_once():
    with pytest.raises(ValueError, match="name each tracker once"):
        TrackersConfig(names=("wandb", "wandb"))
