"""Which GPUs each part of a run gets: from what is asked for to the bundles of one placement group. Pure: no Ray, no socket.

::

    Demand ──place──► Placement: how many bundles, and which slice of them each unit of each role gets; or a room of its own
                          └── check_nodes(placement, node of each bundle): nobody's GPUs are torn apart

A bundle is one GPU; or, for a unit that has none, CPUs alone. Slices are of *sorted* bundles: those with a GPU first, by node and GPU, so that consecutive
ranks share a node; then those without. An engine over several nodes has no slice but a room, a placement group of its own, as Ray packs or spreads a group as a
whole: a bundle for each of its nodes.

| layout | bundles with GPUs, in order |
| --- | --- |
| disaggregated | trainer, engines, eval, reward |
| colocated | as many as the largest of trainer, engines and reward, which all begin at the first; then eval. Their phases alternate, so D = 0 |
| external | trainer, reward: the engines run elsewhere, and their hosts need no GPU |
| trainer_only | trainer |
| rollout_only | engines, eval, reward |

A critic has the trainer's slices.

>>> placement = place(Demand(trainer_ranks=2, trainer_gpus=1, engines=1, engine_gpus=2, gpus_per_node=4))
>>> placement.gpus, [str(part) for part in placement.units[Part.TRAINER]], [str(part) for part in placement.units[Part.ENGINE]]
(4, ['0', '1'], ['2-3'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from consumer.critic.config import GAE
from deploy.config import UpConfig
from producer.engine.sglang.arguments import gpus_of_engine
from protocol.errors import ConfigError

Layout: TypeAlias = Literal["disaggregated", "colocated", "external", "trainer_only", "rollout_only"]


class Part(StrEnum):
    """Who has GPUs in a run."""

    TRAINER = "trainer"
    CRITIC = "critic"
    ENGINE = "engine"
    EVAL = "eval"
    REWARD = "reward"


_PARTS: Mapping[Layout, tuple[Part, ...]] = {
    "disaggregated": (Part.TRAINER, Part.ENGINE, Part.EVAL, Part.REWARD),
    "colocated": (Part.TRAINER, Part.ENGINE, Part.REWARD, Part.EVAL),
    "external": (Part.TRAINER, Part.ENGINE, Part.EVAL, Part.REWARD),
    "trainer_only": (Part.TRAINER,),
    "rollout_only": (Part.ENGINE, Part.EVAL, Part.REWARD),
}
_TAKE_TURNS = frozenset({Part.TRAINER, Part.ENGINE, Part.REWARD})
_TRAINS = (Part.TRAINER, Part.CRITIC)
_ENGINES = (Part.ENGINE, Part.EVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a run asks of a cluster."""

    layout: Layout = "disaggregated"
    trainer_ranks: int = 1
    trainer_gpus: int = 0
    """Of each rank."""
    critic: bool = False
    engines: int = 1
    engine_gpus: int = 0
    """Of one engine, over all of its nodes."""
    engine_nodes: int = 1
    eval_engines: int = 0
    """Of the same size as the others."""
    reward_engines: int = 0
    reward_gpus: int = 1
    gpus_per_node: int = 8
    nodes: int = 0
    """0: as many as it takes."""

    def units(self, part: Part) -> tuple[int, int]:
        """How many units the part has, and the GPUs of each."""
        match part:
            case Part.TRAINER:
                return self.trainer_ranks, self.trainer_gpus
            case Part.CRITIC:
                return (self.trainer_ranks if self.critic else 0), self.trainer_gpus
            case Part.ENGINE:
                return self.engines, 0 if self.layout == "external" else self.engine_gpus
            case Part.EVAL:
                return self.eval_engines, 0 if self.layout == "external" else self.engine_gpus
            case Part.REWARD:
                return self.reward_engines, self.reward_gpus

    @property
    def room(self) -> Room:
        """Of one engine."""
        return Room(self.engine_nodes, self.engine_gpus // self.engine_nodes)


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine over several nodes has to itself: bundle `r` for its node `r`, no two of them on one node of the cluster.

    A bundle is moved as a whole, so the loss of a node tears nothing apart.
    """

    nodes: int
    gpus: int
    """In each bundle. 0: CPUs alone."""

    def __str__(self) -> str:
        return f"({self.nodes} nodes of {self.gpus} GPUs)" if self.gpus else f"({self.nodes} nodes without GPU)"


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Sorted bundles `start` to `stop`, the last one not included."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return str(self.start) if len(self) == 1 else f"{self.start}-{self.stop - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Invariant: slices of different units have no bundle in common, but for a critic and its trainer, and for whom a colocated run has take turns."""

    demand: Demand
    gpus: int
    """Bundles of one GPU each; they come first."""
    cpus: int
    """Bundles without a GPU, one for each unit that needs none."""
    units: Mapping[Part, tuple[Slice, ...]]
    """The slice of each unit. A part that the layout leaves out, or of which there are none, is not in it."""
    rooms: Mapping[Part, tuple[Room, ...]]
    """Of each engine over several nodes, which has no slice. As for `units`."""

    @property
    def bundles(self) -> int:
        return self.gpus + self.cpus

    def slice(self, part: Part) -> Slice:
        """From the first bundle of the part to its last. Raises: `KeyError` if the layout has no such part."""
        units = self.units[part]
        return Slice(units[0].start, units[-1].stop)

    @property
    def asked(self) -> str:
        """For people."""
        said = []
        for part, units in self.units.items():
            size = f"{len(units)} × {self.demand.units(part)[1]} GPUs" if units[0].start < self.gpus else f"{len(units)} without GPU"
            said.append(f"{part} {size}" + (" (the trainer's)" if part is Part.CRITIC else ""))
        said += [f"{part} {len(rooms)} × {rooms[0]}" for part, rooms in self.rooms.items()]
        shared = ", taking turns on the same GPUs" if self.demand.layout == "colocated" and self.gpus else ""
        return f"{', '.join(said) or 'nothing'}{shared}"


def demand_of(config: UpConfig) -> Demand:
    """What [placement] asks for, and what it leaves to [trainer], [engine] and [eval]. Raises: `ConfigError` for sections that contradict each other."""
    placement, engine = config.placement, config.engine
    layout = "external" if engine.kind == "external" and placement.layout == "disaggregated" else placement.layout
    if layout == "external" and engine.kind != "external":
        raise ConfigError(f'placement.layout "external" with engine.kind "{engine.kind}": use kind = "external" and urls, or another layout')
    if layout == "colocated" and engine.kind == "external":
        raise ConfigError('placement.layout "colocated" with engine.kind "external": engines that run elsewhere share no GPU with the trainer; use "external"')
    of_kind = gpus_of_engine(engine)
    if 0 < placement.engine_gpus < of_kind:
        raise ConfigError(
            f"placement.engine_gpus {placement.engine_gpus} is below the {of_kind} GPUs that one engine takes by engine.tp and engine.args: raise it, or leave "
            "it out"
        )
    return Demand(
        layout=layout,
        trainer_ranks=config.trainer.ranks,
        trainer_gpus=placement.trainer_gpus or int(config.trainer.device != "cpu"),
        critic=config.trainer.advantage == GAE,
        engines=engine.count,
        engine_gpus=placement.engine_gpus or of_kind,
        engine_nodes=engine.nodes,
        eval_engines=config.eval.engines,
        reward_engines=placement.reward_engines,
        reward_gpus=placement.reward_gpus,
        gpus_per_node=placement.gpus_per_node,
        nodes=placement.nodes,
    )


def place(demand: Demand) -> Placement:
    """The layout of a run.

    Raises: `ConfigError` if it needs more nodes than it may take, or if the GPUs of one engine would lie on other nodes than they may; what was asked, what
    there is, what to change.
    """
    _check(demand)
    apart = _ENGINES if demand.engine_nodes > 1 else ()
    counted = [(part, *demand.units(part)) for part in _PARTS[demand.layout]]
    rooms = {part: (demand.room,) * count for part, count, _ in counted if count and part in apart}
    counted = [asked for asked in counted if asked[0] not in apart]
    units: dict[Part, tuple[Slice, ...]] = {}
    gpus = 0
    for part, count, size in counted:
        if not count or not size:
            continue
        turns = demand.layout == "colocated" and part in _TAKE_TURNS
        start = 0 if turns else gpus
        units[part] = tuple(Slice(start + unit * size, start + (unit + 1) * size) for unit in range(count))
        gpus = max(gpus, count * size) if turns else gpus + count * size
    bundles = gpus
    for part, count, size in counted:
        if count and not size:
            units[part] = tuple(Slice(bundles + unit, bundles + unit + 1) for unit in range(count))
            bundles += count
    if demand.critic and Part.TRAINER in units:
        units[Part.CRITIC] = units[Part.TRAINER]
    units = {part: units[part] for part in Part if part in units}
    placement = Placement(demand=demand, gpus=gpus, cpus=bundles - gpus, units=units, rooms=rooms)
    _check_size(placement)
    check_nodes(placement, [f"node {index // demand.gpus_per_node}" for index in range(gpus)])
    return placement


def check_nodes(placement: Placement, nodes: Sequence[str]) -> None:
    """Whether the GPUs of each engine lie together; `nodes`: the node of each sorted bundle with a GPU, as planned or as found.

    Raises: `ConfigError` naming the engine, its GPUs and their nodes.
    """
    for part, units in placement.units.items():
        if part in _TRAINS or units[0].start >= placement.gpus:
            continue
        for index, unit in enumerate(units):
            found = nodes[unit.start : unit.stop]
            if len(set(found)) > 1:
                raise ConfigError(_torn(placement, part, index, found))


def _torn(placement: Placement, part: Part, index: int, nodes: Sequence[str]) -> str:
    demand = placement.demand
    found = ", ".join(f"{nodes.count(node)} on {node}" for node in dict.fromkeys(nodes))
    how = "placement.reward_gpus" if part is Part.REWARD else "placement.engine_gpus"
    return (
        f"placement: {part} {index} needs its {len(nodes)} GPUs on one node, and would have {found} (bundles {placement.units[part][index]} of: "
        f"{placement.asked}; placement.gpus_per_node is {demand.gpus_per_node}); let the GPUs before it fill whole nodes or multiples of {how}, or change {how}"
    )


def _check(demand: Demand) -> None:
    if demand.engine_nodes > 1 and demand.layout == "colocated":
        raise ConfigError(
            f'engine.nodes {demand.engine_nodes} with placement.layout "colocated": engines over several nodes take no turns with the trainer; use another '
            "layout"
        )
    if demand.engine_gpus % demand.engine_nodes:
        raise ConfigError(
            f"engine.nodes {demand.engine_nodes} with {demand.engine_gpus} GPUs an engine: each node must have as many of them; make engine.tp and "
            "placement.engine_gpus multiples of it"
        )
    for key, gpus in (("engine_gpus", demand.room.gpus), ("reward_gpus", demand.reward_gpus if demand.reward_engines else 0)):
        if gpus > demand.gpus_per_node:
            more = f"; for an engine over several, engine.nodes = {-(-demand.engine_gpus // demand.gpus_per_node)}" if key == "engine_gpus" else ""
            raise ConfigError(
                f"placement.{key}: {gpus} GPUs of one engine must lie on one node, and a node has {demand.gpus_per_node} (placement.gpus_per_node){more}"
            )


def _check_size(placement: Placement) -> None:
    demand = placement.demand
    if not demand.nodes:
        return
    rooms = [room for part in placement.rooms.values() for room in part]
    asked, there = placement.gpus + sum(room.nodes * room.gpus for room in rooms), demand.nodes * demand.gpus_per_node
    if asked > there:
        raise ConfigError(
            f"placement: {asked} GPUs are asked for ({placement.asked}), and there are {there}: placement.nodes {demand.nodes} × "
            f"placement.gpus_per_node {demand.gpus_per_node}; take more nodes, or fewer engines or ranks"
        )
    on_one = min(len(rooms), demand.gpus_per_node // demand.room.gpus) if demand.room.gpus else len(rooms)  # each of another engine
    if demand.nodes * on_one < len(rooms) * demand.engine_nodes:
        raise ConfigError(
            f"placement: {len(rooms)} × {demand.room} are asked for, no two nodes of one engine on one machine, and placement.nodes {demand.nodes} × "
            f"placement.gpus_per_node {demand.gpus_per_node} have room for {demand.nodes * on_one} of these {len(rooms) * demand.engine_nodes}; take more "
            "nodes, or fewer engines"
        )
