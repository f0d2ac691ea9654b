"""An engine, and the host process that owns it: its heartbeat, and its reconciler around the real `weightsync.reconcile.Core`.

The engine decodes while it is not paused. What it has decoded is measured on a clock of its own, so an update in the middle of a sample gives that sample
tokens of two versions, as in-place updates do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from benchmarks.simulator.channel import Channel
from benchmarks.simulator.kernel import News, Process, Steps, Thread
from benchmarks.simulator.weights import START, Weights
from protocol.errors import RollstreamError
from protocol.messages import EngineState
from protocol.versions import Version
from weightsync.reconcile import Apply, Core, Pause, Prepare, Sight, Wait

if TYPE_CHECKING:
    from benchmarks.simulator.world import World

T = TypeVar("T")
_BEAT_S = 2.0
_RECHECK_S = 1.0
_APPLY_DEADLINE_S = 3.0
PAUSE_VALID_S = 6.0
_LET_GO_S = 1.0
"""What letting an engine go takes at most."""


class Loading:
    """One update call of a reconciler."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.done = False


class TrustingCore(Core):
    """Without the rule that a failure leaves nothing known."""

    def apply_failed(self, now: float) -> None:
        serving = self.serving
        super().apply_failed(now)
        self.serving, self._sight = serving, Sight(newest=self._sight.newest, state=EngineState.ROUTABLE)


class BackwardCore(Core):
    """Without the rule that an engine never goes back."""

    def seen(self, sight: Sight) -> None:
        self._floor = None
        super().seen(sight)


class Engine:
    """The part that computes. It lives as long as its host process, or less: it may be restarted under it, with its starting weights."""

    def __init__(self, now: float) -> None:
        self.label: Version | None = None
        """What it says it serves; None: the boot nonce."""
        self.weights: Weights = START
        self.paused = False
        self.loading: Loading | None = None
        """The update call under way."""
        self.running = 0
        self.restarts = 0
        self.generation = 0
        """Grows when everything it was decoding is lost."""
        self.history: list[tuple[float, Version | None, Weights]] = [(0.0, None, START)]
        self._progress = 0.0
        self._since = now

    def progress(self, now: float) -> float:
        """Seconds decoded."""
        return self._progress if self.paused else self._progress + now - self._since

    def pause(self, now: float) -> None:
        self._progress, self.paused = self.progress(now), True

    def resume(self, now: float) -> None:
        if self.paused:
            self._since, self.paused = now, False

    def load(self, now: float, label: Version, weights: Weights) -> None:
        self.label, self.weights = label, weights
        self.history.append((self.progress(now), label, weights))

    def abort(self) -> None:
        self.generation += 1

    def restart(self, now: float) -> None:
        """It comes up again with the weights that it starts with."""
        self.generation += 1
        self.restarts += 1
        self._progress = self.progress(now)
        self.paused, self._since, self.loading = False, now, None
        self.label, self.weights = None, START
        self.history = [(self._progress, None, START)]

    def written(self, start: float, end: float, tokens: int) -> list[tuple[Version | None, Weights, int]]:
        """Who wrote the tokens of a sample that was decoded from `start` to `end`."""
        spans: list[tuple[Version | None, Weights, int]] = []
        until = end
        for begin, label, weights in reversed(self.history):
            if begin < until or not spans:
                share = (until - max(start, begin)) / max(end - start, 1e-9)
                spans.append((label, weights, max(1, round(tokens * share))))
                until = min(until, begin)
            if begin <= start:
                break
        spans.reverse()
        return spans


