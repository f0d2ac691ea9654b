"""The daemons of a run as actors of its fleet: who there is to be, what each needs, and how it is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.config import UpConfig
from deploy.placement import Part, Placement, demand_of, place
from deploy.ray.placement_group import WHOLE_GPU, find, new_group, remove, seat
from deploy.ray.trainer import TrainerActor
from deploy.stop_times import ENGINE, PRODUCER, TRAINER, stop_seconds_of
from producer.ray_actor import EngineActor, ProducerActor, Settings, namespace
from producer.ray_fleet import Fleet, Left
from protocol.errors import ConfigError

_RANK = "rank"
"""Of the trainer, above 0: they have bundles of their own, and rank 0 starts them."""
_SHARE_OF_GPU: Mapping[Part, float] = {Part.TRAINER: 0.4, Part.ENGINE: 0.2, Part.EVAL: WHOLE_GPU}
"""Where a run is colocated."""


@dataclass(slots=True)
class Crew:
    """Starts the actors of one run. Needs a connection to Ray."""

    config: UpConfig
    settings: Settings
    fleet: Fleet
    group: Any = None
    dealt: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Bundles by name of actor, of those that have a place in `group`."""

    @property
    def names(self) -> dict[Part, list[str]]:
        """Of everyone who has a place in the group."""
        engines, evals = self.config.engine.count, self.config.eval.engines
        return {
            Part.TRAINER: ["trainer-0", *self._ranks],
            Part.ENGINE: [f"engine-{index}" for index in range(engines)],
            Part.EVAL: [f"engine-{engines + index}" for index in range(evals)],
        }

    @property
    def _ranks(self) -> list[str]:
        return [f"{_RANK}-{rank}" for rank in range(1, self.config.trainer.ranks)]

    def wanted(self, placement: Placement) -> list[str]:
        """Who is started with the run."""
        seated = [name for part, names in self.names.items() if part in placement.units for name in names if name not in self._ranks]
        alone = placement.demand.layout == "trainer_only"
        return seated + [f"producer-{index}" for index in range(0 if alone else self.config.producer.count)]

    @property
    def cpus(self) -> float:
        """Of each bundle: enough for whoever gets it."""
        ray = self.config.ray
        both = self.config.placement.layout == "colocated"
        return ray.trainer_cpus + ray.engine_cpus if both else max(ray.trainer_cpus, ray.engine_cpus)

    async def start(self, name: str) -> None:
        """Returns at once. An actor of that name that is there stays."""
        ray, role = self.config.ray, name.rpartition("-")[0]
        if role == PRODUCER:
            await self.fleet.start(ProducerActor, name, self.settings, cpus=ray.producer_cpus)
            return
        group, bundles = (self.group, self.dealt[name]) if name in self.dealt else await self._room_of(name)
        if role == TRAINER:
            bundles += tuple(bundle for rank in self._ranks for bundle in self.dealt[rank])
        part = next((part for part, names in self.names.items() if name in names), Part.ENGINE)
        kind, cpus = (TrainerActor, ray.trainer_cpus) if role == TRAINER else (EngineActor, ray.engine_cpus)
        share = _SHARE_OF_GPU[part] if self.config.placement.layout == "colocated" else WHOLE_GPU
        gpus = share if "GPU" in group.bundle_specs[bundles[0]] else 0
        await self.fleet.start(kind, name, self._settings_of(name), cpus=cpus, gpus=gpus, where=seat(group, bundles[0]), bundles=bundles)

    async def stop(self, name: str) -> Left:
        """In good order, or by force; the room of an engine that was added while the run went on is given back."""
        role = name.rpartition("-")[0]
        left = await self.fleet.stop(name, within_s=stop_seconds_of(self.config, role))
        if role == ENGINE and name not in self.dealt and (group := find(_room(self.config.run.name, name))) is not None:
            remove(group)
        return left

    async def _room_of(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """A placement group of the actor's own, on one node: the group of the run cannot grow."""
        demand = demand_of(self.config)
        size = 0 if demand.layout == "external" else demand.engine_gpus
        bundles = [{"GPU": 1.0, "CPU": self.config.ray.engine_cpus}] * size or [{"CPU": self.config.ray.engine_cpus}]
        room = _room(self.config.run.name, name)
        wait_s = self.config.placement.wait_seconds
        group = find(room) or await new_group(room, bundles, asked=name, wait_s=wait_s, strategy="STRICT_PACK")
        return group, tuple(range(len(bundles)))

    def _settings_of(self, name: str) -> Settings:
        """An engine that was added is one of the run's, however many were configured: those beyond engine.count would be the evaluation's."""
        index = int(name.rpartition("-")[2])
        if name.startswith(ENGINE) and index >= self.config.engine.count + self.config.eval.engines:
            return dataclasses.replace(self.settings, sets=(*self.settings.sets, f"engine.count={index + 1}"))
        return self.settings


def placement_of(config: UpConfig) -> Placement:
    """The layout of a run that this release can start. Raises: `ConfigError`."""
    demand = demand_of(config)
    if demand.trainer_gpus > 1:
        raise ConfigError(f"placement.trainer_gpus = {demand.trainer_gpus}: each rank uses one GPU; leave it out, and set trainer.ranks to the number of GPUs")
    if demand.engine_nodes > 1:
        raise ConfigError(
            "engine.nodes, placement.engine_nodes: an engine over several nodes is not started on Ray by this release; start it by hand, and use "
            "engine.kind = external"
        )
    return place(demand)


def _room(run: str, name: str) -> str:
    return f"{namespace(run)}/{name}"
