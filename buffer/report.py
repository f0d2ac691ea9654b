"""Totals of a run, counted on the line of history that survived: what was trained and then rewound does not count, what was trained again counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from buffer.contract import LedgerStatus
from buffer.policy import Policy
from buffer.witness import WitnessLine
from protocol.messages import Event, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What happened to every group that was ever reserved."""

    groups_reserved: int
    """Distinct groups handed out."""
    groups_trained: int
    """Groups whose effect is in the final weights."""
    groups_dead: Mapping[Reason, int]
    groups_released: Mapping[Reason, int]
    """Releases, each followed by a retry; a group may count several times."""
    groups_outstanding: int
    """Reserved, neither trained nor dead: still in the buffer, or waiting for a retry."""
    groups_lost: int
    """reserved - trained - dead - outstanding, by the ledger's own count of the outstanding; 0 unless something is wrong."""
    groups_duplicated: int
    """Groups with more than one effect on the final weights; 0 unless something is wrong."""
    steps_trained: int
    tokens_trained: int
    tokens_masked: int
    max_staleness: int
    """Of any token that entered a loss, on any line."""
    steps_over_k: int
    """Steps, on any line, with a token over K (on-policy: over 0) in the loss; 0 unless the guard is `correct` or something is wrong."""
    disagreements: tuple[str, ...]
    """Where the witness file and the audit stream contradict each other."""


def totals(events: Sequence[Event], witness: Sequence[WitnessLine], status: LedgerStatus | None = None) -> RunTotals:
    """Totals by audit and witness, with the ledger's final state where it is known (without it, what is not accounted for counts as outstanding)."""
    line = surviving(witness, events)
    if status is not None:  # a trainer that died between its witness line and the ledger did a step that nobody counts
        line = [step for step in line if step.step <= status.trained]
    trained = Counter(seq for step in line for seq in step.seqs)
    reserved = {seq for one in events if one.op == "reserved" for seq, _ in cast("Any", one.fields["slots"])}
    reserved |= {seq for one in events if one.op == "reasserted" for seq in cast("Any", one.fields["seqs"])}  # the stream lost the same tail as the ledger
    dead: dict[int, Reason] = {}
    released: Counter[Reason] = Counter()
    for one in events:
        if one.op == "dead":
            dead[cast("int", one.fields["seq"])] = Reason(cast("str", one.fields["reason"]))
        elif one.op == "requeued":
            for seq in cast("Any", one.fields["seqs"]):
                dead.pop(seq, None)
        elif one.op == "released":
            released[Reason(cast("str", one.fields["reason"]))] += 1
    accounted = reserved & (trained.keys() | dead.keys())
    outstanding = status.outstanding + status.released if status is not None else len(reserved) - len(accounted)
    bound = next((Policy.recorded_bound(cast("Any", one.fields)["settings"]) for one in events if one.op == "created"), None)
    return RunTotals(
        groups_reserved=len(reserved),
        groups_trained=len(trained),
        groups_dead=Counter(dead.values()),
        groups_released=released,
        groups_outstanding=outstanding,
        groups_lost=len(reserved) - len(accounted) - outstanding,
        groups_duplicated=sum(1 for count in trained.values() if count > 1),
        steps_trained=len(line),
        tokens_trained=sum(step.tokens for step in line),
        tokens_masked=sum(step.masked for step in line),
        max_staleness=max((step.max_staleness for step in witness), default=0),
        steps_over_k=sum(1 for step in witness if bound is not None and step.max_staleness > bound),
        disagreements=_disagreements(events, witness, line, trained, reserved),
    )


def surviving(witness: Sequence[WitnessLine], events: Sequence[Event] = ()) -> list[WitnessLine]:
    """The steps that made the final weights, in order.

    Each incarnation resumed after `fork_step` of its parent, so its parent's later steps have no effect; the newest incarnation decides; one that did
    no step of its own is known from `events` only.
    """
    forks = {line.incarnation: (line.parent, line.fork_step) for line in witness}
    for one in events:
        if one.op == "attached":
            fields = cast("Any", one.fields)
            forks[fields["incarnation"]] = (fields["parent"], fields["fork_step"])
    at, limit = max(forks, default=0), float("inf")
    result: list[WitnessLine] = []
    while at in forks:
        mine = [line for line in witness if line.incarnation == at and line.step <= limit]
        result += sorted(mine, key=lambda line: line.step, reverse=True)
        parent, fork = forks[at]
        limit, at = min(limit, fork), parent
    return result[::-1]


def _disagreements(
    events: Sequence[Event], witness: Sequence[WitnessLine], line: Sequence[WitnessLine], trained: Counter[int], reserved: set[int]
) -> tuple[str, ...]:
    found = []
    chunks: dict[int, dict[int, list[int]]] = {}
    by_audit: dict[tuple[int, int], tuple[str, set[int]]] = {}
    for one in events:
        fields = cast("Any", one.fields)
        if one.op == "leased":
            chunks.setdefault(fields["step"], {})[fields["chunk"]] = list(fields["seqs"])
        elif one.op == "payload_lost":
            part = chunks.setdefault(fields["step"], {}).get(fields["chunk"], [])
            chunks[fields["step"]][fields["chunk"]] = [seq for seq in part if seq != fields["seq"]]
        elif one.op == "trained":
            seqs = {seq for part in chunks.get(fields["step"], {}).values() for seq in part}
            by_audit[fields["incarnation"], fields["step"]] = (fields["digest"], seqs)
        elif one.op == "reasserted":
            by_audit[fields["incarnation"], fields["step"]] = (fields["digest"], set(fields["seqs"]))
    by_witness = {(step.incarnation, step.step): step for step in witness}
    for (incarnation, step), (digest, seqs) in by_audit.items():
        seen = by_witness.get((incarnation, step))
        if seen is None:
            found.append(f"step {step} of incarnation {incarnation} is in the audit, not in the witness file")
        elif seen.digest != digest or set(seen.seqs) != seqs:
            found.append(f"step {step} of incarnation {incarnation}: audit and witness differ")
    newest = max((one.step for one in line), default=0)
    found += [
        f"step {one.step} of incarnation {one.incarnation} is in the witness file, not in the audit"
        for one in line
        # The last may lack its event: its trainer died between witness and ledger, and nobody went on.
        if (one.incarnation, one.step) not in by_audit and one.step != newest
    ]
    steps = [one.step for one in line]
    if steps != list(range(1, len(steps) + 1)):
        found.append(f"surviving steps are not 1 to {len(steps)} but {steps[:3]} to {steps[-3:]}")
    if unknown := sorted(trained.keys() - reserved)[:5]:
        found.append(f"groups trained but never reserved: {unknown}")
    return tuple(found)
