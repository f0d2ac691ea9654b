"""From a failing seed to the fewest faults that still make it fail, and what happened then.

Faults are left out by delta debugging: halves, then quarters, … then one by one, as long as the run still breaks the same invariant. Each fault is a decision
of its own (`faults`), so the others stay where they were.
"""

from __future__ import annotations

from benchmarks.simulator.faults import NO_BIAS, Bias
from benchmarks.simulator.world import Outcome, simulate

_TRIES = 400
_QUIET = ("look", "beat", "status", "engines", "newest", "spillable", "collect", "renew", "open_step")
"""Calls that are left out of a trace unless they were refused."""


def shrink(failed: Outcome, *, without: frozenset[str] = frozenset(), bias: Bias = NO_BIAS) -> Outcome:
    """The run with the fewest faults found, with its trace."""
    kept, tries, parts, kind = list(failed.faults), 0, 2, rule_of(failed.problem)
    while kept and parts <= 2 * len(kept) and tries < _TRIES:
        size = max(1, len(kept) // parts)
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            tries += 1
            again = simulate(failed.seed, without=without, only=frozenset(fewer), bias=bias)
            if again.problem is not None and rule_of(again.problem) == kind:
                kept, parts = list(again.faults), max(2, parts - 1)
                break
        else:
            parts *= 2
    return simulate(failed.seed, without=without, only=frozenset(kept), bias=bias, tracing=True)


def rule_of(problem: str | None) -> str:
    """Which invariant, or rule, a problem is about: its first word."""
    return (problem or "").split(":", 1)[0]


def readable(outcome: Outcome, *, last: int = 60) -> list[str]:
    """The faults that are left, and the last events before the end."""
    lines = [f"seed {outcome.seed}: {outcome.problem}", "faults:"]
    lines += [f"  {fault.strip()}" for fault in outcome.faults] or ["  none"]
    lines.append("events:")
    told = [
        f"  {at:8.3f}  {who:8s} {what[:200]}" for at, who, what in outcome.trace or [] if not what.startswith(_QUIET) or "Error" in what or "Fenced" in what
    ]
    if len(told) > last:
        lines.append(f"  … {len(told) - last} before")
    return lines + told[-last:]
