"""`rollstream weights check`: every engine holds the version that it says it serves, asked of the engines themselves (rule W9)."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from deploy.config import reader_url
from producer.engine.key import engine_key
from protocol.config import RedisConfig, RunConfig, Tree, load
from protocol.connection import connect
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, ApplyFailed, DecodeError, EngineUnavailable, RedisUnavailable, RunMissing, VersionGone
from protocol.keys import Keys
from protocol.messages import EngineStatus, Manifest
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.control import CALL_S, EngineControl
from weightsync.equality import Finding, Verdict, check_engines
from weightsync.mirror import Mirror
from weightsync.registry import Registry
from weightsync.store import DirectoryStore, VersionStore, open_store

_REDIS_S = 3.0
_ENGINE_S = 60.0
"""An engine of many gigabytes takes seconds for its checksums."""
_WHOLE_S = 300.0
_WIDTH = 200
_WRONG = frozenset({Verdict.DIFFERS, Verdict.UNKNOWN})
_NOBODY = "no engine is registered, so nothing was checked: start one, or see whether run.name is right"


class WeightsCheckConfig(Tree):
    """The sections that the check reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()


def check(path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Print what was found of each engine; meanwhile, to the errors, who has answered. Exit code 1: one holds something else than it should, or cannot be
    asked, or there is none. 0: none does, which is proven where the verdict is "same" only.

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
    elif found:
        (Console() if sys.stdout.isatty() else Console(width=_WIDTH)).print(_table(found))
    if not found:
        sys.stderr.write(f"rollstream: {_NOBODY}\n")
    return EXIT_FAULT if not found or any(one.verdict in _WRONG for one in found) else EXIT_DRAINED


async def check_run(config: WeightsCheckConfig, url: str) -> list[Finding]:
    """A finding for each engine of the run at `url`, one engine at a time."""
    client, keys = connect(url, deadline_s=_REDIS_S), Keys(config.run.name)
    store = open_store(config.weights, config.run)
    mirror = Mirror(
        relay_folder(config.weights, config.run), store, Channel(client, keys), keep=config.weights.keep, bucket_bytes=config.weights.bucket_mb << 20
    )
    try:
        if not await client.exists(keys.state):
            raise RunMissing(f"there is no run {config.run.name!r} in {url}: start it, or correct run.name or redis.url")
        engines = await Registry(client, keys).engines()
        progress = _Progress(len(engines))
        async with aiohttp.ClientSession() as session:
            return await check_engines(
                engines,
                lambda engine: _Told(session, engine, progress),
                manifest_of=lambda name: asyncio.to_thread(_published, store, name),
                whole=lambda manifest: _whole(manifest, store, mirror),
                deadline_s=_ENGINE_S,
            )
    finally:
        await client.aclose()


class _Progress:
    """A line to the errors for each engine that is asked, and for its answer: a slow one hides none of those before it, also where the asker gives up."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._asked = 0
        self._began = 0.0

    def asking(self, engine: EngineStatus) -> None:
        self._asked += 1
        self._began = time.monotonic()
        self._say(f"{engine.engine_id} ({self._asked} of {self._engines}): asking {engine.url}, for up to {_ENGINE_S:.0f} s a call")

    def answered(self, engine: EngineStatus) -> None:
        self._say(f"{engine.engine_id}: checksums after {time.monotonic() - self._began:.1f} s")

    def refused(self, engine: EngineStatus, problem: Exception) -> None:
        self._say(f"{engine.engine_id}: none after {time.monotonic() - self._began:.1f} s: {problem}")

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class _Told(EngineControl):
    """Control of an engine whose answers are told."""

    def __init__(self, session: aiohttp.ClientSession, engine: EngineStatus, progress: _Progress) -> None:
        super().__init__(session, engine.url, api_key=engine_key())
        self._engine, self._progress = engine, progress
        progress.asking(engine)

    async def server_info(self, *, deadline_s: float = CALL_S) -> Mapping[str, Any]:
        try:
            return await super().server_info(deadline_s=deadline_s)
        except (ApplyFailed, EngineUnavailable, DecodeError) as problem:
            self._progress.refused(self._engine, problem)
            raise

    async def weights_checksum(self, *, deadline_s: float) -> Mapping[str, Any]:
        try:
            answer = await super().weights_checksum(deadline_s=deadline_s)
        except (ApplyFailed, EngineUnavailable, DecodeError) as problem:
            self._progress.refused(self._engine, problem)
            raise
        self._progress.answered(self._engine)
        return answer


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


def _table(found: Sequence[Finding]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title in ("engine", "version", "verdict", "why"):
        table.add_column(title)
    for one in found:
        table.add_row(one.engine_id, one.version or "-", one.verdict.value, one.why or "-")
    return table
