"""Table and plot of the results that lie in a folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import orjson

from benchmarks.learning.cell import LOSSES
from deploy.summary import WINDOW, window_means

Json: TypeAlias = dict[str, Any]
Results: TypeAlias = Mapping[tuple[str, int], Sequence[Json]]
"""By loss and staleness, the seeds in order."""
SINGLE_PROCESS: Mapping[tuple[str, int], tuple[float, float]] = MappingProxyType({
    ("default", 0): (0.84, 0.77), ("default", 2): (0.81, 0.72), ("default", 8): (0.72, 0.61),
    ("trust_region", 0): (0.84, 0.77), ("trust_region", 2): (0.76, 0.69), ("trust_region", 8): (0.72, 0.63),
    ("tis", 0): (0.84, 0.77), ("tis", 2): (0.71, 0.61), ("tis", 8): (0.43, 0.28),
    ("naive", 0): (0.84, 0.77), ("naive", 2): (0.70, 0.64), ("naive", 8): (0.37, 0.13),
})  # fmt: skip
"""Final reward and held-out exact of a loop of one process with the same model, task and learning rate, measured before the service had losses to choose:
three seeds, for naive at 2 one; at 0 all losses are one, so one row. Its warm start is four steps longer."""
_COLORS = ("#4269d0", "#3ca951", "#efb118", "#ff725c")


def read(folder: Path) -> Results:
    """Raises: `FileNotFoundError` if there are none."""
    found: dict[tuple[str, int], list[Json]] = {}
    for path in sorted(folder.glob("*-*-*.json")):
        one: Json = orjson.loads(path.read_bytes())
        found.setdefault((one["loss"], one["staleness"]), []).append(one)
    if not found:
        raise FileNotFoundError(f"{folder} has no results: run `python -m benchmarks.learning --out {folder}` first")
    order = list(LOSSES)
    return {key: sorted(found[key], key=lambda one: int(one["seed"])) for key in sorted(found, key=lambda key: (key[1], order.index(key[0])))}


def table(results: Results) -> str:
    """Markdown, a row a cell. Means over seeds; of the final reward also the lowest and the highest."""
    head = (
        "staleness",
        "loss",
        "runs",
        "final reward",
        "best",
        "held-out exact",
        "collapsed",
        "age of trained tokens",
        "ESS of tokens",
        "entropy",
        "single process",
    )
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for (loss, staleness), runs in results.items():
        single = SINGLE_PROCESS.get((loss, staleness))
        cells = (
            str(staleness),
            loss,
            str(len(runs)),
            f"{_mean(runs, 'final'):.2f} ({min(run['final'] for run in runs):.2f} to {max(run['final'] for run in runs):.2f})",
            f"{_mean(runs, 'best'):.2f}",
            _held_out(runs),
            f"{sum(run['collapsed'] for run in runs)} of {len(runs)}",
            f"{_mean(runs, 'age_mean'):.2f}",
            f"{_mean(runs, 'ess_tokens_last'):.2f}",
            f"{_mean(runs, 'entropy_last'):.2f}",
            "" if single is None else f"{single[0]:.2f}, {single[1]:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(folder: Path, stem: Path) -> str:
    """STEM.md and STEM.svg; the table."""
    results = read(folder)
    told = table(results)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.md").write_text(_page(results, told, f"{stem.name}.svg"), "utf-8")
    draw(results, stem.with_name(f"{stem.name}.svg"))
    return told


def draw(results: Results, path: Path) -> None:
    """A panel a staleness: the sampled reward, a thin line a run and a thick one for the mean of the seeds."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "learning", "font.size": 9})
    stale = sorted({staleness for _, staleness in results})
    figure, panels = plt.subplots(1, len(stale), figsize=(4 * len(stale), 3.4), sharey=True, squeeze=False, layout="constrained")
    for panel, staleness in zip(panels[0], stale, strict=True):
        for loss, color in zip(LOSSES, _COLORS, strict=True):
            curves = [window_means(run["reward"]) for run in results.get((loss, staleness), ())]
            for curve in curves:
                panel.plot(range(WINDOW, WINDOW + len(curve)), curve, color=color, alpha=0.3, linewidth=0.8)
            if curves:
                mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
                panel.plot(range(WINDOW, WINDOW + len(mean)), mean, color=color, linewidth=2, label=loss)
        panel.set(title=f"staleness {staleness}", xlabel="step", ylim=(0, 1))
        panel.grid(visible=True, linewidth=0.4, alpha=0.5)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0][0].set_ylabel(f"sampled reward, {WINDOW}-step mean")
    panels[0][0].legend(frameon=False, loc="upper left")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _page(results: Results, told: str, plot: str) -> str:
    runs = [run for cell in results.values() for run in cell]
    lost = sum(run.get("groups_lost") or 0 for run in runs) + sum(run.get("groups_duplicated") or 0 for run in runs)
    seconds = statistics.fmean(run["job_seconds"] for run in runs)
    steps = ", ".join(map(str, sorted({run["steps"] for run in runs})))
    rates = ", ".join(f"{rate:g}" for rate in sorted({run["lr"] for run in runs}))
    return f"""# Losses at forced staleness, through the whole service

`make bench-learning`: {len(runs)} runs of `rollstream up` (Redis, one embedded engine, weight channel, trainer; CPU) on the demo's task, {steps} steps of
32 groups of 8, learning rate {rates}, group-standardised advantages; {seconds:.0f} s a run. Logprobs are the engine's, ages those of the versions that wrote
the tokens.

{told}

![reward by step]({plot})

- *final* and *best* are {WINDOW}-step means of the sampled reward, the last and the highest. *Held-out* is greedy exact on 256 prompts of no training row,
  at the start and after the last step. *Collapsed*: the final reward is more than 0.2 below the best, or a number was not finite; a loss that never learned
  has not collapsed by this rule.
- Staleness is forced: D = K = s, and the trainer ends a step only when everything that may be outstanding is written. The first s + 1 steps train on the
  starting policy, so the mean age of the run is a little lower. At 0 all tokens are on-policy, all losses have one gradient, and rows differ by chance alone.
- `default` is `ppo_clip` (0.2, 0.28); `trust_region` its defaults; `tis` is `truncated_is` with a cap of 2; `naive` has no importance weight at all.
- *ESS of tokens* (effective share, each weighted by its ratio) and *entropy* (nats) are means over the last {WINDOW} steps.
- *Single process* is final reward and held-out exact of a loop without a service: same model, task, updates and learning rate, a warm start four steps longer.
- Groups lost or trained twice in all runs: {lost}.
"""


def _held_out(runs: Sequence[Json]) -> str:
    found = [run["heldout"] for run in runs if run.get("heldout") and run["heldout"]["last"] is not None]
    if not found:
        return "none"
    return f"{statistics.fmean(one['first'] for one in found):.2f} → {statistics.fmean(one['last'] for one in found):.2f}"


def _mean(runs: Sequence[Json], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)
