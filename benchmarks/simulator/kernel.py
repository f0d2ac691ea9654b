"""The virtual clock: events in order of time, processes that run until they wait, and a network between them and the server.

A process is a set of threads; a thread is a generator that yields what it waits for and is resumed with the answer:

    1.5                       resume me in 1.5 virtual seconds
    Request(name, run, …)     run it on the server, as one atomic call; the answer, or `LOST` when none came in time
    News(topics, mark, 1.0)   until one of these topics has news, or the time is over

A kill drops every thread where it waits, which is between two events: nothing of a process survives but what it wrote to the server or the disk. A frozen
process sees its events late. Everything random comes from streams named after seed, process and life, so a run is repeated exactly by its seed, and leaving a
fault out leaves the others where they were.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from protocol.errors import RollstreamError

T = TypeVar("T")
ANSWER_S = 1.0
"""A client that has no answer for so long asks again."""


class Broken(Exception):
    """An invariant does not hold."""


class Lost:
    """No answer came."""


LOST: Final = Lost()


@dataclass(frozen=True, slots=True)
class Request:
    name: str
    about: tuple[object, ...]
    """For the trace."""
    run: Callable[[Any], Any]
    once: bool = False
    """It never arrives late or again."""


@dataclass(frozen=True, slots=True)
class News:
    topics: tuple[str, ...]
    mark: tuple[int, ...]
    """`Server.mark(topics)` before the question whose answer was "not yet": news since then is not slept over."""
    timeout_s: float


Wish: TypeAlias = "float | Request | News"
Steps: TypeAlias = Generator[Wish, Any, T]


class Host(Protocol):
    """What the kernel needs of the server."""

    paused_until: float
    regressed: int
    """Every time the server falls back, its connections end: what was sent before does not arrive any more."""

    def execute(self, request: Request) -> tuple[bool, Any]: ...

    def listen(self, thread: Thread, news: News) -> None: ...


class FaultSource(Protocol):
    """What happens to a message; see `faults.Faults`."""

    def message(self, client: Process) -> tuple[str, float]: ...


class Thread:
    __slots__ = ("done", "process", "resting", "stalled_until", "steps", "ticket", "title")

    def __init__(self, process: Process, title: str, steps: Steps[None]) -> None:
        self.process, self.title, self.steps = process, title, steps
        self.ticket = 0
        """Of its present wait: a wake-up with another number comes too late."""
        self.done = False
        self.resting = False
        self.stalled_until = 0.0

    def cancel(self) -> None:
        self.done = True

    def rest(self, seconds: float) -> Steps[None]:
        """For so long, or until `wake`."""
        self.resting = True
        yield seconds
        self.resting = False

    def wake(self) -> None:
        if self.resting:
            self.process.kernel.at(0.0, self.process.kernel.resume, self, self.ticket, None)


class Process:
    """One life of one process. `name` is its place ("p0"), `life` counts how often it was started."""

    def __init__(self, kernel: Kernel, name: str, life: int) -> None:
        self.kernel, self.name, self.life = kernel, name, life
        self.random = random.Random(f"{kernel.seed}/{name}/{life}")
        self.net = random.Random(f"{kernel.seed}/net/{name}/{life}")
        self.calls = 0
        self.alive = True
        self.frozen_until = 0.0
        self.cut_until = 0.0
        """Cut off from the server until then."""
        self.trouble_until = 0.0
        """The process itself, or its own connection, was disturbed until then."""

    def spawn(self, title: str, steps: Steps[None]) -> Thread:
        thread = Thread(self, title, steps)
        self.kernel.at(0.0, self.kernel.resume, thread, 0, None)
        return thread

    def failed(self, thread: Thread, problem: RollstreamError) -> None:
        """An error that no thread of it handled ends the process, as it would a daemon."""
        raise NotImplementedError

    def ask(self, name: str, run: Callable[[Any], T], *about: object, tries: int = 60, once: bool = False) -> Steps[T]:
        """The server's answer. The same request is made again until there is one. Raises what the server raises; `GaveUp` after `tries`."""
        request = Request(name, about, run, once)
        for attempt in range(tries):
            answer = yield request
            if answer is not LOST:
                return answer  # type: ignore[no-any-return]
            yield 0.1 + 0.1 * min(attempt, 5)
        raise GaveUp(f"{self.name}: no answer to {name}")


