"""The server: the real pure ledger and a model of the weight channel, behind a door that lets one call in at a time.

It has a clock of its own (`skew_s`), may be paused, loses payloads that nobody persisted in time, and may fall back to an older state of itself. After every
call the invariants of the ledger are checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from benchmarks.simulator.channel import Channel
from benchmarks.simulator.kernel import Broken, Kernel, News, Process, Request, Thread
from buffer.ledger import PureLedger
from buffer.ledger_state import State, payload_name
from protocol.errors import RollstreamError
from protocol.messages import GroupHeader, GroupState, Reason, Seq

TOPICS = ("slot", "ready", "run", "weights", "engines")
PAYLOAD_TTL_S = 4.0
_EPOCH_MS = 1_000_000
_CHECK_EVERY = 16
LEDGER = frozenset(
    ["status", "reserve", "renew", "bind", "set", "put", "persist", "release", "attach", "open_step", "lease", "payload_lost", "trained", "checkpoint"]
) | {"drain", "reassert", "spilled"}
"""Calls that may change the ledger."""


class Server:
    """One Redis."""

    def __init__(self, kernel: Kernel, pure: PureLedger, keeps: frozenset[str], *, waits: bool) -> None:
        self.kernel, self.pure, self.keeps = kernel, pure, keeps
        self.channel = Channel(keeps)
        self.waits = waits
        """What is durable is so when it is answered."""
        self.skew_s = 0.0
        self.paused_until = 0.0
        self._pauses: list[tuple[float, float]] = []
        self.regressed = 0
        """How often acknowledged writes were lost."""
        self.fell_at = -1e9
        self.drop_news: Callable[[Process], bool] = lambda _process: False
        self.after_call: Callable[[], None] = lambda: None
        """Called after every call that ran."""
        self.expired: Callable[[Seq], None] = lambda _seq: None
        self._calls = 0
        self._counts = _counts(pure.state)
        self._news = dict.fromkeys(TOPICS, 0)
        self._listeners: dict[str, list[tuple[Thread, int]]] = {topic: [] for topic in TOPICS}
        self._snapshot: tuple[Any, Channel] | None = None

    @property
    def now_ms(self) -> int:
        return _EPOCH_MS + int((self.kernel.now + self.skew_s) * 1000)

    def pause(self, seconds: float) -> None:
        """It answers nobody for so long."""
        now = self.kernel.now
        self._pauses.append((max(now, self.paused_until), max(now + seconds, self.paused_until)))
        self.paused_until = self._pauses[-1][1]

    def answered_s(self, since: float) -> float:
        """Of the time since then, how long it answered."""
        now = self.kernel.now
        return now - since - sum(max(0.0, min(until, now) - max(begin, since)) for begin, until in self._pauses)

    # calls ----------------------------------------------------------------------------------------------------------------------------------

    def execute(self, request: Request) -> tuple[bool, Any]:
        """One atomic call. Raises: `Broken` when an invariant does not hold after it, whatever it answered."""
        ledger = request.name in LEDGER
        if ledger:
            self.pure.state.routable = self.channel.routes(self.now_ms)
            waiting = list(self.pure.state.generating)
        try:
            result: tuple[bool, Any] = True, request.run(self)
        except RollstreamError as problem:
            result = False, problem
        except (KeyError, AssertionError, IndexError, ValueError, TypeError) as problem:
            raise Broken(f"{request.name} {request.about} fails with {type(problem).__name__}: {problem}") from problem
        if ledger:
            self._check(request, waiting)
        self.after_call()
        return result

    def _check(self, request: Request, waiting: list[Seq]) -> None:
        """Invariants, whenever the call changed a count, and every so often besides; and news for whoever waits for what became free."""
        state = self.pure.state
        self._calls += 1
        before, self._counts = self._counts, _counts(state)
        if before == self._counts and self._calls % _CHECK_EVERY:
            return
        outstanding, used, ready, expired, *_ = self._counts
        if outstanding < before[0] or used < before[1]:
            self.publish("slot")
        if ready > before[2]:
            self.publish("ready")
        if wrong := self.pure.violations():
            raise Broken(f"after {request.name} {request.about}: {'; '.join(wrong)}")
        if expired > before[3]:
            for seq in waiting:
                group = state.groups.get(seq)
                if group is not None and group.state is GroupState.RELEASED and group.reason is Reason.EXPIRED:
                    self.expired(seq)

    # payloads -------------------------------------------------------------------------------------------------------------------------------

    def set_payload(self, header: GroupHeader, payload: bytes) -> None:
        self.pure.set_payload(header, payload)
        self.kernel.at(PAYLOAD_TTL_S, self._expire, payload_name(header.seq, header.attempt, header.token))

    def persist(self, header: GroupHeader) -> None:
        self.pure.state.unpersisted.discard(payload_name(header.seq, header.attempt, header.token))

    def _expire(self, name: str) -> None:
        state = self.pure.state
        if name in state.unpersisted:
            state.unpersisted.discard(name)
            if state.payloads.pop(name, None) is not None:
                self.kernel.log("redis", "payload %s expires", name)

    # news -----------------------------------------------------------------------------------------------------------------------------------

    def mark(self, topics: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._news[topic] for topic in topics)

    def publish(self, topic: str) -> None:
        self._news[topic] += 1
        listeners, self._listeners[topic] = self._listeners[topic], []
        for thread, ticket in listeners:
            process = thread.process
            if process.alive and process.cut_until <= self.kernel.now and not self.drop_news(process):
                self.kernel.at(0.001 + 0.005 * process.net.random(), self.kernel.resume, thread, ticket, None)

    def listen(self, thread: Thread, news: News) -> None:
        if self.mark(news.topics) != news.mark:
            self.kernel.at(0.002, self.kernel.resume, thread, thread.ticket, None)
            return
        for topic in news.topics:
            self._listeners[topic].append((thread, thread.ticket))
        self.kernel.at(news.timeout_s, self.kernel.resume, thread, thread.ticket, None)

    # losing writes --------------------------------------------------------------------------------------------------------------------------

    def keep_copy(self) -> None:
        """What a failover a little later would fall back to."""
        state = self.pure.state
        shared: dict[int, Any] = {id(one): one for one in (state.identity, state.settings, state.rules)}
        for group in state.groups.values():
            if group.header is not None:
                shared[id(group.header)] = group.header
        self._snapshot = copy.deepcopy((state, self.channel), shared)

    def durable(self) -> None:
        """The answer waits until a replica, or the disk, has everything up to here (WAIT, WAITAOF): nothing older can come back."""
        if self._snapshot is not None and self.waits:
            self.keep_copy()

    def fall_back(self) -> bool:
        """Acknowledged writes are lost. False if no older state is at hand."""
        if self._snapshot is None:
            return False
        (self.pure.state, self.channel), self._snapshot = self._snapshot, None
        self.regressed += 1
        self.fell_at = self.kernel.now
        for topic in TOPICS:
            self.publish(topic)
        return True


def _counts(state: State) -> tuple[int, ...]:
    """Whatever changes when anything of consequence does; the first four are looked at one by one."""
    return (
        state.outstanding,
        state.bytes_used,
        len(state.ready),
        state.releases[Reason.EXPIRED],
        sum(state.releases.values()),
        len(state.generating),
        state.leased,
        state.trained_groups,
        state.trained_bytes,
        state.next_seq,
        state.low_seq,
        len(state.retry),
        len(state.payloads),
        len(state.chunks),
        sum(state.dead.values()),
        state.incarnation,
        state.dropped,
        state.spilled,
    )
