"""A reconciler's standing in Redis: its lock on one engine, what it sees, and the right to pause.

The lock is the fence of everything else: a look renews it, a pause lengthens it over the whole update, and an ack or a release by anybody but its holder
changes nothing (rule W1).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from protocol.codec import decode
from protocol.connection import Client, Script
from protocol.errors import Superseded
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, Manifest
from protocol.versions import Version

PIN_S = 60.0
"""A pin that is not renewed for so long holds nothing; longer than an engine's registration, so that an outage of Redis does not delete under it."""
LOCK_S = 5.0
"""A reconciler that has not looked for so long has lost its lock; it looks at every wake-up and at least every second."""
CLAIM_S = 3.0
"""A place in the line for a pause is kept so long without asking again."""
FLAGS = "allow-oom"
"""Of every script of the weight channel: what each adds is small and bounded, and a run at maxmemory drains only while its engines live (rule L1)."""
_PRELUDE = ("lua/common.lua",)
_LOOK = Script("weightsync", "lua/look.lua", prelude=_PRELUDE, flags=FLAGS)
_PAUSE = Script("weightsync", "lua/pause.lua", prelude=_PRELUDE, flags=FLAGS)
_RENEW = Script("weightsync", "lua/renew.lua", prelude=_PRELUDE, flags=FLAGS)
_RESUME = Script("weightsync", "lua/resume.lua", flags=FLAGS)
_UNLOCK = Script("weightsync", "lua/unlock.lua", flags=FLAGS)


@dataclass(frozen=True, slots=True)
class Locked:
    """Another reconciler of this very boot holds the lock, for so long at most."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is to decide on."""

    state: EngineState | None
    """Of this boot in the registry; None: not registered."""
    newest: Version | None = None
    """What this engine is to go for: the newest version; in the fleet that evaluates, what it is asked for."""
    acked: Version | None = None
    """The version this boot acked, as the registry remembers it."""
    published: Version | None = None
    """What it would go for if it could have deltas."""
    manifest: Manifest | None = None
    """Of the newest version, where that is to be applied and its manifest is not the one at hand."""


class Claim:
    """The lock of one reconciler on one boot of one engine."""

    def __init__(self, client: Client, keys: Keys, engine_id: EngineId, boot_nonce: str) -> None:
        self._client = client
        self._keys = keys
        self._who = (engine_id, boot_nonce)
        self.owner = uuid.uuid4().hex

    async def look(self, at_hand: Version | None, *, whole: bool = False) -> Seen | Locked:
        """Renew the lock and read what there is to decide on; what may be taken is pinned in the same step (rule W5).

        `whole`: this machine cannot make versions from deltas now, so it goes for the whole one that the newest is made from, if that is no way back from what
        it acked (rule V3).
        Raises: `Superseded` when a newer boot has this engine id.
        """
        keys = self._keys
        raw = await _LOOK(
            self._client,
            keys=[keys.engine_facts, keys.weights, keys.weight_pins, keys.reconcilers, keys.eval_aim],
            args=[*self._who, self.owner, int(LOCK_S * 1000), int(PIN_S * 1000), str(at_hand or ""), "1" if whole else "0"],
        )
        verdict, *rest = (part.decode() if index < 5 else part for index, part in enumerate(raw))
        if verdict == "SUPERSEDED":
            raise Superseded(f"engine {self._who[0]}: a newer process registered this id; stop boot {self._who[1]}")
        if verdict == "LOCKED":
            return Locked(int(rest[0]) / 1000)
        if verdict == "UNKNOWN":
            return Seen(None)
        state, newest, acked, published, manifest = rest
        return Seen(
            EngineState(state),
            Version.parse(newest) if newest else None,
            Version.parse(acked) if acked else None,
            Version.parse(published) if published else None,
            decode(Manifest, manifest) if manifest else None,
        )

    async def renew(self) -> None:
        """Renew the lock alone, during work on the engine that takes longer than the lock lasts: what is looked for and pinned stays as it was.

        Raises: `Superseded` when another has the lock.
        """
        keys = self._keys
        if await _RENEW(self._client, keys=[keys.reconcilers], args=[*self._who, self.owner, int(LOCK_S * 1000)]) != 1:
            raise Superseded(f"engine {self._who[0]}: its reconciler lock is lost to another")

    async def pause(self, version: Version, *, most: int, valid_s: float, idle: bool, serving_share: float = 0.0) -> bool:
        """The right to pause the engine for `valid_s` and load `version`, which is pinned so long, the lock with it.

        False: others are paused, or waiting with an older version (rule W8), `version` was collected before this (rule W5), or Redis lost the lock.
        `idle`: the engine has no request. It counts for one that is off the routes alone: on them a request may arrive before the pause does, or under it.
        `serving_share`: of the routable engines, so many go on decoding while this one, if it is routable, is paused; one may always be.
        Raises: `Superseded` when the lock is lost.
        """
        keys = self._keys
        raw = await _PAUSE(
            self._client,
            keys=[keys.engine_facts, keys.reconcilers, keys.pauses, keys.weights, keys.weight_pins],
            args=[
                *(*self._who, self.owner, most, int(valid_s * 1000), int(CLAIM_S * 1000), "1" if idle else "0", f"{serving_share:.6f}"),
                *(str(version), int(max(valid_s, PIN_S) * 1000)),
            ],
        )
        if raw[0] == b"SUPERSEDED":
            raise Superseded(f"engine {self._who[0]}: its reconciler lock is lost to another")
        return bool(raw[0] == b"OK")

    async def resumed(self) -> None:
        """The engine decodes again without an ack: the pause goes to whoever waits."""
        keys = self._keys
        await _RESUME(self._client, keys=[keys.reconcilers, keys.pauses, keys.wakeups], args=[*self._who, self.owner])

    async def release(self) -> None:
        """Stop in good order: lock and pause are free at once."""
        keys = self._keys
        await _UNLOCK(self._client, keys=[keys.reconcilers, keys.pauses, keys.wakeups], args=[*self._who, self.owner])
