"""`report.png`: one picture of a run. Needs matplotlib (the extra `rollstream[report]`)."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from buffer.audit import read_audit
from deploy.history import History, read_history
from deploy.summary import WINDOW, spread, window_means
from protocol.errors import ConfigError

_INK, _FAINT = "#22303c", "#c8d0d6"
_TRAIN, _HELD_OUT = "#2f6db5", "#d9822b"
_ENGINES = ("#2a9d8f", "#8e5ea2", "#c2543d", "#6b7d2b", "#3d7ea6", "#a68a3d")
_STATES = (("leased", "#2f6db5"), ("ready", "#7fb069"), ("generating", "#e6c46a"))
_REWOUND = ("rewound", "#b9c4cc")
_BUCKETS = 60
"""Points of the depth and throughput panels."""
_ZOOM_STEPS = 8
"""Steps shown in the close-up of the versions panel."""


async def draw(folder: Path) -> Path:
    """Draw the run in `folder` from `audit.jsonl` and return the path of `report.png`.

    Raises: `ConfigError` without matplotlib, or if the run has trained nothing.
    """
    history = read_history(await read_audit(folder / "audit.jsonl"))
    if not history.steps:
        raise ConfigError(f"{folder}: no optimizer step in audit.jsonl, nothing to draw")
    return plot(history, folder / "report.png", title=_run_name(folder))


def _run_name(folder: Path) -> str:
    """As the kept configuration has it, or else the folder's own."""
    try:
        name = tomllib.loads((folder / "run.toml").read_text("utf-8"))["run"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
    return str(name)


def plot(history: History, path: Path, *, title: str) -> Path:
    """Raises: `ConfigError` without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise ConfigError("report.png needs matplotlib: install `rollstream[report]`; everything else of the run is there without it") from problem
    figure = Figure(figsize=(13, 8.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["reward", "reward", "staleness"], ["versions", "depth", "throughput"]])
    _reward(panels["reward"], history)
    _staleness(panels["staleness"], history)
    _versions(panels["versions"], history)
    _depth(panels["depth"], history)
    _throughput(panels["throughput"], history)
    for panel in panels.values():
        _plain(panel)
    tokens = sum(step.tokens for step in history.steps)
    figure.suptitle(f"{title}: {len(history.steps)} steps, {tokens:,} tokens trained in {history.seconds:.0f} s", color=_INK, fontsize=14, x=0.01, ha="left")
    figure.savefig(path, dpi=110)
    return path


def _reward(axes: Any, history: History) -> None:
    rewards = [step.reward for step in history.steps]
    times = [step.at - history.began for step in history.steps]
    means = window_means(rewards)
    axes.plot(times, rewards, color=_TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(times[len(times) - len(means) :], means, color=_TRAIN, linewidth=2, label=f"sampled, {min(WINDOW, len(rewards))}-step mean")
    said = f"sampled reward {means[0]:.2f} → {means[-1]:.2f}"
    if history.evaluations:
        exact = [evaluation.exact for evaluation in history.evaluations]
        at = [evaluation.at - history.began for evaluation in history.evaluations]
        axes.plot(at, exact, "o-", color=_HELD_OUT, markersize=5, linewidth=1, label="held-out, greedy, exact")
        said += f", held-out exact {exact[0]:.2f} → {exact[-1]:.2f}"
    axes.set(title=said, xlabel="seconds", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="best")


def _staleness(axes: Any, history: History) -> None:
    tokens = sum((step.staleness for step in history.steps), start=Counter[int]())
    total = sum(tokens.values()) or 1
    figures = spread(tokens)
    axes.bar(list(tokens), [100 * count / total for count in tokens.values()], color=_TRAIN, width=0.8)
    if (limit := history.bound) is not None:
        axes.axvline(limit + 0.5, color=_HELD_OUT, linestyle="--", linewidth=1.5)
        axes.annotate(f"K = {limit}", (limit + 0.4, 0.97), xycoords=("data", "axes fraction"), ha="right", va="top", color=_HELD_OUT)
        axes.set_xlim(-0.6, limit + 1)
    mean = figures["mean"]
    said = "no tokens" if mean is None else f"mean {mean:.2f}, p99 {figures['p99']}, max {figures['max']}"
    axes.set(title=f"staleness: {said}", xlabel="steps", ylabel="% of trained tokens")


def _versions(axes: Any, history: History) -> None:
    """The whole run, and a close-up of its middle, where one sees the engines move one by one."""
    axes.set(xlabel="seconds", ylabel="version n")
    _version_lines(axes, history)
    axes.legend(frameon=False, loc="upper left")
    behind = spread(history.lag)
    said = "" if behind["mean"] is None else f": {behind['mean']:.2f} behind on average, p99 {behind['p99']}"
    axes.set_title(f"version by engine{said}")
    middle = len(history.steps) // 2
    if middle < _ZOOM_STEPS:
        return
    first, last = history.steps[middle - _ZOOM_STEPS // 2], history.steps[middle + _ZOOM_STEPS // 2]
    closer = axes.inset_axes((0.52, 0.08, 0.46, 0.42), xlim=(first.at - history.began, last.at - history.began), ylim=(first.step - 2.5, last.step + 0.5))
    _version_lines(closer, history)
    closer.tick_params(labelsize=7, colors=_INK)
    for spine in closer.spines.values():
        spine.set_color(_FAINT)
    axes.indicate_inset_zoom(closer, edgecolor=_INK)


def _version_lines(axes: Any, history: History) -> None:
    axes.step(*_line(history, [(step.at, step.step) for step in history.every_step]), where="post", color=_FAINT, linewidth=4, label="trained")
    for number, name in enumerate(sorted({applied.engine_id for applied in history.applied})):
        line = _line(history, [(applied.at, applied.version.n) for applied in history.applied if applied.engine_id == name])
        axes.step(*line, where="post", color=_ENGINES[number % len(_ENGINES)], linewidth=1.2, label=name)


def _depth(axes: Any, history: History) -> None:
    width = _width(history)
    states = [*_STATES, *([_REWOUND] if any(depth.rewound for depth in history.depth) else [])]
    layers = [_average([(depth.at - history.began, getattr(depth, name)) for depth in history.depth], width, history.seconds) for name, _ in states]
    times = [(number + 0.5) * width for number in range(len(layers[0]))]
    axes.stackplot(times, *layers, labels=[name for name, _ in states], colors=[color for _, color in states], linewidth=0)
    moments = [sum(moment) for moment in zip(*layers, strict=True)]
    limit = _admission_limit(history)
    if limit is not None:
        axes.axhline(limit, color=_HELD_OUT, linestyle="--", linewidth=1.5)
    said = f"buffer: {sum(moments) / len(moments):.0f} groups on average" + ("" if limit is None else f", {limit} admitted")
    axes.set(title=said, xlabel="seconds", ylabel="groups")
    axes.set_ylim(0, 1.3 * max(limit or 0, *moments, 1))
    axes.legend(frameon=False, loc="upper center", ncols=2 if len(states) > len(_STATES) else len(states))


def _throughput(axes: Any, history: History) -> None:
    width = _width(history)
    generated = _rate([(put.at - history.began, put.tokens) for put in history.puts], width, history.seconds)
    trained = _rate([(step.at - history.began, step.tokens) for step in history.every_step], width, history.seconds)
    times = [(number + 0.5) * width for number in range(len(generated))]
    axes.plot(times, generated, color=_ENGINES[0], linewidth=1.5, label="generated")
    axes.plot(times, trained, color=_TRAIN, linewidth=1.5, label="trained")
    mean = sum(put.tokens for put in history.puts) / history.seconds if history.seconds else 0.0
    axes.set(title=f"throughput: {mean:,.0f} tokens/s generated", xlabel="seconds", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower center", ncols=2)


def _line(history: History, points: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [at - history.began for at, _ in points], [n for _, n in points]


def _width(history: History) -> float:
    """Seconds of one bucket."""
    return max(history.seconds, 1e-3) / _BUCKETS


def _rate(points: Sequence[tuple[float, int]], width: float, seconds: float) -> list[float]:
    """Tokens a second in each bucket of `width` seconds."""
    sums = [0.0] * _BUCKETS
    for at, tokens in points:
        if 0 <= at <= seconds:
            sums[min(int(at / width), _BUCKETS - 1)] += tokens
    return [tokens / width for tokens in sums]


def _average(points: Sequence[tuple[float, int]], width: float, seconds: float) -> list[float]:
    """Mean over time in each bucket of a figure that keeps its value until the next point."""
    sums = [0.0] * _BUCKETS
    for (at, value), (until, _) in pairwise([*points, (seconds, 0)]):
        begin, end = max(at, 0.0), min(until, seconds)
        while begin < end:
            bucket = min(int(begin / width), _BUCKETS - 1)
            edge = end if bucket == _BUCKETS - 1 else min(end, max((bucket + 1) * width, math.nextafter(begin, math.inf)))
            sums[bucket] += value * (edge - begin)
            begin = edge
    return [total / width for total in sums]


def _admission_limit(history: History) -> int | None:
    depth, groups = history.settings.get("pipeline_depth"), history.settings.get("groups_per_step")
    if not isinstance(depth, int | float) or not isinstance(groups, int):
        return None
    return math.ceil((depth + 1) * groups)


def _plain(axes: Any) -> None:
    said = axes.get_title()
    axes.set_title("")
    axes.set_title(said, loc="left", color=_INK, fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(visible=True, color=_FAINT, linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
