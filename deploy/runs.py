"""`rollstream runs list | delete`: every run of one Redis, and the end of one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from redis.exceptions import RedisError, ResponseError
from rich.console import Console
from rich.table import Table

from buffer.redis_ledger import RedisLedger
from deploy.config import ReaderConfig, reader_url
from protocol.config import RunConfig, Tree, load
from protocol.connection import Client, asking, check_server, connect
from protocol.errors import ConfigError, RollstreamError, RunExists, RunMissing
from protocol.keys import Keys
from protocol.messages import ProducerStatus, RelayStatus, TrainerStatus
from protocol.objects import object_store
from protocol.presence import Presence
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, is_url, relay_folder
from weightsync.registry import Registry
from weightsync.roles import RELAY

_STATE_KEY = re.compile(r"rs:\{([^{}]+)\}:state")
_DEADLINE_S = 10.0
_WIDTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run at a glance. Of one that cannot be read, `problem` says why and the rest is empty."""

    run: str
    state: str = ""
    trained: int = 0
    outstanding: int = 0
    bytes: int = 0
    trainers: int = 0
    producers: int = 0
    engines: int = 0
    shadows: int = 0
    moved_at: float | None = None
    """Unix seconds of its last audit event."""
    problem: str = ""

    @property
    def alive(self) -> tuple[str, ...]:
        counts = {"trainer": self.trainers, "producer": self.producers, "engine": self.engines, "shadow": self.shadows}
        return tuple(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)


