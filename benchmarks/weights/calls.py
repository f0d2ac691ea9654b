"""The HTTP calls that a reconciler makes to its engine, timed where they leave and return: the engine's own share of a pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp

_UPDATE, _END = "/update_weights_from_", "/end_weight_update"
_PAUSE, _CONTINUE = "/pause_generation", "/continue_generation"


@dataclass(frozen=True, slots=True)
class Call:
    """One call, `time.monotonic()` at both ends."""

    path: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """From asking for the pause to the answer that the engine goes on."""

    began: float
    ended: float
    loading_s: float
    """With a call under way by which the engine takes bytes, or puts in service what it took."""
    updates: int
    """Update calls."""
    control_s: float
    """Pausing and continuing themselves."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(slots=True)
class Calls:
    """Give `trace()` to the session of one engine's control; every call is noted under the engine's address."""

    seen: dict[str, list[Call]] = field(default_factory=dict)

    def trace(self) -> aiohttp.TraceConfig:
        config = aiohttp.TraceConfig()
        config.on_request_start.append(self._start)
        config.on_request_end.append(self._end)
        return config

    async def _start(self, _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestStartParams) -> None:
        context.began = time.monotonic()

    async def _end(self, _: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        call = Call(params.url.path, context.began, time.monotonic())
        self.seen.setdefault(f"{params.url.scheme}://{params.url.host}:{params.url.port}", []).append(call)

    def pauses(self, engine: str, *, since: float = 0.0) -> list[Pause]:
        """Complete pauses of the engine at that address that hold an update, oldest first."""
        return [one for one in _pauses(self.seen.get(engine, ())) if one.began >= since and one.updates]


def _pauses(calls: list[Call] | tuple[Call, ...]) -> Iterator[Pause]:
    opened: Call | None = None
    inside: list[Call] = []
    for call in sorted(calls, key=lambda one: one.began):
        if call.path == _PAUSE:
            opened, inside = call, []
        elif call.path == _CONTINUE and opened is not None:
            yield Pause(
                began=opened.began,
                ended=call.ended,
                loading_s=_covered(inside),
                updates=sum(one.path.startswith(_UPDATE) for one in inside),
                control_s=opened.seconds + call.seconds,
            )
            opened = None
        elif call.path.startswith((_UPDATE, _END)):
            inside.append(call)


def _covered(calls: list[Call]) -> float:
    """Seconds with at least one of the calls, which begin in order, under way."""
    total, reached = 0.0, 0.0
    for call in calls:
        total += max(0.0, call.ended - max(call.began, reached))
        reached = max(reached, call.ended)
    return total
