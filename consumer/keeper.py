"""Checkpoints while training goes on: when one is due, writing it off the training path, registering it, and deleting what is no longer kept."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from buffer.contract import CheckpointRef
from consumer.backend import TrainingState
from consumer.checkpoint import Checkpoint, Incarnations, Progress, sweep, write_checkpoint
from consumer.config import CheckpointConfig, TrainerConfig
from consumer.journal import JournalTail
from protocol.errors import RollstreamError
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
        return wanted or by_time or by_steps

    def begin(self, group: asyncio.TaskGroup, progress: Progress, digest: str, state: TrainingState) -> None:
        """Write and register in the background; a failure ends `group`."""
        self.step, self._started_at = progress.step, self._clock()
        journal = self.journal.dump()
        checkpoint = Checkpoint(
            progress=progress,
            incarnation=self._incarnation,
            digest=digest,
            state=state,
            journal=journal,
            incarnations=self._incarnations(),
            schedule=self._schedule,
        )
        self._in_flight = group.create_task(self._write(checkpoint), name=f"trainer:checkpoint {progress.step}")

    async def settle(self) -> None:
        """Return once nothing is in flight."""
        if self._in_flight is not None:
            await self._in_flight

    async def _write(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.progress.step
        try:
            path = await asyncio.to_thread(write_checkpoint, self._folder, checkpoint, model_path=self._model_path)
        except OSError as problem:
            raise RollstreamError(
                f"checkpoint of step {step} cannot be written to {self._folder} ({problem}); free space there or set checkpoint.dir, then --resume"
            ) from problem
        reference = CheckpointRef(step=step, incarnation=self._incarnation, digest=checkpoint.digest, path=str(path))
        kept = await self._ledger.checkpoint(self._incarnation, reference, keep=self._config.keep)
        failpoint(Failpoint.CHECKPOINT_REGISTERED)
        self.journal.forget(min(one.step for one in kept) if len(kept) >= self._config.keep else 0)
        removed = await asyncio.to_thread(sweep, self._folder, kept, incarnation=self._incarnation, below=(step, self._incarnation))
        _LOG.info("checkpoint of step %d registered; %d kept, removed %s", step, len(kept), removed or "none")