def list_runs(options: argparse.Namespace) -> int:
    """Print every run. Raises: `ConfigError`, `RedisUnreachable`."""
    lines = asyncio.run(_list(options))
    if options.json:
        sys.stdout.buffer.write(orjson.dumps([asdict(line) for line in lines], option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return 0
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("run", "state", "steps", "outstanding", "bytes", "alive", "last moved"):
        table.add_column(title)
    now = time.time()
    for line in lines:
        moved = "-" if line.moved_at is None else f"{max(0.0, now - line.moved_at):.0f} s ago"
        figures = (line.problem,) if line.problem else (line.state, line.trained, line.outstanding, line.bytes, ", ".join(line.alive) or "nobody", moved)
        table.add_row(line.run, *map(str, figures))
    (Console() if sys.stdout.isatty() else Console(width=_WIDTH)).print(table if lines else "no run is in this Redis")
    return 0


async def _list(options: argparse.Namespace) -> list[RunLine]:
    async with reached(options) as (client, _):
        return [await look(client, Keys(run)) for run in await run_names(client)]


@contextlib.asynccontextmanager
async def reached(options: argparse.Namespace) -> AsyncIterator[tuple[Client, ReaderConfig | None]]:
    """The Redis that the command line means, and the configuration if it named one. Raises: `ConfigError`, `RedisUnreachable`."""
    config = load(ReaderConfig, options.config, sets=options.set) if options.config else None
    url = options.redis if config is None else reader_url(config.run, config.redis)
    client = connect(url, deadline_s=_DEADLINE_S)
    try:
        await check_server(client, url=url)
        yield client, config
    finally:
        await client.aclose()


async def run_names(client: Client) -> list[str]:
    """Runs that this Redis, or any node of the cluster, holds."""
    found = set()
    with asking("runs"):
        async for key in client.scan_iter(match="rs:{*}:state", count=1000):
            if (match := _STATE_KEY.fullmatch(key.decode())) is not None:
                found.add(match[1])
    return sorted(found)


async def look(client: Client, keys: Keys) -> RunLine:
    """One run. What cannot be read is said, not raised: a run of a newer release must not hide the others."""
    try:
        status = await RedisLedger(client, keys).status()
        return RunLine(
            run=keys.run,
            state=status.state.value,
            trained=status.trained,
            outstanding=status.outstanding,
            bytes=status.bytes_used,
            trainers=len(await Presence(client, keys, "trainer", TrainerStatus).members()),
            producers=len(await Presence(client, keys, "producer", ProducerStatus).members()),
            engines=len(await Registry(client, keys).engines()),
            shadows=len(await Presence(client, keys, "shadow", TrainerStatus).members()),
            moved_at=await _moved_at(client, keys),
        )
    except (RollstreamError, RedisError, ValueError, KeyError) as problem:
        return RunLine(run=keys.run, problem=f"cannot be read: {problem}")


async def _moved_at(client: Client, keys: Keys) -> float | None:
    """When its newest audit event was written, also if that has left the stream since."""
    try:
        about = await client.xinfo_stream(keys.audit)
    except ResponseError:  # there is no stream
        return None
    last = about["last-generated-id"].decode().partition("-")[0]
    return int(last) / 1000 if int(last) else None


# -- delete --------------------------------------------------------------------------------------------------------------------------------------


def delete_run(options: argparse.Namespace) -> int:
    """Delete a run and say what was deleted and what is left. Raises: `RunMissing`, `RunExists` while something is alive in it, `ConfigError`."""
    for said in asyncio.run(_delete(options)):
        sys.stdout.write(f"{said}\n")
    return 0


async def _delete(options: argparse.Namespace) -> list[str]:
    async with reached(options) as (client, _):
        keys = Keys(options.run)
        if options.run not in await run_names(client):
            if leftovers := await RedisLedger(client, keys).delete_run():
                return [f"{options.run}: was no run any more; {leftovers} keys that had been left of it are deleted"]
            raise RunMissing(f"run {options.run!r} is not in this Redis: see `rollstream runs list`")
        line = await look(client, keys)
        if not options.force and (line.alive or line.problem):
            seen = line.problem or f"{', '.join(line.alive)} alive in it"
            raise RunExists(f"run {options.run!r} is not deleted: {seen}; stop its processes first, or use --force")
        of_run = _of_run(options)
        places, stays = await _files(client, keys, of_run)
        said = [f"{options.run}: {await RedisLedger(client, keys).delete_run()} keys deleted from Redis"]
        for what, where in places:
            if options.files:
                said.append(f"{what} {where}: " + await asyncio.to_thread(_remove, where))
            else:
                said.append(f"{what} {where}: left (--files deletes it)")
        return [*said, *stays, "its folder with checkpoints and records is left"]


class _OfRun(Tree):
    """What a file tells of a run that no Redis knows."""

    run: RunConfig
    weights: WeightsConfig = WeightsConfig()


def _of_run(options: argparse.Namespace) -> _OfRun | None:
    """The file that was named, if it is of this run. Raises: `ConfigError`."""
    config = load(_OfRun, options.config, sets=options.set) if options.config else None
    return config if config is not None and config.run.name == options.run else None


async def _files(client: Client, keys: Keys, of_run: _OfRun | None) -> tuple[list[tuple[str, str]], list[str]]:
    """(what, folder or URL) that only this run uses outside Redis and outside its own folder; and what is said of the rest."""
    found, stays, copied = [], [], False
    with contextlib.suppress(RollstreamError, ValueError, KeyError):
        newest = await Channel(client, keys).newest()
        copied = newest is not None and (newest.kind == "delta" or is_url(newest.location))
        if newest is not None and is_url(newest.location):
            stays.append(f"weights {newest.location.rpartition('/')[0]}: left, as versions behind a URL are not deleted; use the tools of that store")
        elif newest is not None and (store := Path(newest.location).parent).is_dir() and _named_after(store, keys.run):
            found.append(("weights", str(store)))
    if of_run is not None:
        relay = relay_folder(of_run.weights, of_run.run)
        if relay.is_dir() and not relay.is_relative_to(of_run.run.folder):
            found.append(("copies of weights on this machine", str(relay)))
    elif copied or await _has_relays(client, keys):
        stays.append("copies of weights on machines with engines: left, as only the run's file tells where; with -c and that file, this machine's are found")
    with contextlib.suppress(RollstreamError, ValueError, KeyError):
        _, settings = await RedisLedger(client, keys).about()
        found += [(name, f"{where.rstrip('/')}/{keys.run}") for name, where in (("spill", settings.spill), ("blobs", settings.blobs)) if where]
    return found, stays


def _named_after(folder: Path, run: str) -> bool:
    return folder.name == run or folder.name.startswith(f"{run}-")


async def _has_relays(client: Client, keys: Keys) -> bool:
    """Whether a relay ever announced itself in this run."""
    return await Presence(client, keys, RELAY, RelayStatus).last_seen() is not None


def _remove(where: str) -> str:
    """Everything in a folder or behind a URL; what was done, or why not."""
    try:
        store = object_store(where, key="--files")
        names = store.names()
        if Path(store.url).is_dir():
            shutil.rmtree(store.url)
        else:
            for name in names:
                store.delete(name)
    except (OSError, ConfigError) as problem:
        return f"not deleted ({problem})"
    return f"{len(names)} files deleted"
