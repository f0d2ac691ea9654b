"""What became of every sampled token, by the length of its rollout and by its age: what training sees less of than was generated.

    generated ──put──► outstanding ──┬──► trained, or masked by the guard      (a step of the surviving line)
        │                            └──► dropped: stale, rewound, payload_lost, …
        └──────────────────────────────► dropped: failed, filtered

Pure: audit events in, a report out. Each token counts once, where it is now: a step that a resume takes back gives its tokens back, and they count as trained
again once the step is. Invariant: generated = trained + masked + dropped + outstanding, in tokens; what is missing is said (`unaccounted`).
Example: a group of two rollouts, 3 and 9 tokens long, is put and trained with 2 of the 9 over K: bucket 4 has 3 trained, bucket 16 has 7 trained and 2 masked.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from protocol.messages import Event
from protocol.versions import Fork, Lineage, Version

_REWIND_STEPS = 4096
"""Steps that a resume can still take back; older ones are only in the sums."""
UNKNOWN = -1
"""Length or age of tokens that nobody told: groups stored before lengths were, ages of groups that were never stored."""


def length_bucket(tokens: int) -> int:
    """The smallest power of two that is at least `tokens`, the sampled tokens of a rollout.

    >>> [length_bucket(tokens) for tokens in (0, 1, 2, 3, 4, 5, 1024, 1025)]
    [1, 1, 2, 4, 4, 8, 1024, 2048]
    """
    return 1 << max(0, tokens - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Tokens of one bucket."""

    generated: int
    trained: int
    masked: int
    """Over K: kept out of the loss by the guard."""
    dropped: Mapping[str, int]
    """By reason."""
    outstanding: int

    @property
    def trained_share(self) -> float | None:
        """Trained of generated; None: nothing was."""
        return self.trained / self.generated if self.generated else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The report. Ages are in steps behind the newest trained one: generated when stored, dropped when dropped, trained and masked in their step."""

    lengths: Mapping[int, Flow]
    """By `length_bucket`."""
    ages: Mapping[int, Flow]
    total: Flow
    dropped_groups: Mapping[str, int]
    """Releases and deaths by reason; expired slots leave no tokens that anybody could count."""

    @property
    def unaccounted(self) -> int:
        """Tokens whose end is not in the events; 0 unless a part of them is missing."""
        total = self.total
        return total.generated - total.trained - total.masked - sum(total.dropped.values()) - total.outstanding


@dataclass(slots=True, kw_only=True)
class _Counts:
    """Of one axis: bucket → tokens."""

    generated: Counter[int] = field(default_factory=Counter)
    trained: Counter[int] = field(default_factory=Counter)
    masked: Counter[int] = field(default_factory=Counter)
    dropped: dict[str, Counter[int]] = field(default_factory=dict)

    def drop(self, reason: str, tokens: Mapping[int, int]) -> None:
        self.dropped.setdefault(reason, Counter()).update(tokens)

    def flows(self, outstanding: Counter[int]) -> dict[int, Flow]:
        buckets = {*self.generated, *self.trained, *self.masked, *outstanding, *(bucket for counts in self.dropped.values() for bucket in counts)}
        flows = {bucket: self._flow(bucket, outstanding) for bucket in sorted(buckets)}
        return {bucket: flow for bucket, flow in flows.items() if flow.generated or flow.trained or flow.masked or flow.dropped or flow.outstanding}

    def _flow(self, bucket: int, outstanding: Counter[int]) -> Flow:
        return Flow(
            generated=self.generated[bucket],
            trained=self.trained[bucket],
            masked=self.masked[bucket],
            dropped={reason: counts[bucket] for reason, counts in sorted(self.dropped.items()) if counts[bucket]},
            outstanding=outstanding[bucket],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """A stored group that nothing final has happened to, as far as was seen."""

    attempt: int
    lengths: Counter[int]
    versions: Mapping[Version, int]


@dataclass(slots=True, kw_only=True)
class _Step:
    step: int
    chunks: dict[int, list[int]]
    groups: dict[int, _Group]
    """Until the oldest kept checkpoint covers the step: then nothing takes it back but an explicit abandon."""
    lengths: Counter[int]
    masked: Counter[int]
    ages: Counter[int]
    masked_ages: Counter[int]


class BiasTally:
    """Feed it every event once, in order; it holds groups that are under way and figures of each step."""

    def __init__(self) -> None:
        self._lengths = _Counts()
        self._ages = _Counts()
        self._dropped_groups: Counter[str] = Counter()
        self._live: dict[int, _Group] = {}
        self._chunks: dict[int, dict[int, list[int]]] = {}
        self._steps: deque[_Step] = deque(maxlen=_REWIND_STEPS)
        self._forks: dict[int, Fork] = {}
        self._digests: dict[int, str] = {}
        self._trained = 0

    def take(self, event: Event) -> None:
        fields = cast("Mapping[str, Any]", event.fields)
        match event.op:
            case "put":
                self._put(fields)
            case "released" | "dead":
                self._drop(fields)
            case "leased":
                self._chunks.setdefault(int(fields["step"]), {})[int(fields["chunk"])] = list(fields["seqs"])
            case "payload_lost":
                seqs = self._chunks.get(int(fields["step"]), {}).get(int(fields["chunk"]), [])
                if fields["seq"] in seqs:
                    seqs.remove(fields["seq"])
            case "trained":
                self._train(fields)
            case "reasserted":
                self._reassert(fields)
            case "attached":
                self._attach(fields)
            case "checkpoint":
                self._cover(min((int(step) for step, _ in fields["kept"]), default=0))
            case _:
                pass

    def report(self) -> Bias:
        lengths, ages = Counter[int](), Counter[int]()
        lineage = self._lineage()
        for group in self._live.values():
            lengths.update(group.lengths)
            ages.update(self._age(group, lineage))
        by_length = self._lengths.flows(lengths)
        flows = by_length.values()
        dropped: Counter[str] = Counter()
        for flow in flows:
            dropped.update(flow.dropped)
        return Bias(
            lengths=by_length,
            ages=self._ages.flows(ages),
            total=Flow(
                generated=sum(flow.generated for flow in flows),
                trained=sum(flow.trained for flow in flows),
                masked=sum(flow.masked for flow in flows),
                dropped=dict(sorted(dropped.items())),
                outstanding=sum(flow.outstanding for flow in flows),
            ),
            dropped_groups=dict(sorted(self._dropped_groups.items())),
        )

    # -- events ----------------------------------------------------------------------------------------------------------------------------------

    def _put(self, fields: Mapping[str, Any]) -> None:
        versions = {Version.parse(version): int(tokens) for version, tokens in fields["tokens"].items()}
        lengths = _by_length(fields.get("lengths"))
        if not lengths and (tokens := sum(versions.values())):
            lengths[UNKNOWN] = tokens
        self._live[int(fields["seq"])] = _Group(attempt=int(fields.get("attempt", 0)), lengths=lengths, versions=versions)
        self._lengths.generated.update(lengths)
        self._ages.generated.update({int(age): int(tokens) for age, tokens in (fields.get("lag") or {}).items()})

    def _drop(self, fields: Mapping[str, Any]) -> None:
        seq, reason = int(fields["seq"]), str(fields["reason"])
        self._dropped_groups[reason] += 1
        group = self._held(seq, fields.get("attempt", 0))
        if group is not None:
            self._lengths.drop(reason, group.lengths)
            self._ages.drop(reason, self._age(group, self._lineage()))
        elif lengths := _by_length(fields.get("lengths")):  # it was never stored
            unaged = {UNKNOWN: sum(_whole(fields.get("lengths")))}
            self._lengths.generated.update(lengths)
            self._lengths.drop(reason, lengths)
            self._ages.generated.update(unaged)
            self._ages.drop(reason, unaged)

    def _held(self, seq: int, attempt: int) -> _Group | None:
        """Takes the group out: of those under way, or, if its step is being given up, of that step, which the attachment that follows takes back."""
        for groups in (self._live, *(done.groups for done in reversed(self._steps))):
            if (group := groups.get(seq)) is not None and group.attempt == attempt:
                return groups.pop(seq)
        return None

    def _train(self, fields: Mapping[str, Any]) -> None:
        step, stats = int(fields["step"]), fields.get("stats") or {}
        known = stats.get("bias") or {"trained": {UNKNOWN: stats.get("tokens", 0)}, "masked": {UNKNOWN: stats.get("masked", 0)}}
        chunks = self._chunks.pop(step, {})
        groups = {seq: group for seqs in chunks.values() for seq in seqs if (group := self._live.pop(seq, None)) is not None}
        done = _Step(
            step=step,
            chunks=chunks,
            groups=groups,
            lengths=_histogram(known.get("trained")),
            masked=_histogram(known.get("masked")),
            ages=_histogram(stats.get("staleness")),
            masked_ages=_histogram(known.get("masked_age")),
        )
        self._steps.append(done)
        self._lengths.trained.update(done.lengths)
        self._lengths.masked.update(done.masked)
        self._ages.trained.update(done.ages)
        self._ages.masked.update(done.masked_ages)
        self._trained = step
        self._alias(step, int(fields["incarnation"]), str(fields["digest"]))

    def _reassert(self, fields: Mapping[str, Any]) -> None:
        """Rule R1: the step was trained. Where its own event is lost too, all of its tokens count as trained, at an age that nobody told."""
        step = int(fields["step"])
        if any(done.step == step for done in self._steps):
            return
        groups = {int(seq): group for seq in fields["seqs"] if (group := self._live.pop(int(seq), None)) is not None}
        lengths: Counter[int] = Counter()
        for group in groups.values():
            lengths.update(group.lengths)
        ages = Counter({UNKNOWN: sum(lengths.values())})
        self._steps.append(_Step(step=step, chunks={0: list(groups)}, groups=groups, lengths=lengths, masked=Counter(), ages=ages, masked_ages=Counter()))
        self._lengths.trained.update(lengths)
        self._ages.trained.update(ages)
        self._trained = step
        self._digests[step] = str(fields["digest"])

    def _alias(self, step: int, incarnation: int, digest: str) -> None:
        """Rule V1: a step trained again to the same weights lies on both lines."""
        fork = self._forks.get(incarnation)
        if self._digests.get(step) == digest and fork is not None and fork.parent and fork.step == step - 1:
            self._forks[incarnation] = Fork(fork.parent, step)
        elif step in self._digests:
            self._digests = {known: one for known, one in self._digests.items() if known < step}
        self._digests[step] = digest

    def _attach(self, fields: Mapping[str, Any]) -> None:
        fork = Fork(int(fields["parent"]), int(fields["fork_step"]))
        self._forks[int(fields["incarnation"])] = fork
        while self._steps and self._steps[-1].step > fork.step:
            undone = self._steps.pop()
            self._lengths.trained.subtract(undone.lengths)
            self._lengths.masked.subtract(undone.masked)
            self._ages.trained.subtract(undone.ages)
            self._ages.masked.subtract(undone.masked_ages)
            self._live.update(undone.groups)
            self._chunks[undone.step] = undone.chunks
        self._trained = fork.step

    def _cover(self, step: int) -> None:
        for done in reversed(self._steps):
            if done.step <= step:
                if not done.chunks:
                    break
                done.chunks, done.groups = {}, {}
        self._digests = {known: one for known, one in self._digests.items() if known > step}

    def _lineage(self) -> Lineage | None:
        """The line of the newest attachment; None: nobody has attached."""
        return Lineage(self._forks, max(self._forks)) if self._forks else None

    def _age(self, group: _Group, lineage: Lineage | None) -> Counter[int]:
        """Its tokens by the steps they lie behind the newest trained one."""
        if lineage is None:
            return Counter({UNKNOWN: sum(group.versions.values())})
        ages: Counter[int] = Counter()
        for version, tokens in group.versions.items():
            ages[self._trained - lineage.shared(version)] += tokens
        return ages


def read_bias(events: Iterable[Event]) -> Bias:
    """The report over all events of a run, in order."""
    tally = BiasTally()
    for event in events:
        tally.take(event)
    return tally.report()


def _whole(lengths: object) -> list[int]:
    return [int(length) for length in lengths] if isinstance(lengths, list) else []  # Lua writes an empty list as an object


def _by_length(lengths: object) -> Counter[int]:
    found: Counter[int] = Counter()
    for length in _whole(lengths):
        if length:
            found[length_bucket(length)] += length
    return found


def _histogram(counts: Mapping[Any, Any] | None) -> Counter[int]:
    return Counter({int(bucket): int(tokens) for bucket, tokens in (counts or {}).items() if tokens})