class EngineHost(Process):
    """Owns one engine. Ends with it."""

    def __init__(self, world: World, name: str, life: int) -> None:
        super().__init__(world.kernel, name, life)
        self.world = world
        self.boot = f"boot:{name}.{life}"
        self.engine = Engine(world.kernel.now)
        self.spawn("beat", self._beat())
        self.acked: Version | None = None
        self.reconcilers: list[Reconciler] = []
        self._add_reconciler()

    def failed(self, thread: Thread, problem: RollstreamError) -> None:
        self.kernel.log(self.name, "%s ends it: %s", thread.title, problem)
        self.world.died(self)

    def stall(self, reconciler: Reconciler, seconds: float) -> None:
        """It hangs for a while, and another is started for the same engine."""
        reconciler.thread.stalled_until = self.kernel.now + seconds
        self._add_reconciler()

    def _add_reconciler(self) -> None:
        self.reconcilers.append(Reconciler(self, f"{len(self.reconcilers)}"))

    def _beat(self) -> Steps[None]:
        server = self.world.server

        def beat(_: object) -> None:
            if server.channel.beat(server.now_ms, self.name, self.boot):
                server.publish("weights")
                server.publish("engines")

        while True:
            yield from self.ask("beat", beat, self.name)
            yield _BEAT_S


