"""An engine on a device that a trainer has too (`placement.layout` colocated): it holds memory there only in its turns.

    begin ──► boot ──► serve ──turn over──► off the routes, all requests ended, memory freed, let go ──turn again──► memory, newest version in full ──► serve

What the engine has in its memory after a turn of the trainer is nothing that may be served, so it comes back as an engine that somebody else had: unfit until
its reconciler, beginning anew, has applied the newest version in full (rule W1). Requests end with the tokens they have and go on elsewhere or later; to those
that come while it is away it answers under a name that no version has, which nobody takes for a version's.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable

from producer.engine.hosted import EngineFault
from protocol.errors import ApplyFailed, DecodeError, EngineUnavailable, RedisUnavailable
from protocol.messages import EngineId
from weightsync.control import EngineControl
from weightsync.registry import Registry
from weightsync.turns import HELD_S, Holder, Turns

_MOVE_S = 60.0
"""An engine may take so long to free its memory, or to have it again."""
AWAY = "its device is with the trainer"


class DeviceTurns:
    """`begin`, then start the engine, then `follow` in place of its reconciler, and `end` when the engine is gone, also if `begin` did not return.

    Waits for: its turn, and that the others let go. Unblocked by: the trainer; one that died counts as gone after `weightsync.turns.HELD_S`.
    """

    def __init__(self, turns: Turns, engine_id: EngineId, boot_nonce: str) -> None:
        self._turns = turns
        self._who = (Holder.ENGINE, engine_id, boot_nonce)
        self._engine_id, self._boot_nonce = engine_id, boot_nonce
        self._holds = False
        self._renewing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Return once the engine may be started."""
        await self._take()
        self._renewing = asyncio.create_task(self._renew(), name="engine:device")

    async def end(self) -> None:
        """The engine is gone, and its memory with it."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
        with contextlib.suppress(RedisUnavailable):  # then it expires
            await self._give()

    async def follow(self, reconcile: Callable[[], Awaitable[None]], *, control: EngineControl, registry: Registry) -> None:
        """Reconcile in the engine's turns, for ever; the engine is ready, and holds memory.

        Raises: what `reconcile` raises; `EngineFault` when the engine does not let go, or does not come back.
        """
        assert self._renewing is not None
        while True:
            reconciling = asyncio.ensure_future(reconcile())
            turn_over = asyncio.ensure_future(self._turns.until(Holder.ENGINE, mine=False))
            try:
                await asyncio.wait({reconciling, turn_over, self._renewing}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in (reconciling, turn_over):
                    one.cancel()
                await asyncio.wait({reconciling, turn_over})
            for one in (reconciling, turn_over, self._renewing):
                if one.done() and not one.cancelled():
                    one.result()
            await self._between_turns(control, registry)

    async def _between_turns(self, control: EngineControl, registry: Registry) -> None:
        try:
            await registry.mark_unfit(self._engine_id, self._boot_nonce, AWAY)
            await control.pause("abort", deadline_s=_MOVE_S)
            await control.rename(f"away:{uuid.uuid4().hex[:8]}", deadline_s=_MOVE_S)
            await control.release_memory(deadline_s=_MOVE_S)
            await self._give()
            await self._take()
            await control.resume_memory(deadline_s=_MOVE_S)
            await control.resume(deadline_s=_MOVE_S)
        except (ApplyFailed, EngineUnavailable, DecodeError) as problem:
            raise EngineFault(f"the engine shares its device and cannot take turns: {problem}") from problem

    async def _take(self) -> None:
        await self._turns.taken(*self._who)
        self._holds = True

    async def _give(self) -> None:
        self._holds = False
        await self._turns.give(*self._who)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(HELD_S / 10)
            if self._holds and not await self._turns.take(*self._who) and self._holds:
                raise EngineFault("its place on the shared device ran out while Redis was away: its memory must be free before others use it")
