"""Which processes a run has here, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.config import UpConfig
from deploy.placement import demand_of
from deploy.redis_server import ServerCommand
from deploy.scaling import refuses
from deploy.up.server_device import server_device
from deploy.up.supervisor import Child, Role
from producer.engine.config import EngineConfig
from protocol.daemon import SUPERVISED
from protocol.errors import ConfigError
from weightsync.config import WeightsConfig, is_url

_MODULES = {
    Role.ENGINE: ("deploy.cli", "engine"),
    Role.PRODUCER: ("producer.main",),
    Role.TRAINER: ("consumer.main",),
    Role.RELAY: ("deploy.cli", "relay"),
    Role.WEIGHT_SERVER: ("deploy.cli", "weight-server"),
}
_INDEXED = (Role.ENGINE, Role.PRODUCER)
_HALVES = {
    "trainer_only": "start `rl-trainer` by hand, with --recorded to train on a recording",
    "rollout_only": "start `rollstream engine` and `rl-producer` by hand, the latter with --rollout-only where no trainer is to come",
}
"""Layouts of one half of a run, whose end the other half decides, and what to do instead here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The children of one run, as commands."""

    config_file: Path
    sets: tuple[str, ...]
    children: tuple[Child, ...]
    threads: Mapping[Role, int]
    redis: ServerCommand | None
    engine: EngineConfig
    server_device: str
    """That of the weight server; empty: there is none."""
    evals: int
    """Engines of the evaluation's own, the last of those that the run begins with."""

    @property
    def reserved(self) -> frozenset[Child]:
        """Engines of the evaluation's own: their number does not change."""
        first = self.engine.count
        return frozenset(Child(Role.ENGINE, index) for index in range(first, first + self.evals))

    def refuses(self, child: Child) -> str:
        """Why there cannot be this one too; empty: there can."""
        if child.role is not Role.ENGINE:
            return ""
        why = refuses(self.engine, child.index)
        return f"{why}, and go on by `rollstream up --resume`" if why else ""

    def argv(self, child: Child) -> tuple[str, ...]:
        """Without `--new` or `--resume`, which only the trainer takes and only its start decides."""
        if child.role is Role.REDIS:
            assert self.redis is not None
            return self.redis.argv
        command = [sys.executable, "-m", *_MODULES[child.role], "-c", str(self.config_file)]
        if child.role in _INDEXED:
            command += ["--index", str(child.index)]
        for item in self.sets:
            command += ["--set", item]
        if child.role is Role.WEIGHT_SERVER and self.server_device:
            command += ["--device", self.server_device]
        if child.role is Role.ENGINE and child not in self.children:  # one of the run's: beyond engine.count it would be the evaluation's
            command += ["--set", f"engine.count={child.index + 1}"]
        return tuple(command)

    def environment(self, child: Child) -> dict[str, str]:
        """One process must not take the cores of all others: torch and BLAS get what the configuration gives them. And it is told that its Redis is right."""
        threads = str(self.threads.get(child.role, 1))
        return {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            SUPERVISED: "1",
        }


def plan(config: UpConfig, config_file: Path, sets: Sequence[str], *, redis: ServerCommand | None) -> Plan:
    """`redis`: the server to start; None where `redis.url` names one."""
    return Plan(
        config_file=config_file,
        sets=tuple(sets),
        children=(
            *([Child(Role.REDIS)] if redis is not None else []),
            Child(Role.TRAINER),
            *_carriers(config.weights),
            *(Child(Role.ENGINE, index) for index in range(config.engine.count + config.eval.engines)),
            *(Child(Role.PRODUCER, index) for index in range(config.producer.count)),
        ),
        redis=redis,
        engine=config.engine,
        server_device=server_device(config),
        evals=config.eval.engines,
        threads={Role.ENGINE: config.engine.torch_threads, Role.TRAINER: config.trainer.torch_threads},
    )


def check_layout(config: UpConfig) -> None:
    """Whether `plan` starts what [placement] asks for: a whole run, with engines here or at their URLs. Raises: `ConfigError` saying what to do instead."""
    layout = demand_of(config).layout
    if layout in _HALVES:
        raise ConfigError(f'placement.layout "{layout}" is for `rollstream up --ray`; on one machine {_HALVES[layout]}, or use another layout')


def _carriers(weights: WeightsConfig) -> tuple[Child, ...]:
    """Who moves versions between the store and the engines of this machine, beside the engines' own hosts."""
    if weights.transport in ("gloo", "nccl", "ipc"):
        return (Child(Role.WEIGHT_SERVER),)
    if weights.transport == "delta" or is_url(weights.store):
        return (Child(Role.RELAY),)
    return ()
