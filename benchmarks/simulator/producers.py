"""A producer: intake, heartbeat, a view of the engines in the real `producer.routing.Routing`, and one thread a group.

reserve ─► [bind] ─► samples on engines ─► SET payload ─► put
                          └── failed, filtered ─► release
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from benchmarks.simulator.engines import EngineHost, mark_unfit
from benchmarks.simulator.kernel import News, Process, Steps, Thread
from benchmarks.simulator.scenario import MAX_BYTES
from benchmarks.simulator.weights import Weights
from buffer.contract import Blocked, LedgerStatus, RunState, Slot
from producer.routing import Engine, EngineKey, Routing
from protocol.codec import digest
from protocol.errors import DecodeError, PayloadTooLarge, RollstreamError, RunEnded, SlotLost
from protocol.messages import Edge, GroupHeader, Reason, Seq, SlotToken
from protocol.versions import Lineage, Version

if TYPE_CHECKING:
    from benchmarks.simulator.world import World

_RECHECK_S = 1.0
_SAMPLE_TRIES = 4


class NumberRouting(Routing):
    """Without the rule that engines are compared by lineage."""

    def seen(self, engines: object, lineage: Lineage) -> None:
        super().seen(engines, lineage)  # type: ignore[arg-type]
        self._place = {key: engine.version.n for key, engine in self._engines.items()}


class Producer(Process):
    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world.kernel, name, life)
        self.world = world
        self.owner = f"{name}.{life}"
        self.held: dict[Seq, SlotToken] = {}
        self.storing: set[Seq] = set()
        self.ever: dict[Seq, SlotToken] = {}
        self.groups: dict[Seq, Thread] = {}
        self.waiting_for: Edge | None = None
        self.routing = Routing() if "lineage_compare" in world.keeps else NumberRouting()
        self.closing = False
        self._requests = 0
        self._changed = 0
        self._intake_thread = self.spawn("intake", self._intake())
        self.spawn("heartbeat", self._heartbeat())
        self.spawn("engines", self._watch())

    def failed(self, thread: Thread, problem: RollstreamError) -> None:
        self.world.kernel.log(self.name, "%s ends it: %s", thread.title, problem)
        self.world.died(self)

    def status(self) -> Steps[LedgerStatus]:
        server = self.world.server
        return (yield from self.ask("status", lambda _: server.pure.status(server.now_ms)))

    # slots ----------------------------------------------------------------------------------------------------------------------------------

    def _intake(self) -> Steps[None]:
        server, scenario, keeps = self.world.server, self.world.scenario, self.world.keeps
        request, topics = "", ("slot", "run")
        while not self.closing:
            free = scenario.inflight - len(self.groups)
            if free < 1:
                yield from self._intake_thread.rest(_RECHECK_S)
                continue
            mark = server.mark(topics)
            while True:  # the same request until it is answered
                if not request or "request_id_reused" not in keeps:
                    self._requests += 1
                    request = f"{self.owner}/{self._requests}"
                if (answer := (yield from self._reserve(request, free))) is not None:
                    break
            if isinstance(answer, Blocked):
                self.waiting_for = answer.edge
                yield News(topics, mark, _RECHECK_S)
                continue
            request, self.waiting_for = "", None
            if self.world.mischief.springs(self, "granted"):
                yield 0.001
            for slot in answer:
                if (stale := self.groups.pop(slot.seq, None)) is not None:
                    stale.cancel()
                self.held[slot.seq] = self.ever[slot.seq] = slot.token
                self.groups[slot.seq] = self.spawn(f"group {slot.seq}", self._group(slot))
        yield from self._leave()

    def _reserve(self, request: str, free: int) -> Steps[tuple[Slot, ...] | Blocked | None]:
        """None: no answer, ask again."""
        server = self.world.server

        def reserve(_: object) -> object:
            return server.pure.reserve(server.now_ms, self.owner, request, free, max_bytes=MAX_BYTES)

        try:
            answer = yield from self.ask("reserve", reserve, request, free, tries=1)
        except RunEnded:
            self.closing = True
            return ()
        except RollstreamError as problem:
            if type(problem).__name__ != "GaveUp":
                raise
            yield 0.2
            return None
        return answer if isinstance(answer, Blocked) else answer.slots  # type: ignore[attr-defined]

    def _leave(self) -> Steps[None]:
        """The end of the run: what is under way stops, slots go back, the process ends."""
        for thread in self.groups.values():
            thread.cancel()
        self.groups.clear()
        for seq, token in list(self.held.items()):
            yield from self._release(seq, token, Reason.GIVEN_BACK)
        self.world.left(self)

    def _heartbeat(self) -> Steps[None]:
        server, every_s = self.world.server, self.world.scenario.settings.slot_seconds / 4
        while True:
            yield every_s
            held = self.held if "names_what_it_holds" in self.world.keeps else self.ever
            named = list(held.items())
            if not named:
                continue
            lost = yield from self.ask("renew", lambda _, named=named: server.pure.renew(server.now_ms, self.owner, named), len(named))  # type: ignore[misc]
            tokens = dict(named)
            for seq in lost:
                if self.held.get(seq) == tokens[seq]:
                    del self.held[seq]
                    thread = self.groups.get(seq)
                    if thread is not None and seq not in self.storing:
                        thread.cancel()
                        del self.groups[seq]
                        self._intake_thread.wake()

    def _release(self, seq: Seq, token: SlotToken, reason: Reason) -> Steps[None]:
        with contextlib.suppress(SlotLost):
            yield from self.ask("release", lambda _: self.world.server.pure.release(seq, token, reason), seq, reason.value)
        self._forget(seq, token)

    def _forget(self, seq: Seq, token: SlotToken) -> None:
        if self.held.get(seq) == token:
            del self.held[seq]

    # engines --------------------------------------------------------------------------------------------------------------------------------

    def _watch(self) -> Steps[None]:
        server, topics = self.world.server, ("engines", "run")
        while True:
            mark = server.mark(topics)
            routable = yield from self.ask("engines", lambda _: server.channel.routable(server.now_ms))
            yield from self._refresh(routable)
            yield News(topics, mark, _RECHECK_S)

    def _refresh(self, routable: dict[str, tuple[str, Version]] | None = None) -> Steps[None]:
        server = self.world.server
        if routable is None:
            routable = yield from self.ask("engines", lambda _: server.channel.routable(server.now_ms))
        status = yield from self.status()
        if status.state is RunState.DRAINING:
            self.closing = True
        self.routing.trained = status.trained
        self.routing.seen([Engine(key=(name, boot), url=name, version=version) for name, (boot, version) in routable.items()], status.lineage)
        self._changed += 1

    # one group ------------------------------------------------------------------------------------------------------------------------------

    def _group(self, slot: Slot) -> Steps[None]:
        world, scenario = self.world, self.world.scenario
        prompt = slot.prompt_id or f"row-{slot.seq}"
        try:
            if scenario.binds and slot.prompt_id is None:
                choice = f"row-{slot.seq}-{self.owner}"
                prompt = yield from self.ask("bind", lambda _: world.server.pure.bind(slot.seq, slot.token, choice), slot.seq)
            if scenario.binds:
                world.watch.bound(slot.seq, prompt)
            spans = yield from self._sample(slot)
            self.storing.add(slot.seq)
            if spans is None or self.random.random() < scenario.fail_rate:
                yield from self._release(slot.seq, slot.token, Reason.FAILED)
            elif self.random.random() < scenario.filter_rate:
                yield from self._release(slot.seq, slot.token, Reason.FILTERED)
            else:
                yield from self._put(slot, prompt, spans)
        except SlotLost:
            self._forget(slot.seq, slot.token)
        self.storing.discard(slot.seq)
        self.groups.pop(slot.seq, None)
        self._intake_thread.wake()

    def _sample(self, slot: Slot) -> Steps[list[tuple[Version, Weights, int]] | None]:
        """Spans of one rollout; None: it failed on too many engines."""
        scenario = self.world.scenario
        mu = math.log(scenario.mean_s) - scenario.sigma**2 / 2
        length_s = min(20.0, math.exp(self.random.gauss(mu, scenario.sigma)))
        avoid: set[EngineKey] = set()
        tries = 0
        while tries < _SAMPLE_TRIES:
            engine = self.routing.choose(slot.min_version, avoid=avoid, now=self.kernel.now)
            if engine is None:
                seen = self._changed
                for _ in range(10):
                    yield 0.1
                    if self._changed != seen:
                        break
                continue
            self.world.watch.sends(self, engine.id, engine.version)
            self.routing.started(engine.key)
            host = self.world.host(engine.key)
            if host is None:
                yield 0.02
                self.routing.refused(engine.key, now=self.kernel.now)
                avoid.add(engine.key)
                tries += engine.key not in avoid
                continue
            spans = yield from self._decode(host, length_s)
            self.routing.finished(engine.key, answered=spans is not None)
            if spans is None:
                yield 0.05
                continue
            if not (yield from self._believe(engine, spans)):
                avoid.add(engine.key)
                tries += 1
                continue
            self.world.judge.sampled(engine.id, spans)
            return spans  # type: ignore[return-value]
        return None

    def _decode(self, host: EngineHost, length_s: float) -> Steps[list[tuple[Version | None, Weights, int]] | None]:
        """None: the engine, or everything on it, is gone."""
        engine = host.engine
        yield 0.003
        generation, start = engine.generation, engine.progress(self.kernel.now)
        engine.running += 1
        self.world.watch.arrives(host)
        while True:
            left = start + length_s - engine.progress(self.kernel.now)
            if left <= 1e-9:
                break
            yield max(left, 0.01) if not engine.paused else 0.03
            if not host.alive or engine.generation != generation:
                engine.running -= 1
                return None
        engine.running -= 1
        return engine.written(start, start + length_s, tokens=max(2, int(length_s * 100)))

    def _believe(self, engine: Engine, spans: list[tuple[Version | None, Weights, int]]) -> Steps[bool]:
        """Rule W3: an answer that contradicts the registry is not taken, and takes its engine off the routes."""
        labels = {label for label, _, _ in spans}
        if "answers_outrank" not in self.world.keeps:
            for at, (label, weights, tokens) in enumerate(spans):
                spans[at] = (label if label is not None else engine.version, weights, tokens)
            return True
        fine = all(label is not None and label >= engine.version for label in labels)
        if fine and not all(label is not None and self.routing.knows(label) for label in labels):
            yield from self._refresh()
            fine = all(label is not None and self.routing.knows(label) for label in labels)
        if not fine:
            self.world.watch.doubted(engine.id, labels, engine.version)
            self.routing.unfit(engine.key)
            yield from mark_unfit(self, self.world, *engine.key)
        return fine

    def _put(self, slot: Slot, prompt: str, spans: list[tuple[Version, Weights, int]]) -> Steps[None]:
        world, pure = self.world, self.world.server.pure
        trainable: dict[Version, int] = {}
        for label, _, tokens in spans:
            trainable[label] = trainable.get(label, 0) + tokens
        text = f"{slot.seq}:{slot.attempt}:{slot.token}:{self.random.getrandbits(32):x}".encode()
        payload = text.ljust(self.random.randint(len(text), MAX_BYTES), b".")
        header = GroupHeader(
            seq=slot.seq,
            attempt=slot.attempt,
            token=slot.token,
            prompt_id=prompt,
            producer_id=self.owner,
            group_size=1,
            lengths=(sum(trainable.values()),),
            trainable=trainable,
            oldest=min(trainable),
            rewards=(0.5,),
            payload_bytes=len(payload),
            payload_digest=digest(payload),
        )
        world.judge.put(header, spans)
        try:
            while True:
                yield from self.ask("set", lambda _: world.server.set_payload(header, payload), slot.seq)
                if world.mischief.springs(self, "set"):
                    yield 0.001
                stored = yield from self.ask("put", lambda _: pure.put(header), slot.seq, slot.attempt, _versions(trainable))
                if stored is not None:
                    break
            if world.mischief.springs(self, "put"):
                yield 0.001
            if "persist_in_put" not in world.keeps:
                yield from self.ask("persist", lambda _: world.server.persist(header), slot.seq)
        except (PayloadTooLarge, DecodeError) as problem:
            world.watch.refused(problem)
            yield from self._release(slot.seq, slot.token, Reason.FAILED)
        self._forget(slot.seq, slot.token)


def _versions(trainable: dict[Version, int]) -> str:
    return " ".join(f"{version}x{tokens}" for version, tokens in trainable.items())