class GaveUp(RollstreamError):
    """The server stayed away longer than this process waits."""


class Kernel:
    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        self.trace: list[tuple[float, str, str]] | None = [] if tracing else None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.server: Host
        self.faults: FaultSource

    # events ---------------------------------------------------------------------------------------------------------------------------------

    def at(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + after_s, self._count, call, args))

    def run_until(self, end: float, over: Callable[[], bool]) -> bool:
        """Events up to `end`, in order; True as soon as `over()`."""
        heap = self._heap
        while heap and heap[0][0] <= end:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
            if over():
                return True
        self.now = max(self.now, end)
        return over()

    def log(self, who: str, form: str, *about: object) -> None:
        if self.trace is not None:
            self.trace.append((self.now, who, form % about if about else form))

    # threads --------------------------------------------------------------------------------------------------------------------------------

    def resume(self, thread: Thread, ticket: int, value: Any, problem: Exception | None = None) -> None:
        process = thread.process
        if thread.ticket != ticket or thread.done or not process.alive:
            return
        asleep_until = max(process.frozen_until, thread.stalled_until)
        if asleep_until > self.now:
            self.at(asleep_until - self.now, self.resume, thread, ticket, value, problem)
            return
        thread.ticket = ticket = ticket + 1
        try:
            wish = thread.steps.send(value) if problem is None else thread.steps.throw(problem)
        except StopIteration:
            thread.done = True
            return
        except RollstreamError as failure:
            thread.done = True
            process.failed(thread, failure)
            return
        if type(wish) is float:
            self.at(wish, self.resume, thread, ticket, None)
        elif isinstance(wish, Request):
            self._send(thread, wish)
        elif isinstance(wish, News):
            self.server.listen(thread, wish)
        else:
            raise TypeError(f"{thread.title} of {process.name} yields {wish!r}")

    def _send(self, thread: Thread, request: Request) -> None:
        process = thread.process
        fate, delay_s = self.faults.message(process)
        if request.once and fate in ("late", "twice"):
            fate = ""
        latency_s = 0.001 + 0.008 * process.net.random()
        if fate:
            self.log(process.name, "%s %s: %s", request.name, request.about, fate)
        if fate == "request lost":
            self.at(ANSWER_S, self.resume, thread, thread.ticket, LOST)
            return
        if fate == "late":
            self.at(ANSWER_S, self.resume, thread, thread.ticket, LOST)
            latency_s += delay_s
        elif fate == "twice":
            self.at(latency_s + delay_s, self._arrive, thread, -1, request, "", self.server.regressed)
        self.at(latency_s, self._arrive, thread, thread.ticket, request, fate, self.server.regressed)

    def _arrive(self, thread: Thread, ticket: int, request: Request, fate: str, connection: int) -> None:
        if connection != self.server.regressed:
            if ticket >= 0:
                self.at(ANSWER_S, self.resume, thread, ticket, LOST)
            return
        paused_s = self.server.paused_until - self.now
        if paused_s > 0:  # it waits in the server's socket; the client may give up on it, and it is still executed
            if paused_s > ANSWER_S and ticket >= 0:
                self.at(ANSWER_S, self.resume, thread, ticket, LOST)
            self.at(paused_s, self._arrive, thread, ticket, request, fate, connection)
            return
        process = thread.process
        ok, value = self.server.execute(request)
        if self.trace is not None:
            self.log(process.name, "%s %s -> %s%s", request.name, request.about, _short(value), " (again)" if ticket < 0 else "")
        if ticket < 0:
            return
        if fate == "reply lost" or process.cut_until > self.now:
            self.at(ANSWER_S, self.resume, thread, ticket, LOST)
        else:
            self.at(0.001 + 0.008 * process.net.random(), self.resume, thread, ticket, *((value,) if ok else (None, value)))


def _short(value: object) -> str:
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {value!s:.90}"
    text = repr(value)
    return text if len(text) <= 140 else f"{text[:137]}..."
