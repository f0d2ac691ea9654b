"""What keeps engines from the newest version, or from being asked, for people: each sentence says who, how far behind, and why. Pure.

An engine in trouble still serves, so nothing stalls; its tokens only grow older until the staleness guard takes them out. So it is said before that.
"""

from __future__ import annotations

from dataclasses import dataclass

from buffer.contract import RunState
from deploy.snapshot import Picture
from producer.engine.turns import AWAY
from protocol.messages import EngineId, EngineState, EngineStatus
from weightsync.aim import EVAL_FLEET

NEEDS_SERVER = frozenset({"gloo", "nccl", "ipc"})
"""Values of `weights.transport` that a weight server brings."""
_SHORT = 90
_NAMED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Of one engine."""

    engine_id: EngineId
    version: str
    """"" before its first."""
    lag_steps: int | None
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.engine_id} ({self._place}): {self.why}"

    @property
    def short(self) -> str:
        return f"{self.engine_id} ({self._place}): {_cut(self.why)}"

    @property
    def _place(self) -> str:
        behind = f", {self.lag_steps} steps behind" if self.lag_steps else ""
        return f"{self.version or 'no version yet'}{behind}"


def _cut(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def trouble_of(status: EngineStatus, lag_steps: int | None, most: int) -> Trouble | None:
    """None: it is well, on its way out, or off its device by arrangement.

    `most`: K; an engine further behind writes nothing that may be trained on, whatever it says of itself.
    """
    if status.state is EngineState.LEAVING or status.reason == AWAY:
        return None
    why = status.trouble or (status.reason if status.state is EngineState.UNFIT else "")
    if not why and status.fleet == "rollout" and lag_steps is not None and lag_steps > most:
        why = f"more than buffer.max_staleness {most} behind, and it reports no trouble: look at its log"
    if not why:
        return None
    version = "" if status.version is None else str(status.version)
    return Trouble(engine_id=status.engine_id, version=version, lag_steps=lag_steps, why=why)


def troubles(picture: Picture) -> list[Trouble]:
    """Of every engine that has one, by id."""
    found = (trouble_of(status, picture.lag(status.version), picture.settings.max_staleness) for status in picture.engines)
    return [trouble for trouble in found if trouble is not None]


def in_short(picture: Picture) -> str:
    """For one line; empty where all is well."""
    found = [trouble.short for trouble in troubles(picture)] + [_cut(told) for told in rests(picture)]
    left = len(found) - _NAMED
    return "; ".join(found[:_NAMED]) + (f"; {left} more" if left > 0 else "")


def resting(picture: Picture) -> dict[str, dict[str, str]]:
    """Engines that producers leave alone for a while, as requests failed there: by engine, the reason that each of those producers has."""
    found: dict[str, dict[str, str]] = {}
    for producer in picture.producers:
        for engine, reason in producer.resting.items():
            found.setdefault(engine, {})[producer.producer_id] = reason
    return dict(sorted(found.items()))


def rests(picture: Picture) -> list[str]:
    """A sentence an engine that rests. It may be fit, and serve the newest version: whoever asks it has had enough of its answers."""
    return [f"{engine} rests for {', '.join(by)}: {next(iter(by.values()))}" for engine, by in resting(picture).items()]


def server_missing(picture: Picture) -> bool:
    """Whether versions are to come by a weight server, and none of that kind is registered. Of a run that drains nothing is missing."""
    if picture.transport not in NEEDS_SERVER or picture.ledger is None or picture.ledger.state is RunState.DRAINING:
        return False
    return not any(server.backend == picture.transport for server in picture.weight_servers)


def fallbacks(picture: Picture) -> int | None:
    """Updates that the store brought although another way is configured; None: it is not known which is."""
    if not picture.transport:
        return None
    return 0 if picture.transport == "store" else picture.totals.by_transport["store"]


def channel(picture: Picture) -> list[str]:
    """What is wrong with the way itself."""
    told = []
    if server_missing(picture):
        told.append(
            f'weights.transport is "{picture.transport}" and no weight server of that kind is registered: versions come from the store; '
            "start `rollstream weight-server`"
        )
    else:
        others = [f"{one.engine_id} took {one.version} by {one.transport}" for one in picture.engines if _by_another_way(picture, one)]
        if others:
            count = f"; {fallbacks(picture)} of {picture.totals.applied} updates came from the store"
            told.append(f'weights.transport is "{picture.transport}", but {", ".join(others)}{count}: the logs of the engines say what broke')
    return [*told, *(f"relay {one.relay_id} ({one.version or 'no version yet'}): {one.trouble}" for one in picture.relays if one.trouble)]


def _by_another_way(picture: Picture, status: EngineStatus) -> bool:
    """Those that evaluate may be asked for what a weight server is past, so the store brings it and nothing broke."""
    known = picture.transport and status.transport and status.version is not None and status.fleet != EVAL_FLEET
    return bool(known) and status.transport != picture.transport
