"""`summary.json`: a run in figures, counted from the audit stream and the trainer's witness file, never from a counter of one process.

audit.jsonl (+ what Redis still holds of the stream) ─┐
witness.jsonl ────────────────────────────────────────┼──► summarise() ──► summary.json, and a table for people
resources.json ───────────────────────────────────────┘
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import orjson
from rich.table import Table

from buffer.audit import AuditSpill, read_audit
from buffer.bias import read_bias
from buffer.contract import LedgerStatus
from buffer.redis_ledger import RedisLedger
from buffer.report import totals
from buffer.witness import WitnessLine, read_witness
from deploy.config import ReaderConfig, reader_url
from deploy.history import Applied, Histogram, History, read_history
from deploy.http import bodies
from deploy.tally import distribution
from deploy.up.records import write_atomically
from protocol.connection import Client, connect
from protocol.errors import ConfigError, RedisUnavailable, RunMissing
from protocol.keys import Keys
from protocol.messages import Event, TrainerStatus
from protocol.presence import Presence

_LOG = logging.getLogger(__name__)

Summary: TypeAlias = dict[str, Any]
"""JSON values; the keys are those of `summarise`."""
WINDOW = 20
"""Reward figures are means over so many steps."""


async def write_summary(folder: Path, client: Client | None = None, keys: Keys | None = None) -> Summary:
    """Summarise the run in `folder`, write `summary.json` there and return it.

    With `client` and `keys` the ledger is asked what is outstanding, and what happened after the trainer left (the final evaluation, engines that leave) is
    moved into `audit.jsonl` first, so that the file tells the whole run once Redis is gone. While a trainer is there the file is its own to write.
    """
    status = None
    audit = folder / "audit.jsonl"
    if client is not None and keys is not None:
        status = await RedisLedger(client, keys).status()
        if not await Presence(client, keys, "trainer", TrainerStatus).members():
            async with AuditSpill(client, keys, audit) as spill:
                await spill.flush()
    events = await read_audit(audit, client, keys)
    summary = summarise(events, read_witness(folder / "witness.jsonl"), status=status, resources=read_resources(folder))
    write_atomically(folder / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return summary


async def summary_by_hand(config: ReaderConfig) -> Summary:
    """The summary of a run whose parts were started by hand, written where its trainer keeps its record; without Redis, from that record alone.

    Raises: `ConfigError` if the record is not here: what is left in Redis must not be moved to where nobody looks for it.
    """
    folder = config.run.folder
    if not (folder / "audit.jsonl").is_file():
        raise ConfigError(f"run.dir {folder} has no audit.jsonl: ask where the trainer runs, or correct run.name or run.dir")
    try:
        url = reader_url(config.run, config.redis)
    except ConfigError:
        return await write_summary(folder)
    client = connect(url, deadline_s=1.0)
    try:
        return await write_summary(folder, client, Keys(config.run.name))
    except (RedisUnavailable, RunMissing) as problem:
        _LOG.warning("from %s alone, without what Redis may still hold: %s", folder / "audit.jsonl", problem)
        return await write_summary(folder)
    finally:
        await client.aclose()


def read_summary(folder: Path) -> Summary:
    """Raises: `OSError` if there is none."""
    found: Summary = orjson.loads((folder / "summary.json").read_bytes())
    return found


def read_resources(folder: Path) -> Mapping[str, Any]:
    """What `up` measured of its processes; empty if nobody did."""
    try:
        found: Mapping[str, Any] = orjson.loads((folder / "resources.json").read_bytes())
    except FileNotFoundError:
        return {}
    return found


def summarise(
    events: Sequence[Event], witness: Sequence[WitnessLine], *, status: LedgerStatus | None = None, resources: Mapping[str, Any] | None = None
) -> Summary:
    """Every figure of a run; None: nothing to count it from (`groups_lost` needs the ledger's `status`).

    Units: `seconds` by the clock of Redis; staleness and publish lag in steps, over tokens; fractions of 1.
    """
    history = read_history(events)
    counted = totals(events, witness, status)
    steps = history.steps
    resources = resources or {}
    tokens_generated = sum(put.tokens for put in history.puts)
    return {
        "steps": counted.steps_trained,
        "groups_reserved": counted.groups_reserved,
        "groups_trained": counted.groups_trained,
        "groups_released": {str(reason): count for reason, count in counted.groups_released.items()},
        "groups_dead": {str(reason): count for reason, count in counted.groups_dead.items()},
        "groups_outstanding": counted.groups_outstanding,
        "groups_lost": counted.groups_lost if status is not None else None,
        "groups_duplicated": counted.groups_duplicated,
        "disagreements": list(counted.disagreements),
        "staleness": spread(sum((step.staleness for step in steps), Counter())),
        "max_staleness": history.bound,
        "over_k_tokens": _over_k(history),
        "steps_over_k": counted.steps_over_k,
        "masked_tokens": counted.tokens_masked,
        "publish_lag": spread(history.lag),
        "bias": bodies.bias(read_bias(events)).model_dump(exclude={"complete"}),
        "reward": first_last_best(window_means([step.reward for step in steps])),
        "heldout": first_last_best([evaluation.exact for evaluation in history.evaluations]),
        "heldout_reward": first_last_best([evaluation.reward for evaluation in history.evaluations]),
        "evaluations": {
            name: {
                "exact": first_last_best([evaluation.exact for evaluation in found]),
                "reward": first_last_best([evaluation.reward for evaluation in found]),
            }
            for name, found in history.held_out.items()
        },
        "tokens_generated": tokens_generated,
        "tokens_trained": counted.tokens_trained,
        "tokens_per_second": tokens_generated / history.seconds if history.seconds else None,
        "seconds": history.seconds,
        "trainer_busy_fraction": _share(sum(step.train_s for step in history.every_step), sum(step.seconds for step in history.every_step)),
        "engine_busy_fraction": _share(sum(use.busy_s for use in history.uses), sum(use.uptime_s for use in history.uses)),
        "weight_updates": len(history.applied),
        "weight_updates_by_transport": dict(sorted(Counter(applied.transport or "unknown" for applied in history.applied).items())),
        "weights_published": len(history.published),
        "engine_pause_seconds": _mean_max([applied.pause_s for applied in history.applied]),
        "final_version": str(history.final) if history.final is not None else None,
        "engines": _engines(history),
        "incarnations": len(history.lineage.forks) if history.lineage is not None else 0,
        "producers_seen": len(history.owners),
        "restarts": resources.get("restarts", {}),
        "peak_pss_bytes": resources.get("peak_pss_bytes"),
        "cpu_seconds": resources.get("cpu_seconds", {}),
        "wall_seconds": resources.get("wall_seconds"),
    }


def spread(tokens: Histogram) -> dict[str, float | dict[str, int] | None]:
    """Mean, percentiles (nearest rank) and maximum of a histogram, and the histogram itself."""
    found = distribution(tokens)
    if not found.count:
        return {"mean": None, "p50": None, "p99": None, "max": None, "histogram": {}}
    histogram = {str(value): count for value, count in found.histogram.items()}
    return {"mean": found.mean, "p50": found.p50, "p99": found.p99, "max": found.max, "histogram": histogram}


def window_means(values: Sequence[float], width: int = WINDOW) -> list[float]:
    """Means over every `width` values in a row; one mean over all if there are fewer.

    >>> window_means([0.0, 1.0, 2.0], 2), window_means([1.0], 2), window_means([], 2)
    ([0.5, 1.5], [1.0], [])
    """
    width = min(width, len(values))
    return [sum(values[start : start + width]) / width for start in range(len(values) - width + 1)] if width else []


def first_last_best(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"first": None, "last": None, "best": None}
    return {"first": values[0], "last": values[-1], "best": max(values)}


def _over_k(history: History) -> int:
    """Tokens that entered a loss although they were over K, in any incarnation."""
    if (limit := history.bound) is None:
        return 0
    return sum(count for step in history.every_step for staleness, count in step.staleness.items() if staleness > limit)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean_max(values: Sequence[float]) -> dict[str, float | None]:
    return {"mean": sum(values) / len(values), "max": max(values)} if values else {"mean": None, "max": None}


def _engines(history: History) -> dict[str, dict[str, Any]]:
    """By engine: the version it ended with, whether that is the final one, and how often it went back within a boot and an incarnation (never, by rule V3)."""
    last: dict[str, Applied] = {}
    updates: Counter[str] = Counter()
    went_back: Counter[str] = Counter()
    for applied in history.applied:
        name, before = applied.engine_id, last.get(applied.engine_id)
        if before is not None and before.boot == applied.boot and before.version.incarnation == applied.version.incarnation:
            went_back[name] += applied.version.n < before.version.n
        last[name] = applied
        updates[name] += 1
    return {
        name: {
            "version": str(last[name].version) if name in last else None,
            "at_final": name in last and last[name].version == history.final and last[name].boot == history.boots.get(name, [last[name].boot])[-1],
            "updates": updates[name],
            "boots": len(history.boots.get(name, [])),
            "went_back": went_back[name],
        }
        for name in sorted({*history.boots, *last})
    }


# -- for people --------------------------------------------------------------------------------------------------------------------------------


def table(summary: Summary, *, title: str = "Result") -> Table:
    """The figures that matter, in the order a reader asks for them."""
    reward, heldout, staleness, lag, pause = (summary[key] for key in ("reward", "heldout", "staleness", "publish_lag", "engine_pause_seconds"))
    grid = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    grid.add_column(style="dim")
    grid.add_column()
    lost = "lost not known without Redis" if summary["groups_lost"] is None else f"{summary['groups_lost']} lost"
    groups = f"{summary['groups_reserved']} reserved, {summary['groups_trained']} trained, {lost}, {summary['groups_duplicated']} duplicated,"
    if dead := sum(summary["groups_dead"].values()):
        groups += f" {dead} dead,"
    if summary["groups_outstanding"]:
        groups += f" {summary['groups_outstanding']} still under way at the end (reserved - trained - dead),"
    rows = [
        ("steps", f"{summary['steps']} in {summary['seconds']:.0f} s, {sum(summary['cpu_seconds'].values()):.0f} CPU s"),
        ("sampled reward", f"{_number(reward['first'])} → {_number(reward['last'])}, best {_number(reward['best'])} ({WINDOW}-step means)"),
        ("held-out exact", f"{_number(heldout['first'])} → {_number(heldout['last'])}, best {_number(heldout['best'])}"),
        ("groups", groups.rstrip(",")),
        ("staleness", f"mean {_number(staleness['mean'])}, p99 {staleness['p99']}, max {staleness['max']} of {summary['max_staleness']} steps"),
        ("publish lag", f"mean {_number(lag['mean'])}, p99 {lag['p99']} steps"),
        ("share trained", _shares(summary["bias"])),
        ("over K, masked", f"{summary['over_k_tokens']} tokens in a loss, {summary['masked_tokens']} masked"),
        ("tokens", f"{summary['tokens_generated']} generated, {summary['tokens_trained']} trained, {_number(summary['tokens_per_second'], 0)} a second"),
        ("busy", f"trainer {_percent(summary['trainer_busy_fraction'])}, engines {_percent(summary['engine_busy_fraction'])}"),
        (
            "weights",
            f"{summary['weights_published']} published, {summary['weight_updates']} applied{_by(summary)}, paused {_number(pause['mean'], 3)} s each",
        ),
        ("engines", ", ".join(f"{name} at {engine['version']}" for name, engine in summary["engines"].items()) or "none"),
        ("memory", f"{summary['peak_pss_bytes'] / 2**30:.2f} GiB at the peak" if summary["peak_pss_bytes"] else "not measured"),
    ]
    for name, text in rows:
        grid.add_row(name, text)
    return grid


def _by(summary: Summary) -> str:
    """By which transports, where there was more than one."""
    ways = summary["weight_updates_by_transport"]
    return f" ({', '.join(f'{count} by {way}' for way, count in ways.items())})" if len(ways) > 1 else ""


def _shares(bias: Mapping[str, Any]) -> str:
    """Trained of generated tokens, for all and for the shortest and the longest rollouts: where they differ, training sees another mix than was sampled."""
    told = [f"{_percent(bias['total']['trained_share'])} of generated tokens"]
    lengths = [(name, flow["trained_share"]) for name, flow in bias["lengths"].items() if flow["generated"]]
    if len(lengths) > 1:
        told += [f"{_percent(share)} of rollouts up to {name}" for name, share in (lengths[0], lengths[-1])]
    return ", ".join(told)


def _number(value: float | None, digits: int = 2) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{100 * value:.0f}%"