class Reconciler:
    """The edge around the core, as `weightsync.reconciler` has it."""

    def __init__(self, host: EngineHost, owner: str) -> None:
        self.host, self.world, self.engine = host, host.world, host.engine
        self.who = (host.name, host.boot, f"{owner}:{host.boot}")
        core = Core if "unknown_after_failure" in host.world.keeps else TrustingCore
        self.core = (core if "version_floor" in host.world.keeps else BackwardCore)()
        self.thread = host.spawn("reconciler", self.run())
        self._mine = False
        self._holds_pause = False
        self._idle = False
        self._asked_at = 0.0
        """When the pause was asked for: the lock is valid from then."""

    @property
    def now(self) -> float:
        return self.host.kernel.now

    def _ask(self, name: str, run: Callable[[Channel, int], T], *about: object, once: bool = False) -> Steps[T]:
        server = self.world.server
        return (yield from self.host.ask(name, lambda _: run(server.channel, server.now_ms), self.host.name, *about, once=once))

    def run(self) -> Steps[None]:
        server = self.world.server
        while True:
            mark, mark_pause = server.mark(("weights",)), server.mark(("weights", "engines"))
            seen = yield from self._ask("look", lambda channel, now: channel.look(now, *self.who))
            if seen.locked_ms:
                self._mine = False
                self.core.lost()
                yield News(("weights",), mark, min(seen.locked_ms / 1000, _RECHECK_S))
                continue
            if not self._mine and seen.state is not None:
                yield from self._take_over(seen.state)
                continue
            self.core.seen(Sight(seen.newest, seen.state, seen.acked if "acks_again" in self.world.keeps else None))
            wait = yield from self._work()
            timeout_s = _RECHECK_S if wait.until is None else min(_RECHECK_S, max(0.01, wait.until - self.now))
            yield News(("weights", "engines"), mark_pause, timeout_s) if wait.for_pause else News(("weights",), mark, timeout_s)

    def _take_over(self, state: EngineState) -> Steps[None]:
        if "take_over" not in self.world.keeps:
            self.core.serving = self.world.server.channel.newest if state is EngineState.ROUTABLE else None
        elif state is EngineState.ROUTABLE:
            yield from mark_unfit(self.host, self.world, self.host.name, self.host.boot)
        self._mine = True

    def _work(self) -> Steps[Wait]:
        while True:
            command = self.core.next(self.now)
            match command:
                case Wait():
                    return command
                case Prepare(version):
                    yield 0.01 * self.host.random.random()
                    if version in self.world.disk.published:
                        self.core.prepared(version)
                    else:
                        self.core.prepare_failed(self.now)
                case Pause(version):
                    yield from self._pause(version)
                case Apply(version):
                    yield from self._apply(version)

    def _pause(self, version: Version) -> Steps[None]:
        self._idle = idle = self.engine.running == 0
        most, self._asked_at = self.world.scenario.max_paused, self.now
        granted = yield from self._ask(
            "pause", lambda channel, now: channel.pause(now, *self.who, version, most=most, valid_ms=int(PAUSE_VALID_S * 1000), idle=idle), str(version), idle
        )
        if granted:
            self._holds_pause = True
            self.core.granted()
        else:
            self.core.refused()

    def _give_pause(self) -> Steps[None]:
        def resumed(channel: Channel, _now: int) -> None:
            channel.resumed(*self.who)
            self.world.server.publish("engines")

        if self._holds_pause:
            self._holds_pause = False
            yield from self._ask("resumed", resumed, once=True)  # coming again later, it, or an ack, would give up the next pause

    def _apply(self, version: Version) -> Steps[None]:
        world, engine, began = self.world, self.engine, self._asked_at
        weights = world.disk.published.get(version)
        if weights is None:
            yield from self._give_pause()
            self.core.prepare_failed(self.now)
            return
        if self.now - began >= _APPLY_DEADLINE_S and "pause_in_time" in world.keeps:
            yield from self._give_pause()
            self.core.lapsed()
            return
        engine.pause(self.now)
        world.watch.paused(self.host, until=began + PAUSE_VALID_S, was_idle=self._idle)
        world.mischief.springs_reconciler(self, "paused")
        yield 0.002
        loading = Loading(self.who[2])
        load_s = world.scenario.apply_s * (0.5 + self.host.random.random())
        if self.now - began < _APPLY_DEADLINE_S:  # the call is not made when its time is over
            engine.loading = loading
            self.host.kernel.at(load_s, self._load, loading, engine.restarts, version, weights)
            yield load_s + 0.001
            world.mischief.springs_reconciler(self, "loaded")
            yield 0.001
        took = loading.done and self.now - began < _APPLY_DEADLINE_S
        if not took:
            yield from mark_unfit(self.host, world, self.host.name, self.host.boot)
            if not (yield from self._still_mine(began)):
                self.core.apply_failed(self.now)
                return
            engine.abort()  # what would go on over weights that nobody vouches for
        world.watch.let_go(self.host, self.who[2])
        engine.resume(self.now)
        if not took:
            self.core.apply_failed(self.now)
            yield from self._give_pause()
            return
        yield from self._give_pause()
        yield 0.002
        if engine.label != version:  # the probe tells something else
            self.core.apply_failed(self.now)
            yield from mark_unfit(self.host, world, self.host.name, self.host.boot)
            return
        yield from self._acked(version)

    def _still_mine(self, began: float) -> Steps[bool]:
        """Whether the engine may be told to go on: for so long that the lock may have run out, by asking."""
        if self.now - began < PAUSE_VALID_S - _LET_GO_S or "lets_go_its_own" not in self.world.keeps:
            return True
        return (yield from self._ask("renew", lambda channel, now: channel.renew(now, *self.who)))

    def _load(self, loading: Loading, restarts: int, version: Version, weights: Weights) -> None:
        """The engine's own work; it ends whatever became of who asked for it."""
        world, engine = self.world, self.engine
        if engine.loading is loading:
            engine.loading = None
        if engine.restarts != restarts or not self.host.alive or world.faults.chance(self.host, "apply fails", 0.03):
            return
        if version not in world.disk.published:
            world.watch.deleted(self.host, version)
            return
        engine.load(self.now, version, weights)
        loading.done = True
        self.host.kernel.log(self.host.name, "loads %s (%s)", version, weights.digest)
        world.watch.loaded(self.host, version)

    def _acked(self, version: Version) -> Steps[None]:
        server = self.world.server

        def ack(channel: Channel, now: int) -> bool:
            acked = channel.ack(now, *self.who, version)
            if acked:
                server.publish("engines")
                server.publish("slot")
            return acked

        if (yield from self._ask("ack", ack, str(version), once=True)):
            self.core.applied(version, self.now)
            self.host.acked = version
        else:
            self.core.apply_failed(self.now)


def mark_unfit(process: Process, world: World, engine: str, boot: str) -> Steps[None]:
    """Take an engine off the routes, whoever finds out."""

    def unfit(_: object) -> None:
        if world.server.channel.mark_unfit(engine, boot):
            world.server.publish("engines")
            world.server.publish("weights")

    yield from process.ask("unfit", unfit, engine)
