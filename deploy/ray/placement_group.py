"""One placement group for a run, and one for each engine over several nodes: reserved within a bound, probed, and dealt out in the order of nodes and GPUs.

    Placement ──► placement group (PACK, detached) ──► node and GPU of each bundle ──► sorted ──► bundles of each actor, kept in Redis
        └───────► rooms (STRICT_SPREAD, detached), a group for each engine over several nodes: its bundle r is of its node r

What was dealt out stays: an actor that starts anew, or a driver that comes later, finds its bundles in Redis. A bundle whose node is lost is found another
place by Ray, with its index.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from deploy.placement import Part, Placement, check_nodes
from producer.ray_actor import namespace, probe
from producer.ray_fleet import RayUnavailable, free
from protocol.connection import Client, asking
from protocol.errors import ConfigError
from protocol.keys import Keys

_LOG = logging.getLogger(__name__)
_LOOK_S = 2.0
_PROBE_S = 300.0
"""For all bundles of a group that has room to say where they lie: a process is started in each, which takes minutes where machines are busy."""
WHOLE_GPU = 0.9
"""What the one tenant of a GPU takes of it in Ray's books, so that the bundle can still be asked where it lies."""
_ALIVE = ("CREATED", "PENDING", "RESCHEDULING", "PREPARED")
PACK, TOGETHER, SPREAD = "PACK", "STRICT_PACK", "STRICT_SPREAD"
_HOW = {PACK: "on as few nodes as can be", TOGETHER: "on one node", SPREAD: "each on a node of its own"}
_SOON_S = 1.0
"""For a group whose turn comes when the time is up: there may be room."""
_SIGN = {"CPU": 0.001}
"""In the group of a run whose engines have all there is: that there is a group says that the run holds something."""
Bundles: TypeAlias = list[dict[str, float]]
_GROUP = "group"
"""Field of the hash: id and shape of the group. The others are names of actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Where one bundle lies."""

    index: int
    """In the placement group."""
    node: str
    address: str
    gpu: str
    """Empty: it has none."""

    @property
    def order(self) -> tuple[bool, tuple[tuple[int, ...], str], str, tuple[int, str]]:
        """Those with a GPU first; then by address, as numbers where it is one, by node, by GPU."""
        parts = self.address.split(".")
        numbers = tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()
        number = int(self.gpu) if self.gpu.isdigit() else 0
        return (not self.gpu, (numbers, self.address), self.node, (number, self.gpu))


