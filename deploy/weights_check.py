"""`rollstream weights check`: every engine holds the version that it says it serves, asked of the engines themselves (rule W9)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import orjson
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from deploy.config import reader_url
from producer.engine.key import engine_key
from protocol.config import RedisConfig, RunConfig, Tree, load
from protocol.connection import connect
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, DecodeError, RedisUnavailable, RunMissing, VersionGone
from protocol.keys import Keys
from protocol.messages import EngineStatus, Manifest
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.control import EngineControl
from weightsync.equality import Finding, Verdict, check_engines
from weightsync.mirror import Mirror
from weightsync.registry import Registry
from weightsync.store import DirectoryStore, VersionStore, open_store

_REDIS_S = 3.0
_ENGINE_S = 60.0
"""An engine of many gigabytes takes seconds for its checksums."""
_WHOLE_S = 300.0
_WIDTH = 200
_GOOD = frozenset({Verdict.SAME, Verdict.ALONE})


class WeightsCheckConfig(Tree):
    """The sections that the check reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()


def check(path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Print what was found of each engine. Exit code 0: none holds anything else than it should; 1: one does, or cannot be asked.

    Raises: `ConfigError`, `RunMissing`, `RedisUnavailable`; `WeightError` if a published version cannot be read to compare with.
    """
    config = load(WeightsCheckConfig, path, sets=sets)
    url = reader_url(config.run, config.redis)
    try:
        found = asyncio.run(check_run(config, url))
    except (RedisError, OSError) as problem:
        raise RedisUnavailable(f"redis.url {url}: no answer ({problem}); is the run up?") from problem
    if as_json:
        rows = [{"engine_id": one.engine_id, "version": one.version, "verdict": one.verdict.value, "why": one.why} for one in found]
        sys.stdout.buffer.write(orjson.dumps({"engines": rows}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        (Console() if sys.stdout.isatty() else Console(width=_WIDTH)).print(_table(found))
    return EXIT_DRAINED if all(one.verdict in _GOOD for one in found) else EXIT_FAULT


async def check_run(config: WeightsCheckConfig, url: str) -> list[Finding]:
    """A finding for each engine of the run at `url`, one engine at a time."""
    client, keys = connect(url, deadline_s=_REDIS_S), Keys(config.run.name)
    store = open_store(config.weights, config.run)
    mirror = Mirror(relay_folder(config.weights, config.run), store, Channel(client, keys), keep=config.weights.keep)
    try:
        if not await client.exists(keys.state):
            raise RunMissing(f"there is no run {config.run.name!r} in {url}: start it, or correct run.name or redis.url")
        async with aiohttp.ClientSession() as session:

            def control_of(engine: EngineStatus) -> EngineControl:
                return EngineControl(session, engine.url, api_key=engine_key())

            return await check_engines(
                await Registry(client, keys).engines(),
                control_of,
                manifest_of=lambda name: asyncio.to_thread(_published, store, name),
                whole=lambda manifest: _whole(manifest, store, mirror),
                deadline_s=_ENGINE_S,
            )
    finally:
        await client.aclose()


def _published(store: VersionStore, name: str) -> Manifest | None:
    """None for base weights, and for a version whose files are gone."""
    try:
        return store.manifest(Version.parse(name))
    except (DecodeError, VersionGone):
        return None


async def _whole(manifest: Manifest, store: VersionStore, mirror: Mirror) -> Path:
    if manifest.kind == "full" and isinstance(store, DirectoryStore):
        return store.locate(manifest)
    return await mirror.ensure(manifest, deadline_s=_WHOLE_S)


def _table(found: Sequence[Finding]) -> Table | str:
    if not found:
        return "no engine is registered"
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("engine", "version", "verdict", "why"):
        table.add_column(title)
    for one in found:
        table.add_row(one.engine_id, one.version or "-", one.verdict.value, one.why or "-")
    return table
