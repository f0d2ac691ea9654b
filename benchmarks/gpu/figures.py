"""What a run tells of itself, as figures: from its audit, its metrics and its summary. `python -m benchmarks.gpu.figures FOLDER` prints the table of results.

Rates and times are of the steps after the first few, in which kernels are compiled and caches fill; the reward curve has every step.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from deploy.history import History, Step
from deploy.tally import distribution

_WARM_STEPS = 5
_SECONDS = ("seconds", "wait_s", "train_s", "snapshot_s", "digest_s")
_MEANS = (*_SECONDS, "publish_s", "response_tokens_mean", "ratio_dev", "clip_fraction", "entropy", "grad_norm")
"""Of metrics.jsonl, as they are named there."""


def figures(history: History, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    steps = history.steps
    curve = {"step": [s.step for s in steps], "at_s": [round(s.at - history.began, 2) for s in steps], "reward": [round(s.reward, 4) for s in steps]}
    told: dict[str, Any] = {
        "steps": len(steps),
        "reward": summary["reward"],
        "held_out": summary["heldout"],
        "reward_curve": curve,
        "held_out_curve": [{"at_s": round(e.at - history.began, 2), "phase": e.phase, "exact": e.exact, "reward": e.reward} for e in history.evaluations],
        "groups": {name: summary[f"groups_{name}"] for name in ("reserved", "trained", "lost", "duplicated", "released", "dead")},
        "whole_run": {name: summary[name] for name in ("seconds", "tokens_generated", "tokens_trained", "engine_busy_fraction", "restarts", "wall_seconds")},
        "host_memory_bytes": summary["peak_pss_bytes"],
    }
    if len(steps) < 2:
        return told
    warm = steps[min(_WARM_STEPS, len(steps) // 3) :]
    since, until = warm[0].at, warm[-1].at
    later = warm[1:]
    """Those whose whole time lies between `since` and `until`."""
    numbers = {step.step for step in later}
    rows = [row for row in metrics if row["step"] in numbers]
    seconds = until - since
    told["measured"] = {"from_step": later[0].step, "steps": len(later), "seconds": seconds}
    told["tokens_per_s"] = {
        "generated": sum(put.tokens for put in history.puts if since < put.at <= until) / seconds,
        "trained": sum(step.tokens for step in later) / seconds,
    }
    told["trainer_busy_fraction"] = sum(step.train_s for step in later) / seconds
    told["a_step"] = {name: _mean([row[name] for row in rows if row.get(name) is not None]) for name in _MEANS}
    told["a_step"]["elsewhere_s"] = _mean([row["seconds"] - row["wait_s"] - row["train_s"] for row in rows])
    """Turns that are taken and given, and what the ledger is told."""
    told["pause_ms"] = quantiles([1e3 * one.pause_s for one in history.applied if since < one.at <= until])
    told["updates"] = {"by": summary["weight_updates_by_transport"], "engine_boots": sum(map(len, history.boots.values()))}
    told["trained_to_served_s"] = quantiles(_live(history, since, until))
    told["staleness_steps"] = _spread(sum((step.staleness for step in later), Counter()))
    told["publish_lag_steps"] = summary["publish_lag"]
    return told


def _live(history: History, since: float, until: float) -> list[float]:
    """Seconds from a step's end to the moment an engine has been proven to serve its weights; versions that were skipped are not in it."""
    ends: dict[int, Step] = {step.step: step for step in history.steps}
    return [one.at - ends[one.version.n].at for one in history.applied if one.version.n in ends and since < one.at <= until]


def quantiles(values: Sequence[float]) -> dict[str, float | int]:
    if not values:
        return {"count": 0}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"count": len(values), "mean": statistics.fmean(values), "p50": p50, "p99": p99, "max": max(values)}


def _spread(tokens: Counter[int]) -> dict[str, Any]:
    found = distribution(tokens)
    return {"mean": found.mean, "p50": found.p50, "p99": found.p99, "max": found.max, "histogram": {str(age): count for age, count in found.histogram.items()}}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# -- for people ----------------------------------------------------------------------------------------------------------------------------------

