"""Whose turn it is on devices that trainer, engines and reward engines share: one after the other, never two at once.

    GENERATE ──engines let go──► SCORE ──reward engines let go──► TRAIN ──trainer lets go──► GENERATE
    (engines)   (left out where nobody scores on the device)       (trainer)

The trainer moves the turn, since a step is what the turns are for. Whoever wants the device's memory takes it in its own turn and after all others have let go
of it, which is one script; whoever's turn is over lets go, and says so. Invariant: the holders are all of one role.

A holder that is not heard of for `HELD_S` has died, and its memory with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from protocol.connection import Client, Script
from protocol.errors import Fenced, LedgerRegressed, RollstreamError
from protocol.keys import Keys
from protocol.wakeups import RECHECK_S, Topic, Wakeups
from weightsync.claim import FLAGS

HELD_S = 45.0
"""Longer than any process of a run is silent while it lives: they renew all the time, and live through outages of Redis of 30 s."""
_PRELUDE = ("lua/common.lua",)
_MOVE = Script("weightsync", "lua/turn_move.lua", prelude=_PRELUDE, flags=FLAGS)
_TAKE = Script("weightsync", "lua/turn_take.lua", prelude=_PRELUDE, flags=FLAGS)
_GIVE = Script("weightsync", "lua/turn_give.lua", flags=FLAGS)
_READ = Script("weightsync", "lua/turn_read.lua", prelude=_PRELUDE, flags="no-writes")


class Turn(StrEnum):
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "train"


class Holder(StrEnum):
    """Who may hold the memory of the device."""

    ENGINE = "engine"
    REWARD = "reward"
    TRAINER = "trainer"


HOLDERS = {Turn.GENERATE: Holder.ENGINE, Turn.SCORE: Holder.REWARD, Turn.TRAIN: Holder.TRAINER}
_TURNS = {holder: turn for turn, holder in HOLDERS.items()}


@dataclass(frozen=True, slots=True)
class Standing:
    """Whose turn it is, and who holds memory."""

    turn: Turn
    number: int
    """Turns so far in the life of the run; 0: none was given yet, and the engines have it."""
    holders: frozenset[str]
    """`role:id` of each that is alive."""


class Turns:
    """The turns of one run, as Redis has them."""

    def __init__(self, client: Client, keys: Keys, wakeups: Wakeups) -> None:
        self._client = client
        self._keys = keys
        self._wakeups = wakeups

    async def read(self) -> Standing:
        turn, number, *holders = await _READ(self._client, keys=[self._keys.turn, self._keys.holders], args=[])
        return Standing(Turn(turn.decode()), int(number), frozenset(one.decode() for one in holders))

    async def move(self, incarnation: int, turn: Turn) -> None:
        """It is the turn of `HOLDERS[turn]`, once the others let go.

        Raises: `Fenced` (a newer trainer is attached), `LedgerRegressed` (Redis lost the attachment of this one).
        """
        keys = self._keys
        answer = await _MOVE(self._client, keys=[keys.state, keys.turn, keys.audit, keys.wakeups], args=[incarnation, turn])
        verdict, seen = answer[0].decode(), answer[1].decode()
        if verdict == "FENCED":
            raise Fenced(f"the turn to {turn}: incarnation {seen} is attached now; this trainer must stop")
        if verdict == "REGRESSED":
            raise LedgerRegressed(f"the turn to {turn}: only incarnation {seen} is attached: Redis lost the attachment; its trainer re-asserts it")

    async def take(self, role: Holder, member: str, boot: str, *, held_s: float = HELD_S) -> bool:
        """Hold memory, or go on holding it; False: it is not this role's turn, or others have not let go yet. Memory may be taken only after True.

        Whoever holds it renews it so, also after its turn, until it lets go.
        """
        keys = self._keys
        arguments: tuple[str | int, ...] = (role, member, boot, _TURNS[role], int(held_s * 1000))
        return bool(await _TAKE(self._client, keys=[keys.turn, keys.holders], args=arguments) == 1)

    async def give(self, role: Holder, member: str, boot: str) -> None:
        """Let go, after the memory is free."""
        await _GIVE(self._client, keys=[self._keys.holders, self._keys.wakeups], args=[role, member, boot])

    async def taken(self, role: Holder, member: str, boot: str, *, held_s: float = HELD_S) -> None:
        """Return once it is held; waits for the turn and for the others to let go, for ever. Unblocked by: wake-ups `run`."""
        while True:
            mark = self._wakeups.mark(Topic.RUN)
            if await self.take(role, member, boot, held_s=held_s):
                return
            await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=RECHECK_S)

    async def until(self, role: Holder, *, mine: bool) -> None:
        """Return once it is the turn of `role`, or is not any more."""
        while True:
            mark = self._wakeups.mark(Topic.RUN)
            if (HOLDERS[(await self.read()).turn] is role) is mine:
                return
            await self._wakeups.wait(Topic.RUN, since=mark, timeout_s=RECHECK_S)


async def renew(turns: Turns, role: Holder, member: str, boot: str, *, every_s: float = 1.0) -> None:
    """Hold on, for ever: run it beside whatever uses the memory. Raises: `RollstreamError` when it is not held any more."""
    while True:
        await asyncio.sleep(every_s)
        if not await turns.take(role, member, boot):
            raise RollstreamError(f"{role} {member}: its place on the shared device ran out while Redis was away, and another may have it")
