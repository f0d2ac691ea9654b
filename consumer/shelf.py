"""Checkpoints of training that no ledger knows of: a shadow's, a replay's. A folder of its own says which there are."""

from __future__ import annotations

import fcntl
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from buffer.contract import CheckpointRef
from consumer.backend import TrainingState
from consumer.checkpoint import Checkpoint, CheckpointDamaged, Progress, read_checkpoint, sweep, write_checkpoint
from consumer.config import CheckpointConfig, TrainerConfig
from consumer.journal import JournalTail
from consumer.sentinel import Sentinel
from protocol.durable import make_folder
from protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})-(\d+)")
_ANY_INCARNATION = 2**31 - 1


class Shelf:
    """The newest `keep` checkpoints in `folder`; a checkpoint is there once its folder has its name. All of it blocks but `due`."""

    def __init__(self, folder: Path, *, config: CheckpointConfig, trainer: TrainerConfig, model_path: Path) -> None:
        self._folder, self._config, self._model_path = folder, config, model_path
        self._schedule = {"lr": trainer.lr, "warmup_steps": float(trainer.warmup_steps)}
        self._sentinel = Sentinel(folder)
        self._at, self._step = time.monotonic(), 0

    def start(self, step: int) -> None:
        """Training begins after `step`: the next checkpoint is due an interval later."""
        self._at, self._step = time.monotonic(), step

    def due(self, step: int) -> bool:
        by_time = self._config.every_seconds > 0 and time.monotonic() - self._at >= self._config.every_seconds
        by_steps = self._config.every_steps > 0 and step - self._step >= self._config.every_steps
        return by_time or by_steps or self._sentinel.there()

    def kept(self) -> list[tuple[int, int]]:
        """(step, incarnation) of each, ascending."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted((int(match[1]), int(match[2])) for match in map(_NAME.fullmatch, names) if match)

    def read(self, step: int, incarnation: int) -> Checkpoint:
        """Raises: `CheckpointDamaged`."""
        path = self._folder / f"step-{step:06d}-{incarnation}"
        try:
            digest = str(orjson.loads((path / "state.json").read_bytes())["digest"])
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise CheckpointDamaged(f"checkpoint {path} cannot be read ({problem}); move it away to go on from the one before it") from problem
        return read_checkpoint(CheckpointRef(step=step, incarnation=incarnation, digest=digest, path=str(path)), folder=self._folder)

    def write(self, progress: Progress, *, incarnation: int, state: TrainingState) -> None:
        """Durable on return; the oldest beyond `keep` go. What lies after it is of a line that was given up, and goes too."""
        asked, journal = self._sentinel.asked(), JournalTail().dump()
        write_checkpoint(
            self._folder,
            Checkpoint(progress=progress, incarnation=incarnation, state=state, journal=journal, schedule=self._schedule),
            model_path=self._model_path,
        )
        before = [one for one in self.kept() if one[0] < progress.step]
        kept = [*before[1 - self._config.keep :], (progress.step, incarnation)]
        sweep(self._folder, [_reference(self._folder, *one) for one in kept], incarnation=_ANY_INCARNATION)
        self._sentinel.answered(asked)
        self.start(progress.step)


def _reference(folder: Path, step: int, incarnation: int) -> CheckpointRef:
    return CheckpointRef(step=step, incarnation=incarnation, digest="", path=str(folder / f"step-{step:06d}-{incarnation}"))


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """`folder` is there, and this process's alone while the context is open. Raises: `ConfigError` if another process trains in it."""
    make_folder(folder)
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise ConfigError(f"another process trains in {folder}: stop it, or take another name") from problem
        yield
