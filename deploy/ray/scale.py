"""`rollstream scale producers N` and `scale engines N`: while a run goes on, on Ray."""

from __future__ import annotations

import argparse
import asyncio
import sys

from deploy.config import UpConfig
from deploy.ray.crew import ENGINE, PRODUCER, Crew
from deploy.ray.placement_group import find, kept
from producer.ray_actor import namespace
from producer.ray_fleet import Fleet, connected, read_settings
from protocol.config import load
from protocol.connection import check_server, connect
from protocol.daemon import run_daemon
from protocol.errors import ConfigError, RunMissing
from protocol.keys import Keys

ROLES = {"producers": PRODUCER, "engines": ENGINE}


def scale(options: argparse.Namespace) -> int:
    return run_daemon("rollstream scale", lambda _: _scale(options))


async def _scale(options: argparse.Namespace) -> None:
    """Have N of them, and return once who was added has a place and who was too many has left. Those of the highest index leave.

    Engines of an evaluation's own are not counted and stay. Raises: `ConfigError`, `RayUnavailable`.
    """
    config = load(UpConfig, options.config, sets=options.set)
    address = options.ray or config.ray.address
    if options.ray is None and not address:
        raise ConfigError(_on_one_machine(config, options))
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
    async with connected(address, config.run.name):
        group = await asyncio.to_thread(find, namespace(config.run.name))
        crew = Crew(config, settings, Fleet(config.run.name), group=group, dealt=dealt if group is not None else {})
        added, gone = await change(crew, role, options.count)
    sys.stdout.write(f"{options.what}: {options.count} now; added {', '.join(added) or 'none'}; left {', '.join(gone) or 'none'}\n")


async def change(crew: Crew, role: str, count: int) -> tuple[list[str], list[str]]:
    """Who was added, and who has left."""
    there = await crew.fleet.names(role)
    own = {f"{ENGINE}-{index}" for index in range(crew.config.engine.count, crew.config.engine.count + crew.config.eval.engines)} if role == ENGINE else set()
    mine = [name for name in there if name not in own]
    gone = mine[count:]
    await asyncio.gather(*(crew.stop(name) for name in gone))
    free = (name for index in range(len(there) + len(own) + count) if (name := f"{role}-{index}") not in {*there, *own})
    added = [name for name, _ in zip(free, range(count - len(mine)), strict=False)]
    try:
        for name in added:
            await crew.start(name)
        await crew.fleet.wait_started(added, within_s=crew.config.placement.wait_seconds)
    except BaseException:
        await asyncio.gather(*(crew.stop(name) for name in added))
        raise
    return added, gone


def _on_one_machine(config: UpConfig, options: argparse.Namespace) -> str:
    role = ROLES[options.what]
    command = f"rl-producer -c {options.config} --index I" if role == PRODUCER else f"rollstream engine -c {options.config} --index I"
    redis = "" if config.redis.url else f" --set redis.url=URL (redis_url in {config.run.folder / 'processes.json'})"
    return (
        "ray.address is empty: a run of `rollstream up` on one machine has as many processes as it was started with. Add one by hand, with an index that is "
        f"free: `{command}{redis}`; Ctrl-C ends it in good order. A run on Ray: --ray [ADDRESS], or ray.address"
    )
