"""Sums over audit events: what a run has done so far, and its last steps one by one. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from protocol.messages import Event

WINDOW_STEPS = 20
"""Figures called recent are over so many steps."""
_REWIND_STEPS = 4096
"""Steps that can still be taken back by a resume; older ones are only in the sums."""
_SHOWN = 12
_EVALUATIONS = 256
MAIN_SET = "main"
"""Of `eval` events that name no set."""
BY_HAND = "checkpoint"
"""The phase of evaluations of saved models: no part of a run's own figures."""
_WORTH_SHOWING = frozenset(
    {
        *("created", "attached", "checkpoint", "drained", "dead", "payload_lost", "eval"),
        *("engine_started", "engine_left", "unfit", "prepare_failed", "copy_failed"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of whole numbers, weighted: staleness in steps by tokens."""

    count: int = 0
    mean: float = 0.0
    p50: int = 0
    p99: int = 0
    max: int = 0
    histogram: Mapping[int, int] = field(default_factory=dict)


def distribution(histogram: Mapping[int, int]) -> Distribution:
    """Mean and nearest-rank percentiles.

    >>> found = distribution({0: 50, 1: 49, 7: 1})
    >>> found.mean, found.p50, found.p99, found.max
    (0.56, 0, 1, 7)
    """
    ordered = sorted((value, count) for value, count in histogram.items() if count > 0)
    total = sum(count for _, count in ordered)
    if not total:
        return Distribution()

    def at(share: float) -> int:
        seen = 0
        for value, count in ordered:
            seen += count
            if seen >= share * total:
                return value
        return ordered[-1][0]

    mean = sum(value * count for value, count in ordered) / total
    return Distribution(count=total, mean=mean, p50=at(0.5), p99=at(0.99), max=ordered[-1][0], histogram=dict(ordered))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One trained step, as its audit event tells it."""

    step: int
    incarnation: int
    at: float
    reward: float
    tokens: int
    masked: int
    staleness: Mapping[int, int]
    seconds: float
    wait_s: float


@dataclass(slots=True)
class Totals:
    """Sums over what was followed. Steps that a resume took back are taken out again."""

    steps: int = 0
    tokens: int = 0
    masked: int = 0
    reserved: int = 0
    put: int = 0
    put_bytes: int = 0
    put_tokens: int = 0
    published: int = 0
    published_bytes: int = 0
    deltas: int = 0
    """Of the versions published, those that hold only what changed."""
    applied: int = 0
    by_transport: Counter[str] = field(default_factory=Counter)
    """Of the updates that engines took, how many each transport brought."""
    pause_s: float = 0.0
    pause_max_s: float = 0.0
    released: Counter[str] = field(default_factory=Counter)
    dead: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained tokens by staleness in steps."""
    lag: Counter[int] = field(default_factory=Counter)
    """Stored tokens by publish lag in steps, judged at put."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The newest `eval` event of the run itself on its main set, which is the one that its first such event names."""
    evaluations: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVALUATIONS))
    """The newest `eval` events, oldest first, of every set and phase, each with when it was recorded (`at`)."""
    newest_evaluations: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """By phase and set."""


class Tally:
    """Feed it every event once, in order."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.steps: deque[StepPoint] = deque(maxlen=_REWIND_STEPS)
        self.events: deque[Event] = deque(maxlen=_SHOWN)
        """Last happenings worth showing to people."""

    def take(self, entry: Event) -> None:
        totals, fields = self.totals, cast("Mapping[str, Any]", entry.fields)
        match entry.op:
            case "reserved":
                totals.reserved += len(fields["slots"])
            case "put":
                totals.put += 1
                totals.put_bytes += int(fields["bytes"])
                totals.put_tokens += sum(fields["tokens"].values())
                totals.lag.update({int(lag): int(tokens) for lag, tokens in (fields.get("lag") or {}).items()})
            case "released":
                totals.released[fields["reason"]] += 1
            case "dead":
                totals.dead[fields["reason"]] += 1
            case "trained":
                self._add(_step_point(entry, fields))
            case "attached":
                self._take_back(int(fields["fork_step"]))
            case "published":
                totals.published += 1
                totals.published_bytes += int(fields.get("bytes", 0))
                totals.deltas += fields.get("kind") == "delta"
            case "applied":
                pause_s = float(fields.get("pause_s", 0.0))
                totals.applied += 1
                totals.by_transport[str(fields.get("transport") or "unknown")] += 1
                totals.pause_s += pause_s
                totals.pause_max_s = max(totals.pause_max_s, pause_s)
            case "eval":
                self._evaluated({"phase": "", "set": MAIN_SET, **fields, "at": entry.at})
        if entry.op in _WORTH_SHOWING:
            self.events.append(entry)

    def _evaluated(self, found: Mapping[str, Any]) -> None:
        totals = self.totals
        totals.evaluations.append(found)
        totals.newest_evaluations[found["phase"], found["set"]] = found
        if found["phase"] != BY_HAND and found["set"] == totals.evaluation.get("set", found["set"]):
            totals.evaluation = found

    def _add(self, point: StepPoint) -> None:
        self.steps.append(point)
        totals = self.totals
        totals.steps += 1
        totals.tokens += point.tokens
        totals.masked += point.masked
        totals.staleness.update(point.staleness)

    def _take_back(self, fork_step: int) -> None:
        """A resume goes on after `fork_step`: what was trained beyond it is trained again."""
        totals = self.totals
        while self.steps and self.steps[-1].step > fork_step:
            point = self.steps.pop()
            totals.steps -= 1
            totals.tokens -= point.tokens
            totals.masked -= point.masked
            totals.staleness.subtract(point.staleness)


def _step_point(entry: Event, fields: Mapping[str, Any]) -> StepPoint:
    stats = fields.get("stats") or {}
    return StepPoint(
        step=int(fields["step"]),
        incarnation=int(fields["incarnation"]),
        at=entry.at,
        reward=float(stats.get("reward", 0.0)),
        tokens=int(stats.get("tokens", 0)),
        masked=int(stats.get("masked", 0)),
        staleness={int(steps): int(tokens) for steps, tokens in (stats.get("staleness") or {}).items()},
        seconds=float(stats.get("seconds", 0.0)),
        wait_s=float(stats.get("wait_s", 0.0)),
    )
