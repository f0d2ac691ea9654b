"""Whether engines that hold requests of ours get on with them, so that none waits for an engine that is dead but does not say so.

    MOVING ──quiet for `progress_s`──► look: no answer ─────────────► SILENT     (stopped, or the network is gone)
       ▲                                     paused for an update ──► MOVING again from now on
       └──an event, tokens in the registry── ready ──quiet for half as long, ready again──► WEDGED

An engine moves if any request of ours there got an event, or if the registry has it generate: a request that waits behind others is no sign of a fault. A pause
is as quiet as a death, and may end just before the look; hence the second one. What has no `/ready`, such as a router, is believed while it answers anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from protocol.messages import EngineStatus

_LOOK_S = 5.0
"""A look waits for so long at most; what answers nothing at all in this time is silent."""


class Look(StrEnum):
    """What an engine answered when it was looked at."""

    NOTHING = "nothing"
    PAUSED = "paused"
    READY = "ready"
    UNTOLD = "untold"
    """It answers, and does not say which of the two it is."""


class Stall(StrEnum):
    """Why requests at an engine are given up."""

    SILENT = "silent"
    WEDGED = "wedged"


@dataclass(slots=True)
class Quiet:
    """How one engine gets on. Pure: times are handed in.

    >>> quiet = Quiet(progress_s=30.0, moved_at=0.0)
    >>> quiet.due_at, quiet.looked(Look.READY, 30.0), quiet.due_at, quiet.looked(Look.READY, 45.0)
    (30.0, None, 45.0, <Stall.WEDGED: 'wedged'>)
    """

    progress_s: float
    moved_at: float
    sees_tokens: bool = True
    """Its answers are streamed; otherwise it is quiet until one is whole, which is no sign of a fault."""
    updating: bool = False
    """It takes a version, by the registry."""
    _ready_at: float | None = None
    """Found ready, since it last moved."""

    @property
    def due_at(self) -> float:
        return self.moved_at + self.progress_s if self._ready_at is None else self._ready_at + self.progress_s / 2

    def moved(self, now: float) -> None:
        self.moved_at, self._ready_at = now, None

    def looked(self, look: Look, now: float) -> Stall | None:
        """The verdict, if there is one."""
        if look is Look.NOTHING:
            return Stall.SILENT
        if look is Look.READY and self.sees_tokens and not self.updating:
            if self._ready_at is not None:
                return Stall.WEDGED
            self._ready_at = now
        else:
            self.moved(now)
        return None


@dataclass(slots=True, eq=False)
class Held:
    """One request under way."""

    scope: asyncio.Timeout
    stall: Stall | None = None
    """Why its scope was made to end."""


@dataclass(slots=True, eq=False)
class _Engine:
    quiet: Quiet
    held: set[Held] = field(default_factory=set)


class Progress:
    """Ends the scopes of requests at engines that do not get on. Without `watch` nothing is ended.

    consumes: events, looks   produces: ended scopes   waits for: the next engine to be quiet for too long   unblocked by: time, new requests
    """

    def __init__(self, look: Callable[[str, float], Awaitable[Look]], *, progress_s: float, sees_tokens: bool) -> None:
        self._look = look
        self._progress_s = progress_s
        self._sees_tokens = sees_tokens
        self._engines: dict[str, _Engine] = {}
        self._tokens: dict[str, int] = {}
        self._began = asyncio.Event()

    @contextlib.contextmanager
    def request(self, url: str, scope: asyncio.Timeout) -> Iterator[Held]:
        """The request is under way at `url` while the context is open; `scope`, which must be entered, ends with it at a stall."""
        if (engine := self._engines.get(url)) is None:
            quiet = Quiet(progress_s=self._progress_s, moved_at=asyncio.get_running_loop().time(), sees_tokens=self._sees_tokens)
            engine = self._engines[url] = _Engine(quiet)
            self._began.set()
        held = Held(scope)
        engine.held.add(held)
        try:
            yield held
        finally:
            engine.held.discard(held)
            if not engine.held and self._engines.get(url) is engine:
                del self._engines[url]

    def moved(self, url: str) -> None:
        """A request there got something."""
        if (engine := self._engines.get(url)) is not None:
            engine.quiet.moved(asyncio.get_running_loop().time())

    def heard(self, engines: Iterable[EngineStatus]) -> None:
        """What the registry says of the engines."""
        for status in engines:
            if status.generated_tokens != self._tokens.get(status.url):
                self._tokens[status.url] = status.generated_tokens
                self.moved(status.url)
            if (engine := self._engines.get(status.url)) is not None:
                engine.quiet.updating = status.target is not None and status.target != status.version

    async def watch(self) -> None:
        """Look after every engine with requests, for ever."""
        now = asyncio.get_running_loop().time
        while True:
            self._began.clear()
            due_at = min((engine.quiet.due_at for engine in self._engines.values()), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_at):
                    await self._began.wait()
            due = [url for url, engine in self._engines.items() if engine.quiet.due_at <= now()]
            for url, look in zip(due, await asyncio.gather(*(self._look(url, min(_LOOK_S, self._progress_s)) for url in due)), strict=True):
                self._judge(url, look, now())

    def _judge(self, url: str, look: Look, now: float) -> None:
        engine = self._engines.get(url)
        if engine is None or engine.quiet.due_at > now or (stall := engine.quiet.looked(look, now)) is None:
            return
        for held in engine.held:
            if not held.scope.expired():
                held.stall = stall
                held.scope.reschedule(now)
        del self._engines[url]


async def look_at(session: aiohttp.ClientSession, url: str, headers: dict[str, str], deadline_s: float) -> Look:
    """Whether the engine at `url` answers, and as what."""
    try:
        async with session.get(f"{url}/ready", headers=headers, timeout=aiohttp.ClientTimeout(total=deadline_s)) as reply:
            await reply.read()
    except (TimeoutError, aiohttp.ClientError, OSError):
        return Look.NOTHING
    return {200: Look.READY, 503: Look.PAUSED}.get(reply.status, Look.UNTOLD)
