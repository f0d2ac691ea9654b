"""What happened in a run, read from its audit events: the series that the summary counts and the report draws.

Pure: events in, values out. Figures of training are those of the surviving line: a step that a resume trained again counts once, as it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from buffer.policy import Policy
from deploy.tally import BY_HAND, MAIN_SET
from protocol.errors import DecodeError
from protocol.messages import Event, JsonValue
from protocol.versions import Fork, Lineage, Version

Histogram: TypeAlias = Counter[int]
"""Steps → tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. Units: seconds by the clock of Redis; rewards are means over the step's samples."""

    step: int
    incarnation: int
    at: float
    reward: float
    tokens: int
    """Tokens that entered the loss."""
    masked: int
    staleness: Histogram
    seconds: float
    train_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One pass over the rows of a held-out set, greedy."""

    at: float
    set: str
    phase: str
    reward: float
    exact: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """An engine took a version."""

    at: float
    engine_id: str
    boot: str
    """Boot nonce: another one under the same id is another engine."""
    version: Version
    pause_s: float
    transport: str = ""
    """What brought it; empty in records that do not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """What an engine said of its life when it left in good order."""

    engine_id: str
    busy_s: float
    uptime_s: float
    generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Groups in the buffer after an event."""

    at: float
    generating: int
    ready: int
    leased: int
    rewound: int
    """Leased by journalled steps that a resume has yet to train again; over and above what is admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    at: float
    tokens: int
    """Trainable tokens of the group."""


@dataclass(slots=True, kw_only=True)
class History:
    """See the module. Made by `read_history`."""

    began: float = 0.0
    """First attachment of a trainer, or the first event."""
    ended: float = 0.0
    """The last drain, or the last event."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """The run's [buffer] section."""
    steps: Sequence[Step] = ()
    """The surviving line, in order."""
    lineage: Lineage | None = None
    every_step: list[Step] = field(default_factory=list)
    """Also those that a resume trained again."""
    held_out: dict[str, list[Evaluation]] = field(default_factory=dict)
    """The run's evaluations by set, the main set first; those of saved models are no part of it."""
    applied: list[Applied] = field(default_factory=list)
    boots: dict[str, list[str]] = field(default_factory=dict)
    """Engine id → boot nonces in order."""
    uses: list[EngineUse] = field(default_factory=list)
    published: list[tuple[float, Version]] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    lag: Histogram = field(default_factory=Counter)
    """Newest trained version minus the writer's, over the tokens put."""
    depth: list[Depth] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    """Producer instances that reserved."""

    @property
    def bound(self) -> int | None:
        """Steps a trained token may be old; None: the audit does not say."""
        return Policy.recorded_bound(self.settings)

    @property
    def seconds(self) -> float:
        return max(0.0, self.ended - self.began)

    @property
    def evaluations(self) -> Sequence[Evaluation]:
        """On the main set."""
        return next(iter(self.held_out.values()), ())

    @property
    def final(self) -> Version | None:
        """The newest published version."""
        return max((version for _, version in self.published), default=None)


def read_history(events: Iterable[Event]) -> History:
    """One pass over the events in order. Events it does not know are skipped.

    Raises: `DecodeError` for an event whose fields have the wrong types.
    """
    history = History()
    ledger = _LedgerView()
    forks: dict[int, Fork] = {}
    first = last = None
    for event in events:
        fields = Fields(event.op, event.fields)
        first = event.at if first is None else first
        last = event.at
        if event.op == "attached":
            forks[fields.whole("incarnation")] = Fork(fields.whole("parent"), fields.whole("fork_step"))
            history.began = history.began or event.at
        elif event.op == "drained":
            history.ended = event.at
        if ledger.follow(event.op, fields):
            history.depth.append(ledger.depth(event.at))
        _collect(history, event, fields)
    history.began = history.began or first or 0.0
    history.ended = history.ended or last or 0.0
    if forks:
        history.lineage = Lineage(forks, max(forks))
    history.steps = _surviving(history)
    return history