def deal(placement: Placement, bundles: Iterable[Bundle], names: Mapping[Part, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """The bundles of each actor, by its name. Pure. Raises: `ConfigError` if an engine's GPUs turn out to lie on several nodes."""
    ordered = sorted(bundles, key=lambda bundle: bundle.order)
    hosts = {bundle.node: f"{bundle.address} (node {bundle.node[:8]})" for bundle in ordered}
    check_nodes(placement, [hosts[bundle.node] for bundle in ordered[: placement.gpus]])
    return {
        name: tuple(bundle.index for bundle in ordered[unit.start : unit.stop])
        for part, units in placement.units.items()
        for name, unit in zip(names.get(part, ()), units, strict=False)
    }


async def reserve(
    placement: Placement, names: Mapping[Part, Sequence[str]], *, rooms: Mapping[str, Bundles], run: str, cpus: float, wait_s: float, client: Client
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The group of the run and the bundles of each actor in it: those of the group that is there, or of a new one. With a new one come the `rooms`, of engines
    by name, which ask for more at once and so come first. What is not dealt out is removed.

    Raises: `RayUnavailable` if the cluster has no room within `wait_s`: what was asked, what is there. `ConfigError` if the group that is there is of another
    layout, or the bundles found tear an engine apart.
    """
    key = Keys(run).placement
    name = namespace(run)
    about, there = await kept(client, run)
    group = await asyncio.to_thread(find, name)
    shape = {"gpus": placement.gpus, "cpus": placement.cpus, "asked": placement.asked}
    if group is not None and about.get("id") == group.id.hex():
        if about != shape | {"id": group.id.hex()}:
            raise ConfigError(
                f"placement: the run holds bundles for {about['asked']}, and this configuration asks for {placement.asked}: end the run first, or go on "
                "with the layout it has; engines are added by `rollstream scale`"
            )
        return group, there
    bundles = [{"GPU": 1.0, "CPU": cpus}] * placement.gpus + [{"CPU": cpus}] * placement.cpus or [_SIGN]
    asked = [(room(run, engine), wanted, f"{engine} of: {placement.asked}", SPREAD) for engine, wanted in rooms.items()]
    clock = asyncio.get_running_loop().time
    deadline, made = clock() + wait_s, list[Any]()
    try:
        for called, wanted, said, strategy in (*asked, (name, bundles, placement.asked, PACK)):
            if (left := await asyncio.to_thread(find, called)) is not None:  # made by a driver that did not come to deal it out
                await asyncio.to_thread(remove, left)
            group = await new_group(called, wanted, asked=said, wait_s=max(_SOON_S, deadline - clock()), strategy=strategy)
            made.append(group)
        dealt = deal(placement, await look(group), names)
        record: dict[str, object] = {**dealt, _GROUP: shape | {"id": group.id.hex()}}
        with asking("placement"):
            await client.delete(key)
            await client.hset(key, mapping={field: orjson.dumps(value) for field, value in record.items()})
    except BaseException:
        await asyncio.shield(asyncio.to_thread(_remove_all, made))
        raise
    return group, dealt


def room(run: str, engine: str) -> str:
    """What a group is called that one engine has to itself."""
    return f"{namespace(run)}/{engine}"


async def kept(client: Client, run: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """What Redis has of the run's group, and the bundles of each actor in it; empty if there was none."""
    with asking("placement"):
        raw: dict[Any, Any] = await client.hgetall(Keys(run).placement)
    found = {field.decode(): orjson.loads(value) for field, value in raw.items()}
    about: dict[str, Any] = found.pop(_GROUP, {})
    return about, {name: tuple(bundles) for name, bundles in found.items()}


async def new_group(name: str, bundles: Bundles, *, asked: str, wait_s: float, strategy: str = PACK) -> Any:
    """Raises: `RayUnavailable`; nothing stays reserved then, nor when this is cancelled."""
    import ray

    making = asyncio.create_task(
        asyncio.to_thread(lambda: ray.util.placement_group(bundles, strategy=strategy, name=name, lifetime="detached")), name="placement:make"
    )
    try:
        group = await asyncio.shield(making)
        await _wait(group, lambda: f"{_shape(bundles)}, {_HOW[strategy]} ({asked}); {free()}", wait_s)
    except BaseException:
        await asyncio.shield(_unmake(making))
        raise
    return group


async def _unmake(making: asyncio.Task[Any]) -> None:
    """A group may be made by a call that nobody waits for any more."""
    await asyncio.wait((making,))
    if making.exception() is None:
        await asyncio.to_thread(remove, making.result())


async def _wait(group: Any, said: Callable[[], str], wait_s: float) -> None:
    clock = asyncio.get_running_loop().time
    deadline, told = clock() + wait_s, False
    while not await _to_its_end(asyncio.create_task(asyncio.to_thread(group.wait, max(0.1, min(_LOOK_S, deadline - clock()))))):
        if clock() >= deadline:
            raise RayUnavailable(f"placement: no room within {wait_s:.0f} s for {await asyncio.to_thread(said)}")
        if not told:
            _LOG.info("waiting for room for %s", await asyncio.to_thread(said))
            told = True


async def _to_its_end(asked: asyncio.Task[bool]) -> bool:
    """Also when it is cancelled: the connection to Ray must not be closed below a thread that asks it."""
    try:
        return await asyncio.shield(asked)
    finally:
        await asyncio.wait((asked,))


async def look(group: Any) -> list[Bundle]:
    """Where each bundle of the group lies now. Raises: `RayUnavailable` if one does not tell in time."""
    try:
        async with asyncio.timeout(_PROBE_S):
            found = await asyncio.gather(*(probe(group, index) for index in range(len(group.bundle_specs))))
    except TimeoutError as problem:
        raise RayUnavailable(f"placement: the bundles of the group did not answer within {_PROBE_S:.0f} s; try again") from problem
    return [Bundle(index=index, node=node, address=address, gpu=gpu) for index, (node, address, gpu) in enumerate(found)]


def seat(group: Any, bundle: int) -> Any:
    """Ray's strategy for what is to run in that bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False)


def find(name: str) -> Any:
    """The group of that name that is there, or on its way to another node; None: there is none."""
    import ray

    try:
        group = ray.util.get_placement_group(name)
    except ValueError:
        return None
    return group if ray.util.placement_group_table(group).get("state") in _ALIVE else None


def remove(group: Any) -> None:
    import ray

    ray.util.remove_placement_group(group)


def _remove_all(groups: Iterable[Any]) -> None:
    for group in groups:
        remove(group)


def _shape(bundles: Iterable[Mapping[str, float]]) -> str:
    counted = Counter(" ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    return ", ".join(f"{count} × ({bundle})" for bundle, count in counted.items())
