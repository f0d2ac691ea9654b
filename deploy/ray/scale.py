"""`rollstream scale` of a run on Ray: actors are added, or have left."""

from __future__ import annotations

import argparse
import asyncio
import sys

from deploy.config import UpConfig
from deploy.ray.crew import Crew
from deploy.ray.placement_group import find, kept
from deploy.scaling import ROLES, change_to
from deploy.stop_times import ENGINE
from producer.ray_actor import namespace
from producer.ray_fleet import Fleet, connected, read_settings
from protocol.connection import check_server, connect
from protocol.errors import RunMissing
from protocol.keys import Keys


async def scale_on_ray(options: argparse.Namespace, config: UpConfig) -> None:
    """Have N of them, and return once who was added has a place and who was too many has left. Those of the highest index leave.

    Engines of an evaluation's own are not counted and stay. Raises: `RunMissing`, `ConfigError`, `RayUnavailable`.
    """
    role = ROLES[options.what]
    settings = read_settings(options.config, options.set, config, run=config.run.name, digest=config.digest)
    client = connect(config.redis.url, deadline_s=5.0)
    try:
        await check_server(client, url=config.redis.url)
        if not await client.exists(Keys(config.run.name).state):
            raise RunMissing(f"there is no run {config.run.name!r} in {config.redis.url}: start it with `rollstream up --ray`")
        dealt = (await kept(client, config.run.name))[1]
    finally:
        await client.aclose()
    async with connected(options.ray or config.ray.address, config.run.name):
        group = await asyncio.to_thread(find, namespace(config.run.name))
        crew = Crew(config, settings, Fleet(config.run.name), group=group, dealt=dealt if group is not None else {})
        added, gone = await change(crew, role, options.count)
    sys.stdout.write(f"{options.what}: {options.count} now; added {', '.join(added) or 'none'}; left {', '.join(gone) or 'none'}\n")


async def change(crew: Crew, role: str, count: int) -> tuple[list[str], list[str]]:
    """Who was added, and who has left."""
    evaluation = range(crew.config.engine.count, crew.config.engine.count + crew.config.eval.engines) if role == ENGINE else ()
    to = change_to(count, there=[int(name.rpartition("-")[2]) for name in await crew.fleet.names(role)], reserved=evaluation)
    added, gone = ([f"{role}-{index}" for index in indices] for indices in (to.added, to.gone))
    await asyncio.gather(*(crew.stop(name) for name in gone))
    try:
        for name in added:
            await crew.start(name)
        await crew.fleet.wait_started(added, within_s=crew.config.placement.wait_seconds)
    except BaseException:
        await asyncio.gather(*(crew.stop(name) for name in added))
        raise
    return added, gone
