"""The engines of a run: who is there, what each serves, and who may be asked.

    STARTING ──ack──► ROUTABLE ──mark_unfit──► UNFIT ──ack──► ROUTABLE ──leave, or no beat for TTL_S──► gone

The host reports load with `beat`; state, version, target and reason are the registry's own and outrank what a status says of itself. A new boot nonce under a
known id is a new engine: it starts at STARTING with no version, and the old boot is `Superseded` (rule W3).
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import orjson

from protocol.audit import emit
from protocol.codec import encode
from protocol.connection import Client, Script
from protocol.errors import Superseded, WeightError
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.presence import decode_known
from protocol.versions import Version
from protocol.wakeups import RECHECK_S, Topic, Wakeups
from weightsync.aim import EVAL_FLEET
from weightsync.claim import FLAGS, PIN_S

TTL_S = 10.0
"""An engine whose host has not sent a beat for so long is gone; beat every `BEAT_S`."""
BEAT_S = 1.0
_BACK_S = 30.0
"""An engine that vanished without leaving is expected back for so long: a supervisor restarts it, and it loads its model."""
ACK_ROUNDS = 3
"""A run's end waits for so many engines one after the other; more would hold it up for what the next life repairs."""
_PRELUDE = ("lua/common.lua",)
_BEAT = Script("weightsync", "lua/beat.lua", prelude=_PRELUDE, flags=FLAGS)
_ACK = Script("weightsync", "lua/ack.lua", prelude=_PRELUDE, flags=FLAGS)
_UNFIT = Script("weightsync", "lua/unfit.lua", prelude=_PRELUDE, flags=FLAGS)
_LEAVE = Script("weightsync", "lua/leave.lua", prelude=_PRELUDE, flags=FLAGS)
_LIST = Script("weightsync", "lua/list.lua", prelude=_PRELUDE, flags=FLAGS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """How an update went, for the audit."""

    pause_s: float = 0.0
    """Seconds, as the others."""
    apply_s: float = 0.0
    prepare_s: float = 0.0
    transport: str = ""
    pause_mode: str = ""


class Registry:
    """The engine registry of one run."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    async def beat(self, status: EngineStatus, *, ttl_s: float = TTL_S) -> bool:
        """Register or renew an engine; True if it is new here (then it must ack before it is routable). A status of LEAVING takes it off the routes.

        Raises: `Superseded` when a newer boot has registered this id; stop.
        """
        keys = self._keys
        leaving = "1" if status.state is EngineState.LEAVING else "0"
        answer = await _BEAT(
            self._client,
            keys=[keys.engines, keys.engine_facts, keys.routable, keys.weight_pins, keys.audit, keys.wakeups, keys.pauses],
            args=[status.engine_id, status.boot_nonce, encode(status), leaving, _ms(ttl_s), _ms(PIN_S), status.fleet],
        )
        if answer == b"SUPERSEDED":
            raise Superseded(f"engine {status.engine_id}: a newer process registered this id; stop boot {status.boot_nonce}")
        return bool(answer == b"NEW")

    async def ack(self, engine_id: str, boot_nonce: str, version: Version, *, reconciler: str = "", times: UpdateTimes | None = None) -> bool:
        """The engine serves `version`, verified: it is routable from now on. False if Redis has lost its registration or lock (its next beat and look mend
        that; apply and ack again).

        Raises: `Superseded` (a newer boot, or another holder of the reconciler lock), `WeightError` (older, within an incarnation, than what it acked).
        """
        keys, times = self._keys, times or UpdateTimes()
        answer = await _ACK(
            self._client,
            keys=[keys.engine_facts, keys.routable, keys.weight_pins, keys.audit, keys.wakeups, keys.pauses, keys.reconcilers],
            args=[
                *(engine_id, boot_nonce, reconciler, str(version), _ms(PIN_S)),
                *(f"{seconds:.6f}" for seconds in (times.pause_s, times.apply_s, times.prepare_s)),
                *(times.transport, times.pause_mode),
            ],
        )
        if answer == b"SUPERSEDED":
            raise Superseded(f"engine {engine_id}: ack of {version} came from a boot or reconciler that is no longer the registered one")
        if answer == b"BACKWARD":
            raise WeightError(f"engine {engine_id}: ack of {version}, older than what it acked before; an engine never goes back within an incarnation")
        return bool(answer == b"OK")

    async def mark_unfit(self, engine_id: str, boot_nonce: str, reason: str) -> bool:
        """Take an engine off the routes until it acks again; its reconciler then applies the newest version in full. False if nothing changed.

        Anybody may: a producer whose answer carries an unknown or lower version does (rule W3).
        """
        keys = self._keys
        args = [engine_id, boot_nonce, reason[:500]]
        return bool(await _UNFIT(self._client, keys=[keys.engine_facts, keys.routable, keys.audit, keys.wakeups], args=args) == 1)

    async def prepare_failed(self, engine_id: str, version: Version, reason: str) -> None:
        """Note in the audit that an engine found a version unusable before touching it; it goes on with the one it serves."""
        await emit(self._client, self._keys, "prepare_failed", {"engine_id": engine_id, "version": str(version), "reason": reason[:500]})

    async def leave(self, engine_id: str, boot_nonce: str, reason: str = "stopped") -> None:
        """The engine is gone in good order."""
        keys = self._keys
        names = [keys.engines, keys.engine_facts, keys.routable, keys.weight_pins, keys.audit, keys.wakeups, keys.pauses, keys.reconcilers]
        await _LEAVE(self._client, keys=names, args=[engine_id, boot_nonce, reason])

    async def engines(self) -> list[EngineStatus]:
        """Every engine that is here now, by id."""
        return await self._list(routable=False)

    async def routable(self) -> list[EngineStatus]:
        """The engines that may be asked now, by id; each has a version."""
        return await self._list(routable=True)

    async def wait_acks(self, version: Version, wakeups: Wakeups, *, apply_s: float, most_paused: int) -> tuple[EngineId, ...]:
        """Return once every live engine serves `version` or newer, or at the deadline; those that do not are the answer. Engines of the fleet that evaluates
        take only what they are asked for, and are not waited for.

        An unfit engine is waited for, and one that vanishes meanwhile without leaving, for the time of a restart. The deadline gives each engine `apply_s`,
        `most_paused` of them at once, up to `ACK_ROUNDS` of these.
        """
        started = time.monotonic()
        vanished: dict[EngineId, float] = {}
        before: set[EngineId] = set()
        rounds = 1
        while True:
            mark = wakeups.mark(Topic.ENGINES)
            engines = [engine for engine in await self.engines() if engine.fleet != EVAL_FLEET]
            now = time.monotonic()
            here = {engine.engine_id for engine in engines}
            vanished = {one: since for one, since in vanished.items() if one not in here} | dict.fromkeys(before - here, now)
            live = [engine for engine in engines if engine.state is not EngineState.LEAVING]
            before = {engine.engine_id for engine in live}
            rounds = max(rounds, min(ACK_ROUNDS, math.ceil(len(live) / most_paused)))
            behind = [e.engine_id for e in live if e.state is not EngineState.ROUTABLE or e.version is None or e.version < version]
            behind += [one for one, since in vanished.items() if now - since < _BACK_S]
            left_s = started + rounds * apply_s - now
            if not behind or left_s <= 0:
                return tuple(behind)
            await wakeups.wait(Topic.ENGINES, since=mark, timeout_s=min(left_s, RECHECK_S))

    async def _list(self, *, routable: bool) -> list[EngineStatus]:
        keys = self._keys
        names = [keys.engines, keys.engine_facts, keys.routable, keys.audit, keys.wakeups]
        raw = await _LIST(self._client, keys=names, args=["1" if routable else "0"])
        pairs = zip(raw[::2], raw[1::2], strict=True)
        found = [_merge(known, orjson.loads(facts)) for status, facts in pairs for known in decode_known(EngineStatus, [status])]
        return sorted(found, key=lambda status: status.engine_id)


def _merge(status: EngineStatus, facts: dict[str, Any]) -> EngineStatus:
    return dataclasses.replace(
        status,
        state=EngineState(facts["state"]),
        version=Version.parse(facts["version"]) if facts["version"] else None,
        target=Version.parse(facts["target"]) if facts["target"] else None,
        reason=facts["reason"],
    )


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
