"""The daemons of a run as actors of its fleet: who there is to be, what each needs, and how it is started."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.config import UpConfig
from deploy.placement import Part, Placement, demand_of, place
from deploy.ray.placement_group import SPREAD, TOGETHER, WHOLE_GPU, Bundles, find, new_group, remove, room, seat
from deploy.ray.trainer import TrainerActor
from deploy.stop_times import ENGINE, PRODUCER, TRAINER, stop_seconds_of
from producer.ray_actor import EngineActor, ProducerActor, Settings
from producer.ray_fleet import Fleet, Left
from producer.ray_names import index_of, members, rank_of, role_of, unit_of
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
        """Of everyone who is placed, one for each unit: of an engine over several nodes the first of its actors."""
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
        placed = [name for part, names in self.names.items() if part in placement.units or part in placement.rooms for name in names]
        seated = [name for unit in placed if unit not in self._ranks for name in self.members(unit)]
        alone = placement.demand.layout == "trainer_only"
        return seated + [f"producer-{index}" for index in range(0 if alone else self.config.producer.count)]

    def members(self, unit: str) -> list[str]:
        """All actors of one engine, the first one first; of anybody else, that one."""
        return members(unit, self.config.engine.nodes if role_of(unit) == ENGINE else 1)

    def rooms(self, placement: Placement) -> dict[str, Bundles]:
        """What each engine of the run asks for that has a group of its own from the start, by its name."""
        return {name: self._alone()[0] for part in placement.rooms for name in self.names[part]}

    @property
    def cpus(self) -> float:
        """Of each bundle: enough for whoever gets it."""
        ray = self.config.ray
        both = self.config.placement.layout == "colocated"
        return ray.trainer_cpus + ray.engine_cpus if both else max(ray.trainer_cpus, ray.engine_cpus)

    async def start(self, name: str) -> None:
        """Returns at once. An actor of that name that is there stays."""
        ray, role = self.config.ray, role_of(name)
        if role == PRODUCER:
            await self.fleet.start(ProducerActor, name, self.settings, cpus=ray.producer_cpus)
            return
        group, bundles = (self.group, self.dealt[name]) if name in self.dealt else await self._room_of(name)
        if role == TRAINER:
            bundles += tuple(bundle for rank in self._ranks for bundle in self.dealt[rank])
        part = next((part for part, names in self.names.items() if name in names), Part.ENGINE)
        kind, cpus = (TrainerActor, ray.trainer_cpus) if role == TRAINER else (EngineActor, ray.engine_cpus)
        share = _SHARE_OF_GPU[part] if self.config.placement.layout == "colocated" else WHOLE_GPU
        there = group.bundle_specs[bundles[0]].get("GPU", 0)
        gpus = share if there == 1 else there
        await self.fleet.start(kind, name, self._settings_of(name), cpus=cpus, gpus=gpus, where=seat(group, bundles[0]), bundles=bundles)

    async def stop(self, *names: str) -> list[Left]:
        """In good order, or by force; the first of an engine's actors before the others, without which its server ends in no order. With the last one goes the
        group that the engine had to itself.
        """
        left: list[Left] = []
        for others in (False, True):
            now = [name for name in names if bool(rank_of(name)) is others]
            left += await asyncio.gather(*(self.fleet.stop(name, within_s=stop_seconds_of(self.config, role_of(name))) for name in now))
        if engines := {unit_of(name) for name in names if role_of(name) == ENGINE}:
            stay = {unit_of(name) for name in await self.fleet.names(ENGINE) if name not in names}
            for engine in engines - stay:
                if (group := await asyncio.to_thread(find, room(self.config.run.name, engine))) is not None:
                    await asyncio.to_thread(remove, group)
        return left

    async def _room_of(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """A placement group that the engine has to itself, and the bundles of this actor: over several nodes, or added later, as the group of the run cannot
        grow.
        """
        engine, (bundles, strategy) = unit_of(name), self._alone()
        called, wait_s = room(self.config.run.name, engine), self.config.placement.wait_seconds
        group = find(called) or await new_group(called, bundles, asked=engine, wait_s=wait_s, strategy=strategy)
        return group, (rank_of(name),) if strategy == SPREAD else tuple(range(len(bundles)))

    def _alone(self) -> tuple[Bundles, str]:
        """Bundles of a group for one engine, and how they lie: the GPUs of one node together, in one bundle where there are several nodes, and those apart."""
        demand, cpus = demand_of(self.config), self.config.ray.engine_cpus
        if demand.engine_nodes > 1:
            gpus = demand.room.gpus
            return [{"GPU": float(gpus), "CPU": cpus * gpus} if gpus else {"CPU": cpus}] * demand.engine_nodes, SPREAD
        size = 0 if demand.layout == "external" else demand.engine_gpus
        return [{"GPU": 1.0, "CPU": cpus}] * size or [{"CPU": cpus}], TOGETHER

    def _settings_of(self, name: str) -> Settings:
        """An engine that was added is one of the run's, however many were configured: those beyond engine.count would be the evaluation's."""
        index = index_of(name)
        if role_of(name) == ENGINE and index >= self.config.engine.count + self.config.eval.engines:
            return dataclasses.replace(self.settings, sets=(*self.settings.sets, f"engine.count={index + 1}"))
        return self.settings


def placement_of(config: UpConfig) -> Placement:
    """The layout of a run that this release can start. Raises: `ConfigError`."""
    demand = demand_of(config)
    if demand.trainer_gpus > 1:
        raise ConfigError(f"placement.trainer_gpus = {demand.trainer_gpus}: each rank uses one GPU; leave it out, and set trainer.ranks to the number of GPUs")
    return place(demand)
