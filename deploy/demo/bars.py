"""What a demo must reach, judged from its summary alone."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from deploy.summary import Summary

START_REWARD = 0.25
END_REWARD = 0.8
HELD_OUT_RISE = 0.25
LAG_P99 = 2
PEAK_BYTES = 4 << 30
REAL_ENGINE_BYTES = 3 << 30
"""What a server of SGLang adds: three processes that each import torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    wanted: str
    seen: str
    met: bool


def bars(summary: Summary, *, drill: bool = False, real_engine: bool = False) -> list[Bar]:
    """Every bar. In a drill publish lag is not judged: a killed engine comes back behind."""
    reward, heldout, engines = summary["reward"], summary["heldout"], summary["engines"]
    rise = None if heldout["first"] is None else heldout["last"] - heldout["first"]
    behind = [name for name, engine in engines.items() if not engine["at_final"]]
    went_back = sum(engine["went_back"] for engine in engines.values())
    found = [
        _at_most("sampled reward at the start", reward["first"], START_REWARD),
        _at_least("sampled reward at its best", reward["best"], END_REWARD),
        _at_least("rise of held-out exact", rise, HELD_OUT_RISE),
        _at_most("groups lost", summary["groups_lost"], 0),
        _at_most("groups duplicated", summary["groups_duplicated"], 0),
        _at_most("contradictions of witness and audit", len(summary["disagreements"]), 0),
        _at_most("tokens over K in a loss", summary["over_k_tokens"], 0),
        _at_most("steps over K by the witness", summary["steps_over_k"], 0),
        Bar(
            name="engines at the final version",
            wanted=f"all at {summary['final_version']}",
            seen=f"behind: {', '.join(behind)}" if behind else f"all {len(engines)}",
            met=bool(engines) and not behind,
        ),
        _at_most("times an engine went back", went_back, 0),
    ]
    if not drill:
        found.append(_at_most("publish lag, p99", summary["publish_lag"]["p99"], LAG_P99))
    if summary["peak_pss_bytes"] is not None:
        most = PEAK_BYTES + (REAL_ENGINE_BYTES if real_engine else 0)
        found.append(_at_most("peak memory, GiB", summary["peak_pss_bytes"] / 2**30, most / 2**30))
    return found


def bars_table(found: list[Bar]) -> Table:
    grid = Table(title="Bars", title_justify="left", show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for bar in found:
        grid.add_row("[green]met[/]" if bar.met else "[bold red]missed[/]", bar.name, bar.seen, f"[dim]wanted {bar.wanted}[/]")
    return grid


def _at_most(name: str, seen: float | None, limit: float) -> Bar:
    return Bar(name=name, wanted=f"at most {limit:g}", seen=_figure(seen), met=seen is not None and seen <= limit)


def _at_least(name: str, seen: float | None, limit: float) -> Bar:
    return Bar(name=name, wanted=f"at least {limit:g}", seen=_figure(seen), met=seen is not None and seen >= limit)


def _figure(seen: float | None) -> str:
    if seen is None:
        return "nothing to judge"
    return str(seen) if isinstance(seen, int) else f"{seen:.3f}"