def _collect(history: History, event: Event, fields: Fields) -> None:
    match event.op:
        case "created":
            history.settings = fields.mapping("settings")
        case "reserved":
            history.owners.add(fields.text("owner"))
        case "put":
            history.puts.append(Put(at=event.at, tokens=sum(fields.counts("tokens").values())))
            history.lag += Counter({int(lag): tokens for lag, tokens in fields.counts("lag").items()})
        case "trained":
            history.every_step.append(_step(event, fields))
        case "eval" if fields.text("phase") != BY_HAND:
            name, phase = fields.text("set") or MAIN_SET, fields.text("phase")
            found = Evaluation(at=event.at, set=name, phase=phase, reward=fields.number("reward"), exact=fields.number("exact"))
            history.held_out.setdefault(name, []).append(found)
        case "published":
            history.published.append((event.at, Version.parse(fields.text("version"))))
        case "engine_started":
            boots, boot = history.boots.setdefault(fields.text("engine_id"), []), fields.text("boot_nonce")
            if boot not in boots:  # one whose beats paused for too long is registered anew, and was never started again
                boots.append(boot)
        case "engine_left" if "uptime_s" in event.fields:
            use = EngineUse(
                engine_id=fields.text("engine_id"),
                busy_s=fields.number("busy_s"),
                uptime_s=fields.number("uptime_s"),
                generated_tokens=fields.whole("generated_tokens"),
            )
            history.uses.append(use)
        case "applied":
            applied = Applied(
                at=event.at,
                engine_id=fields.text("engine_id"),
                boot=fields.text("boot_nonce"),
                version=Version.parse(fields.text("version")),
                pause_s=fields.number("pause_s"),
                transport=fields.text("transport"),
            )
            history.applied.append(applied)
        case _:
            pass


def _step(event: Event, fields: Fields) -> Step:
    stats = Fields("trained.stats", fields.mapping("stats"))
    return Step(
        step=fields.whole("step"),
        incarnation=fields.whole("incarnation"),
        at=event.at,
        reward=stats.number("reward"),
        tokens=stats.whole("tokens"),
        masked=stats.whole("masked"),
        staleness=Counter({int(steps): tokens for steps, tokens in stats.counts("staleness").items()}),
        seconds=stats.number("seconds"),
        train_s=stats.number("train_s"),
    )


def _surviving(history: History) -> tuple[Step, ...]:
    if history.lineage is None:
        return ()
    limits = history.lineage.limits()
    found: dict[int, Step] = {}
    for step in history.every_step:
        if step.incarnation in limits and ((limit := limits[step.incarnation]) is None or step.step <= limit):
            found[step.step] = step
    return tuple(found[number] for number in sorted(found))


class _LedgerView:
    """Follows each group from event to event; what it counts is what the ledger held then."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._count: Counter[str] = Counter()
        self._steps: dict[int, set[int]] = {}

    def follow(self, op: str, fields: Fields) -> bool:
        """Whether the event moved a group."""
        match op:
            case "reserved":
                self._move((Fields.pair(op, slot)[0] for slot in fields.items("slots")), "generating")
            case "put":
                self._move([fields.whole("seq")], "ready")
            case "released" | "dead":
                self._move([fields.whole("seq")], op)
            case "leased":
                seqs = [int(seq) for seq in fields.items("seqs") if isinstance(seq, int)]
                self._steps.setdefault(fields.whole("step"), set()).update(seqs)
                self._move(seqs, "leased")
            case "payload_lost":
                self._steps.get(fields.whole("step"), set()).discard(fields.whole("seq"))
            case "trained":
                self._move(self._steps.get(fields.whole("step"), ()), "trained")
            case "attached":
                for step, rewound in self._steps.items():
                    self._move(rewound if step > fields.whole("fork_step") else (), "rewound")
            case _:
                return False
        return True

    def depth(self, at: float) -> Depth:
        count = self._count
        return Depth(at=at, generating=count["generating"], ready=count["ready"], leased=count["leased"], rewound=count["rewound"])

    def _move(self, seqs: Iterable[int], state: str) -> None:
        for seq in seqs:
            if (before := self._states.get(seq)) is not None:
                self._count[before] -= 1
            self._states[seq] = state
            self._count[state] += 1


class Fields:
    """Typed reading of an event's fields. A missing field is its type's zero; a field of another type raises `DecodeError`."""

    def __init__(self, op: str, values: Mapping[str, JsonValue]) -> None:
        self._op = op
        self._values = values

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return value

    def whole(self, key: str) -> int:
        return int(self.number(key))

    def text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def mapping(self, key: str) -> Mapping[str, JsonValue]:
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return value

    def counts(self, key: str) -> dict[str, int]:
        counts = {name: count for name, count in self.mapping(key).items() if isinstance(count, int)}
        if len(counts) != len(self.mapping(key)):
            raise self._wrong(key, "whole numbers", self.mapping(key))
        return counts

    def items(self, key: str) -> Sequence[JsonValue]:
        value = self._values.get(key, [])
        if isinstance(value, dict) and not value:  # how Lua writes an empty list
            return ()
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    @staticmethod
    def pair(op: str, value: JsonValue) -> tuple[int, int]:
        match value:
            case [int(first), int(second)]:
                return first, second
            case _:
                raise DecodeError(f"audit.{op}", f"got {value!r:.60}, expected a pair of whole numbers")

    def _wrong(self, key: str, expected: str, value: object) -> DecodeError:
        return DecodeError(f"audit.{self._op}.{key}", f"got {value!r:.60}, expected {expected}")