_Path = tuple[str, ...]
_ROWS: tuple[tuple[str, _Path, Callable[[Any], str]], ...] = (
    ("steps measured", ("measured", "steps"), lambda v: f"{v}"),
    ("tokens/s generated", ("tokens_per_s", "generated"), lambda v: f"{v:,.0f}"),
    ("tokens/s trained", ("tokens_per_s", "trained"), lambda v: f"{v:,.0f}"),
    ("a step, s", ("a_step", "seconds"), lambda v: f"{v:.2f}"),
    ("  waiting", ("a_step", "wait_s"), lambda v: f"{v:.2f}"),
    ("  training", ("a_step", "train_s"), lambda v: f"{v:.2f}"),
    ("  elsewhere", ("a_step", "elsewhere_s"), lambda v: f"{v:.2f}"),
    ("trainer busy", ("trainer_busy_fraction",), lambda v: f"{100 * v:.0f} %"),
    ("engine pause, ms, mean", ("pause_ms", "mean"), lambda v: f"{v:.1f}"),
    ("engine pause, ms, p99", ("pause_ms", "p99"), lambda v: f"{v:.1f}"),
    ("trained to served, s, mean", ("trained_to_served_s", "mean"), lambda v: f"{v:.2f}"),
    ("publish lag, steps, mean", ("publish_lag_steps", "mean"), lambda v: f"{v:.2f}"),
    ("staleness, steps, mean", ("staleness_steps", "mean"), lambda v: f"{v:.2f}"),
    ("staleness, steps, p99", ("staleness_steps", "p99"), lambda v: f"{v}"),
    ("reward, first 20 steps", ("reward", "first"), lambda v: f"{v:.3f}"),
    ("reward, last 20 steps", ("reward", "last"), lambda v: f"{v:.3f}"),
    ("held-out exact, first", ("held_out", "first"), lambda v: f"{v:.3f}"),
    ("held-out exact, last", ("held_out", "last"), lambda v: f"{v:.3f}"),
    ("engine/trainer before, nats", ("logprob_difference", "before", "mean"), lambda v: f"{v:.4f}"),
    ("  p99", ("logprob_difference", "before", "p99"), lambda v: f"{v:.3f}"),
    ("engine/trainer after, nats", ("logprob_difference", "after", "mean"), lambda v: f"{v:.4f}"),
    ("  p99 ", ("logprob_difference", "after", "p99"), lambda v: f"{v:.3f}"),
    ("versions apart, nats", ("logprob_difference", "moved", "mean"), lambda v: f"{v:.4f}"),
    ("GPU memory, GiB, peak", ("gpu_memory", "peak_bytes"), lambda v: " + ".join(f"{one / 2**30:.1f}" for one in v.values())),
    ("groups lost", ("groups", "lost"), lambda v: f"{v}"),
)
_WIDTH = 28


def results(folder: Path) -> list[dict[str, Any]]:
    """Of the runs that left one there."""
    return [result for path in sorted(folder.glob("*.json")) if "logprob_difference" in (result := orjson.loads(path.read_bytes()))]


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A column for each run."""
    lines = ["".join([f"{'':<28}", *(f"{result['name']:>{_WIDTH}}" for result in runs)])]
    for title, path, shown in _ROWS:
        values = [_at(result, path) for result in runs]
        lines.append("".join([f"{title:<28}", *(f"{'-' if value in (None, {}) else shown(value):>{_WIDTH}}" for value in values)]))
    lines += [f"{result['name']}: {result['failed']}" for result in runs if result.get("failed")]
    return "\n".join(lines)


def _at(result: Any, path: _Path) -> Any:
    for key in path:
        result = result.get(key) if isinstance(result, Mapping) else None
    return result


if __name__ == "__main__":
    print(table(results(Path(sys.argv[1]))))
