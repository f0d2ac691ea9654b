"""metrics.jsonl and the trackers beside it, as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from consumer.stats import MetricsFile
from consumer.trackers.aside import Aside, Tracker
from consumer.trackers.config import TrackersConfig
from protocol.messages import JsonValue

_NO_FIGURES = ("step", "at")
"""Numbers that say when, which a tracker knows otherwise."""


class TrackedMetrics(MetricsFile):
    """metrics.jsonl with trackers beside it, which get the numbers of each line."""

    def __init__(self, path: Path, trackers: tuple[Aside, ...] = ()) -> None:
        super().__init__(path)
        self._trackers = trackers

    def append(self, line: Mapping[str, JsonValue]) -> None:
        super().append(line)
        step = line["step"]
        assert isinstance(step, int)
        for tracker in self._trackers:
            tracker.log(step, numbers(line))

    def close(self) -> None:
        """Waits for trackers, all together no longer than `aside.CLOSE_S` each."""
        super().close()
        for tracker in self._trackers:
            tracker.close()


def numbers(line: Mapping[str, JsonValue]) -> dict[str, float]:
    """What of a line a tracker gets."""
    return {name: value for name, value in line.items() if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NO_FIGURES}


@contextlib.contextmanager
def open_metrics(folder: Path, config: TrackersConfig, *, run: str, settings: Mapping[str, JsonValue]) -> Iterator[TrackedMetrics]:
    """metrics.jsonl in `folder`, and the trackers of [trackers]; `settings` is what they say of the run besides."""
    with contextlib.closing(TrackedMetrics(folder / "metrics.jsonl", tuple(_asides(folder, config, run, settings)))) as metrics:
        yield metrics


def _asides(folder: Path, config: TrackersConfig, run: str, settings: Mapping[str, JsonValue]) -> Iterator[Aside]:
    for name in config.names:
        if name == "tensorboard":
            place = Path(config.tensorboard_dir).absolute() / run if config.tensorboard_dir else folder / "tensorboard"
            yield Aside(name, partial(_tensorboard, place))
        else:
            yield Aside(name, partial(_wandb, folder, config, run, settings))


def _tensorboard(place: Path, first_step: int) -> Tracker:
    from consumer.trackers.tensorboard import TensorBoard  # a package that does not import is a tracker that fails

    return TensorBoard(place, first_step=first_step)


def _wandb(folder: Path, config: TrackersConfig, run: str, settings: Mapping[str, JsonValue], _first_step: int) -> Tracker:
    from consumer.trackers.wandb import WandB

    return WandB(folder, project=config.wandb_project, mode=config.wandb_mode, run=run, settings=settings)
