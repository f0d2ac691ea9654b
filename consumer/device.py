"""The trainer's device: its own all the time, or shared with engines, turn by turn.

(whole step leased) ── take: turn to TRAIN ► others let go ► weights and optimizer on it
(step trained, version published) ── give: all on the host ► let go ► turn to GENERATE
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Protocol

from consumer.backend import Backend, SharesDevice
from consumer.mending import Mender
from consumer.worker import Worker
from protocol.errors import ConfigError, Fenced
from weightsync.turns import Holder, Turn, Turns, renew


class Device(Protocol):
    """What the training loop asks for before it computes, and gives back after a step."""

    @property
    def shared(self) -> bool:
        """Then a step is trained only once it is there as a whole, since nothing is generated meanwhile."""

    async def take(self) -> None:
        """Return once the backend may compute. Harmless when it may already."""

    async def give(self) -> None:
        """The backend's memory is free for others. Harmless when it is already."""


class OwnDevice:
    """Nobody else wants it."""

    shared = False

    async def take(self) -> None: ...

    async def give(self) -> None: ...


class SharedDevice:
    """`async with shared_device(…) as device`. Waits for: engines and reward engines that let go; a dead one counts as gone after `weightsync.turns.HELD_S`.

    Invariant: the backend's memory lies on the device only while Redis has the trainer as a holder.
    Raises: `Fenced`; `RedisUnavailable`.
    """

    shared = True

    def __init__(self, turns: Turns, mender: Mender, backend: SharesDevice, worker: Worker, *, incarnation: int, trainer_id: str) -> None:
        self._turns = turns
        self._mender = mender
        self._backend = backend
        self._worker = worker
        self._incarnation = incarnation
        self._member, self._boot = trainer_id, uuid.uuid4().hex[:16]
        self._renewing: asyncio.Task[None] | None = None

    async def take(self) -> None:
        if self._renewing is not None:
            return
        await self._move(Turn.TRAIN)
        await self._turns.taken(Holder.TRAINER, self._member, self._boot)
        self._renewing = asyncio.create_task(renew(self._turns, Holder.TRAINER, self._member, self._boot), name="trainer:device")
        await self._worker.call(self._backend.onload)

    async def give(self) -> None:
        if self._renewing is not None:
            await self._worker.call(self._backend.offload)
            await self._let_go()
        await self._move(Turn.GENERATE)

    async def _let_go(self) -> None:
        renewing, self._renewing = self._renewing, None
        assert renewing is not None
        renewing.cancel()
        await asyncio.wait({renewing})
        await self._turns.give(Holder.TRAINER, self._member, self._boot)
        if not renewing.cancelled():
            renewing.result()

    async def _move(self, turn: Turn) -> None:
        await self._mender.through(lambda: self._turns.move(self._incarnation, turn))


@contextlib.asynccontextmanager
async def shared_device(turns: Turns, mender: Mender, backend: Backend, worker: Worker, *, incarnation: int, trainer_id: str) -> AsyncIterator[SharedDevice]:
    """The trainer's share of the device, which the engines have at first: what an earlier trainer left of a turn is over.

    Raises: `ConfigError` for a backend that cannot let go of a device.
    """
    if not isinstance(backend, SharesDevice):
        raise ConfigError(f"placement.layout = colocated: {type(backend).__name__} has no offload and onload; use trainer.backend torch, or another layout")
    device = SharedDevice(turns, mender, backend, worker, incarnation=incarnation, trainer_id=trainer_id)
    await device.give()
    try:
        yield device
    finally:
        with contextlib.suppress(Fenced):  # whoever replaced us has the turn to give
            await device.give()
