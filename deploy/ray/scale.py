"""`rollstream scale` of a run on Ray: actors are added, or have left."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection

from deploy.config import UpConfig
from deploy.ray.crew import Crew
from deploy.ray.placement_group import find, kept
from deploy.scale import NotScaled, Slow
from deploy.scaling import ROLES, change_to, refuses
from deploy.stop_times import ENGINE
from producer.engine.host import engine_id
from producer.engine.nodes import statuses
from producer.ray_actor import namespace
from producer.ray_fleet import Fleet, connected, ended_how, read_settings
from producer.ray_names import index_of, rank_of, role_of, unit_of
from protocol.connection import Client, check_server, connect
from protocol.errors import ConfigError, RunMissing
from protocol.keys import Keys
from protocol.messages import ProducerStatus
from protocol.presence import Presence
from weightsync.registry import Registry

_LOOK_S = 0.5
Announced = Callable[[str], Awaitable[bool]]


async def scale_on_ray(options: argparse.Namespace, config: UpConfig) -> None:
    """Have N of them, and return once who was added has announced itself and who was too many has left. Those of the highest index leave.

    Engines of an evaluation's own are not counted and stay. Raises: `RunMissing`, `ConfigError`, `RayUnavailable`, `NotScaled`, `Slow`.
    """
    role = ROLES[options.what]
    settings = read_settings(options.config, options.set, config, run=config.run.name, digest=config.digest)
    client = connect(config.redis.url, deadline_s=5.0)
    try:
        await check_server(client, url=config.redis.url)
        if not await client.exists(Keys(config.run.name).state):
            raise RunMissing(f"there is no run {config.run.name!r} in {config.redis.url}: start it with `rollstream up --ray`")
        dealt = (await kept(client, config.run.name))[1]
        async with connected(options.ray or config.ray.address, config.run.name):
            group = await asyncio.to_thread(find, namespace(config.run.name))
            crew = Crew(config, settings, Fleet(config.run.name), group=group, dealt=dealt if group is not None else {})
            added, gone = await change(crew, role, options.count, announced=lambda name: _announced(config, client, name))
    finally:
        await client.aclose()
    sys.stdout.write(f"{options.what}: {options.count} now; added {', '.join(added) or 'none'}; left {', '.join(gone) or 'none'}\n")


async def change(crew: Crew, role: str, count: int, *, announced: Announced) -> tuple[list[str], list[str]]:
    """Who was added, and who has left. Raises: `ConfigError` before anything is done; `RayUnavailable`; as `_until_there`."""
    config = crew.config
    evaluation = range(config.engine.count, config.engine.count + config.eval.engines) if role == ENGINE else ()
    names = await crew.fleet.names(role)
    to = change_to(count, there=[index_of(name) for name in names if not rank_of(name)], reserved=evaluation)
    if role == ENGINE and (why := next(filter(None, (refuses(config.engine, index) for index in to.added)), "")):
        raise ConfigError(why)
    added = [name for index in to.added for name in crew.members(f"{role}-{index}")]
    gone = [name for name in names if index_of(name) in to.gone]
    await crew.stop(*gone)
    try:
        for name in added:
            await crew.start(name)
        await crew.fleet.wait_started(added, within_s=config.placement.wait_seconds)
    except BaseException:
        await crew.stop(*added)
        raise
    await _until_there(crew, added, announced)
    return added, gone


async def _until_there(crew: Crew, names: Collection[str], announced: Announced) -> None:
    """Return once all have announced themselves. Raises: `NotScaled` for those that have ended instead, which are gone then, an engine whole; `Slow`."""
    wait_s, left, ended = crew.config.placement.wait_seconds, set(names), dict[str, str]()
    try:
        async with asyncio.timeout(wait_s):
            while left:
                for name in sorted(left):
                    about = await crew.fleet.about(name, timeout_s=wait_s)
                    if about is not None and about.code is not None:
                        ended[name] = ended_how(about)
                    if name in ended or await announced(name):
                        left.remove(name)
                if left:
                    await asyncio.sleep(_LOOK_S)
    except TimeoutError as problem:
        raise Slow(
            f"{', '.join(sorted(left))}: not announced within placement.wait_seconds = {wait_s:g}; Ray goes on trying, and its logs say why"
        ) from problem
    finally:
        lost = {unit_of(name) for name in ended}
        await crew.stop(*(name for name in names if unit_of(name) in lost))
    if ended:
        raise NotScaled("; ".join(f"{name} {how}" for name, how in ended.items()))


async def _announced(config: UpConfig, client: Client, name: str) -> bool:
    keys, role = Keys(config.run.name), role_of(name)
    if role == ENGINE:
        mine, rank = engine_id(config.run, index_of(name)), rank_of(name)
        if rank:
            return (mine, rank) in {(node.engine_id, node.rank) for node in await statuses(client, keys).members()}
        return mine in {engine.engine_id for engine in await Registry(client, keys).engines()}
    return name in {producer.producer_id for producer in await Presence(client, keys, role, ProducerStatus).members()}
