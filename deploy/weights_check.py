"""`rollstream weights check`: every engine holds the version that it says it serves, asked of the engines themselves (rule W9), and none is left behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import orjson
from redis.exceptions import RedisError

from buffer.redis_ledger import RedisLedger
from deploy.config import reader_url
from deploy.snapshot import lag_of
from deploy.trouble import trouble_of
from producer.engine.key import admin_key, engine_key
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
_WRONG = frozenset({Verdict.DIFFERS, Verdict.UNKNOWN})
_NOBODY = "no engine is registered, so nothing was checked: start one, or see whether run.name is right"


class WeightsCheckConfig(Tree):
    """The sections that the check reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    weights: WeightsConfig = WeightsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What there is to say of one engine."""

    finding: Finding
    lag_steps: int | None
    """Newest trained step minus the engine's, when the check began; None: it serves no version of this run."""
    trouble: str = ""
    """What keeps it from the newest version, or that it is more than K steps behind; empty: nothing."""

    @property
    def wrong(self) -> bool:
        return self.finding.verdict in _WRONG or bool(self.trouble)

    @property
    def why(self) -> str:
        return "; ".join(part for part in (self.finding.why, f"trouble: {self.trouble}" if self.trouble else "") if part)

    def to_json(self) -> dict[str, object]:
        one = self.finding
        return {
            "engine_id": one.engine_id,
            "version": one.version,
            "verdict": one.verdict.value,
            "why": one.why,
            "lag_steps": self.lag_steps,
            "trouble": self.trouble,
        }


Told: TypeAlias = Callable[[Row], None]


def check(path: str, sets: Sequence[str], *, as_json: bool) -> int:
    """Print what was found of each engine, as soon as it is known; meanwhile, to the errors, who has answered. Exit code 1: one holds something else than it
    should, cannot be asked, is in trouble or too far behind to be trained on, or there is none. 0: none is, which is proven where the verdict is "same" only.

    Raises: `ConfigError`, `RunMissing`, `RedisUnavailable`; `WeightError` if a published version cannot be read to compare with.
    """
    config = load(WeightsCheckConfig, path, sets=sets)
    url = reader_url(config.run, config.redis)
    try:
        rows = asyncio.run(check_run(config, url, _ignore if as_json else _Lines()))
    except (RedisError, OSError) as problem:
        raise RedisUnavailable(f"redis.url {url}: no answer ({problem}); is the run up?") from problem
    if as_json:
        sys.stdout.buffer.write(orjson.dumps({"engines": [row.to_json() for row in rows]}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    if not rows:
        sys.stderr.write(f"rollstream: {_NOBODY}\n")
    return EXIT_FAULT if not rows or any(row.wrong for row in rows) else EXIT_DRAINED


async def check_run(config: WeightsCheckConfig, url: str, told: Told) -> list[Row]:
    """A row for each engine of the run at `url`, in order, one engine at a time; `told` hears of each once, as soon as it is settled."""
    client, keys = connect(url, deadline_s=_REDIS_S), Keys(config.run.name)
    store = open_store(config.weights, config.run)
    mirror = Mirror(
        relay_folder(config.weights, config.run), store, Channel(client, keys), keep=config.weights.keep, bucket_bytes=config.weights.bucket_mb << 20
    )
    try:
        if not await client.exists(keys.state):
            raise RunMissing(f"there is no run {config.run.name!r} in {url}: start it, or correct run.name or redis.url")
        ledger = RedisLedger(client, keys)
        status, (_, settings) = await ledger.status(), await ledger.about()
        engines = await Registry(client, keys).engines()
        progress = _Progress(len(engines))
        by_id = {engine.engine_id: engine for engine in engines}

        def row(finding: Finding) -> Row:
            engine = by_id[finding.engine_id]
            lag = lag_of(status, engine.version)
            trouble = trouble_of(engine, lag, settings.max_staleness)
            return Row(finding=finding, lag_steps=lag, trouble="" if trouble is None else trouble.why)

        async with aiohttp.ClientSession() as session:
            found = await check_engines(
                engines,
                lambda engine: _Told(session, engine, progress),
                manifest_of=lambda name: asyncio.to_thread(_published, store, name),
                whole=lambda manifest: _whole(manifest, store, mirror),
                deadline_s=_ENGINE_S,
                settled=lambda finding: told(row(finding)),
            )
        return [row(finding) for finding in found]
    finally:
        await client.aclose()


def _ignore(_: Row) -> None:
    """One JSON document is written when all is known."""


class _Lines:
    """A line a row, at once, under a heading that comes with the first: whoever gives up waiting has those that were there."""

    _WIDTHS = (28, 10, 8, 6)

    def __init__(self) -> None:
        self._began = False

    def __call__(self, row: Row) -> None:
        if not self._began:
            self._began = True
            self._write("engine", "version", "verdict", "behind", "why")
        lag = "-" if row.lag_steps is None else str(row.lag_steps)
        self._write(row.finding.engine_id, row.finding.version or "-", row.finding.verdict.value, lag, row.why or "-")

    def _write(self, *cells: str) -> None:
        sys.stdout.write("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, self._WIDTHS, strict=False)), cells[-1]]) + "\n")
        sys.stdout.flush()


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
        super().__init__(session, engine.url, api_key=engine_key(), admin_key=admin_key())
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
