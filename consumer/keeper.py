"""Checkpoints while training goes on: when one is due, writing it off the training path, registering it, and deleting what is no longer kept.

One is due by steps, by time, when the ledger wishes it, and when a person does: by a file `SAVE` in the folder, or SIGUSR1, which makes that file.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from buffer.contract import CheckpointRef
from consumer.backend import TrainingState
from consumer.checkpoint import Checkpoint, Incarnations, Others, Progress, nobody, sweep, write_checkpoint
from consumer.config import CheckpointConfig, TrainerConfig
from consumer.journal import JournalTail
from consumer.sentinel import Sentinel
from consumer.shards import not_written
from protocol.failpoints import Failpoint, failpoint

_LOG = logging.getLogger(__name__)


class Registry(Protocol):
    """Where checkpoints are registered: a ledger."""

    async def checkpoint(self, incarnation: int, checkpoint: CheckpointRef, *, keep: int) -> tuple[CheckpointRef, ...]: ...


class Keeper:
    """At most one checkpoint is in flight: `due` is False meanwhile. `settle` first where the ledger wants one: it asks once a step, and may not ask again.

    captured (at a step's edge) ──► files durable ──► renamed ──► registered in the ledger ──► older ones deleted
    """

    def __init__(
        self,
        ledger: Registry,
        incarnation: int,
        *,
        config: CheckpointConfig,
        trainer: TrainerConfig,
        folder: Path,
        model_path: Path,
        journal: JournalTail,
        last: CheckpointRef | None,
        incarnations: Callable[[], Incarnations] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._incarnation = incarnation
        self._config = config
        self._schedule = {"lr": trainer.lr, "warmup_steps": float(trainer.warmup_steps)}
        self._folder = folder
        self._model_path = model_path
        self._clock = clock
        self._incarnations = incarnations
        self._sentinel = Sentinel(folder)
        self._in_flight: asyncio.Task[None] | None = None
        self._started_at = clock()
        self.journal = journal
        self.step = last.step if last is not None else 0
        """The newest step with a checkpoint registered or in flight; step 0 is the starting weights."""

    def due(self, step: int, *, wanted: bool) -> bool:
        """Whether the step just trained should be checkpointed. `wanted`: the ledger asks for one, to free payloads (rule P3)."""
        if step == self.step or (self._in_flight is not None and not self._in_flight.done()):
            return False
        by_time = self._config.every_seconds > 0 and self._clock() - self._started_at >= self._config.every_seconds
        by_steps = self._config.every_steps > 0 and step - self.step >= self._config.every_steps
        return wanted or by_time or by_steps or self._sentinel.there()

    def begin(self, group: asyncio.TaskGroup, progress: Progress, state: TrainingState, others: Others = nobody) -> None:
        """Write and register in the background, with what the other ranks captured; a failure ends `group`."""
        self.step, self._started_at = progress.step, self._clock()
        asked, journal = self._sentinel.asked(), self.journal.dump()
        checkpoint = Checkpoint(
            progress=progress,
            incarnation=self._incarnation,
            state=state,
            journal=journal,
            incarnations=self._incarnations(),
            schedule=self._schedule,
        )
        self._in_flight = group.create_task(self._write(checkpoint, others, asked), name=f"trainer:checkpoint {progress.step}")

    async def settle(self) -> None:
        """Return once nothing is in flight."""
        if self._in_flight is not None:
            await self._in_flight

    async def _write(self, checkpoint: Checkpoint, others: Others, asked: int) -> None:
        step, begun = checkpoint.progress.step, self._clock()
        try:
            reference = await asyncio.to_thread(write_checkpoint, self._folder, checkpoint, model_path=self._model_path, others=others)
        except OSError as problem:
            raise not_written(self._folder, problem) from problem
        kept = await self._ledger.checkpoint(self._incarnation, reference, keep=self._config.keep)
        failpoint(Failpoint.CHECKPOINT_REGISTERED)
        self._sentinel.answered(asked)
        self.journal.forget(min(one.step for one in kept) if len(kept) >= self._config.keep else 0)
        removed = await asyncio.to_thread(sweep, self._folder, kept, incarnation=self._incarnation, below=(step, self._incarnation))
        _LOG.info("checkpoint of step %d registered after %.1f s; %d kept, removed %s", step, self._clock() - begun, len(kept), removed or "none")
