"""The engine host: one engine, its reconciler and its heartbeat in one process (`rollstream engine`). Importing this module needs no torch.

    STARTING ── newest version applied, verified, acked ──► ROUTABLE ── stop, or the run drains and no producer is left ──► LEAVING ──► gone

The engine is driven over its HTTP interface only, also from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import xxhash

from buffer.contract import RunState
from buffer.redis_ledger import RedisLedger
from producer.config import EvalConfig
from producer.engine.config import EngineConfig
from producer.engine.key import engine_key
from protocol.config import ModelConfig, RedisConfig, RolloutConfig, RunConfig, Tree
from protocol.connection import Client, check_server, connect
from protocol.errors import EXIT_FAULT, ConfigError, RollstreamError, RunMissing
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus, ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, is_url, relay_folder, store_folder
from weightsync.control import EngineControl
from weightsync.reconciler import Reconciler
from weightsync.registry import BEAT_S, Registry
from weightsync.store import VersionStore, open_store
from weightsync.transports.choose import make_transports

if TYPE_CHECKING:
    from producer.engine.embedded.server import EmbeddedEngine

_LOG = logging.getLogger(__name__)
_DRAINED_S = 2.0
"""The run drains and has had no producer for so long: nobody will ask this engine again."""
_FINISH_S = 5.0
"""Requests under way when the host stops have so long to finish; then they are aborted."""
_LEAVE_S = 3.0
_FIRST_CONTACT_S = 3.0
_SILENT_UPDATES = 2
"""So many times in a row that the engine ended an update in silence: its process ends. One may be a machine that is too busy."""
_END_S = 10.0
"""What such a process has to end by itself."""


class EngineHostConfig(Tree):
    """The sections an engine host reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()


async def run_host(config: EngineHostConfig, index: int, stop: asyncio.Event) -> None:
    """Run engine `index` of the run until `stop`, or until the run drains and no producer is left.

    Order of stopping: the reconciler ends (the engine is never left paused), the engine leaves the routes, requests under way finish to a deadline, the engine
    leaves the registry, the last to leave a run that drains clears its versions from shared memory, the server closes.

    Raises: `ConfigError` for a model that cannot be served, a port that is taken or a kind that is not there; `RedisUnavailable`; `Superseded` when another
    process took this engine's place; `EngineFault` when the engine breaks, or falls silent in or after updates: the process ends then, whatever hangs in it.
    """
    _check(config, index)
    store = await asyncio.to_thread(open_store, config.weights, config.run)
    await _first_contact(config.redis.url)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        boot_nonce = uuid.uuid4().hex[:16]
        async with _engine(config, index, boot_nonce) as engine, aiohttp.ClientSession() as session, wakeups(client, Keys(config.run.name)) as waker:
            host = _Host(config=config, index=index, boot_nonce=boot_nonce, engine=engine, store=store, session=session, client=client, waker=waker)
            await host.run(stop)
    finally:
        await client.aclose()


def _check(config: EngineHostConfig, index: int) -> None:
    """Everything that can be wrong without looking at torch, a socket or Redis."""
    engine = config.engine
    if not config.redis.url:
        raise ConfigError("redis.url is empty: an engine host started by hand needs the URL of the run's Redis (--set redis.url=unix:///path/to/redis.sock)")
    if not Path(config.model.path).is_dir():
        raise ConfigError(f"model.path {config.model.path}: no such folder; give a folder with config.json, tokenizer.json and safetensors weights")
    if index < 0 or (engine.port and engine.port + index > 65535):
        raise ConfigError(f"engine index {index}: expected 0 or more, and engine.port {engine.port} + index at most 65535")
    if engine.max_length and engine.max_length < _longest(config):
        raise ConfigError(
            f"engine.max_length {engine.max_length} is below the {_longest(config)} tokens of rollout.max_prompt_tokens and max_new_tokens: raise it, or use 0"
        )


def _longest(config: EngineHostConfig) -> int:
    """Tokens of the longest request that the run's settings allow."""
    return config.rollout.max_prompt_tokens + max(config.rollout.max_new_tokens, config.eval.max_new_tokens)


async def _first_contact(url: str) -> None:
    """A wrong address is told at once, not after the patience that a running host has."""
    client = connect(url, deadline_s=_FIRST_CONTACT_S)
    try:
        await check_server(client, url=url)
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def _engine(config: EngineHostConfig, index: int, boot_nonce: str) -> AsyncIterator[EmbeddedEngine]:
    """The embedded engine, listening, with base weights that are called after this boot (rule W3). Imports torch here."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch

        from producer.engine.embedded.model import load
        from producer.engine.embedded.server import EmbeddedEngine
    except ImportError as problem:
        raise ConfigError(f'engine.kind = "embedded" needs torch and transformers ({problem}): install the extra `rollstream[torch]`') from problem
    settings = config.engine
    torch.set_num_threads(settings.torch_threads)
    wanted = _longest(config)
    model = await asyncio.to_thread(load, config.model.path, slots=settings.slots, max_length=settings.max_length, wanted=wanted, dtype=settings.dtype)
    async with EmbeddedEngine(
        model,
        weight_version=f"boot:{boot_nonce}",
        host=settings.host,
        port=settings.port + index if settings.port else 0,
        seed=_sampling_seed(config.run.seed, index, boot_nonce),
        max_queued=settings.max_queued,
        api_key=engine_key(),
        group_timeout_s=config.weights.group_deadline_s,
        pace_s=settings.pace_s,
        apply_delay_factor=settings.apply_delay_factor,
    ) as engine:
        yield engine


def _sampling_seed(run_seed: int, index: int, boot_nonce: str) -> int:
    """Noise of this boot's own: an engine that starts again does not draw its first life's again. A request with a seed of its own is repeatable anyway."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}:{index}:{boot_nonce}".encode()) >> 1


class _Host:
    """The registered engine: heartbeat, reconciler, and the watch for its end."""

    def __init__(
        self,
        *,
        config: EngineHostConfig,
        index: int,
        boot_nonce: str,
        engine: EmbeddedEngine,
        store: VersionStore,
        session: aiohttp.ClientSession,
        client: Client,
        waker: Wakeups,
    ) -> None:
        keys = Keys(config.run.name)
        self._config = config
        self._id = EngineId(f"{config.run.name}-engine-{index}")
        self._boot_nonce = boot_nonce
        self._engine = engine
        self._registry = Registry(client, keys)
        self._ledger = RedisLedger(client, keys)
        self._producers: Presence[ProducerStatus] = Presence(client, keys, "producer", ProducerStatus)
        self._waker = waker
        self._started = time.monotonic()
        control = EngineControl(session, engine.url, api_key=engine_key())
        self._reconciler = Reconciler(
            self._id,
            boot_nonce,
            control=control,
            channel=Channel(client, keys),
            registry=self._registry,
            transports=make_transports(
                config.weights,
                store=store,
                control=control,
                session=session,
                client=client,
                keys=keys,
                engine_id=self._id,
                boot_nonce=boot_nonce,
                folder=relay_folder(config.weights, config.run),
            ),
            config=config.weights,
            wakeups=waker,
            idle=lambda: engine.idle,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Returns when the engine has left in good order. If it ends by a fault it leaves too, as far as Redis allows."""
        await self._registry.beat(self._status(EngineState.STARTING))
        _LOG.info("engine %s listens on %s", self._id, self._engine.url)
        try:
            await self._serve(stop)
        except BaseException:
            with contextlib.suppress(TimeoutError, RollstreamError):
                await self._say_goodbye("fault")
            raise
        await self._say_goodbye("stopped" if stop.is_set() else "run drained")
        with contextlib.suppress(TimeoutError, RollstreamError):
            async with asyncio.timeout(_LEAVE_S):
                await self._clear_memory()

    async def _clear_memory(self) -> None:
        """Remove the versions of a run that is over from this machine's memory, if nobody is left to read them. A trainer that resumes attaches first, which
        opens the run, and writes its own. A store on disk stays: it may lie in a folder of the user's.
        """
        weights, run = self._config.weights, self._config.run
        folders = [] if is_url(weights.store) or weights.store else [store_folder(weights, run)]
        folders += [] if weights.relay else [relay_folder(weights, run)]
        folders = [folder for folder in folders if not folder.is_relative_to(run.folder)]
        if not folders:
            return
        if await self._registry.engines() or await self._producers.members() or await self._run_state() is not RunState.DRAINING:
            return
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _say_goodbye(self, reason: str) -> None:
        async with asyncio.timeout(_LEAVE_S):
            await self._registry.beat(self._status(EngineState.LEAVING))  # its last figures
            await self._registry.leave(self._id, self._boot_nonce, reason)

    async def _serve(self, stop: asyncio.Event) -> None:
        ending = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            beat = group.create_task(self._beat(), name="engine:beat")
            fault = group.create_task(self._engine.failed(), name="engine:fault")
            reconciler = group.create_task(self._reconciler.run(), name="engine:reconciler")
            ends = [
                group.create_task(self._stopped(stop, ending), name="engine:stop"),
                group.create_task(self._drained(ending), name="engine:drain"),
            ]
            await ending.wait()
            for task in (*ends, reconciler):
                task.cancel()
            await asyncio.wait({reconciler})
            await self._leave()
            beat.cancel()
            fault.cancel()

    async def _beat(self) -> None:
        """Renew the registration, for as long as the host lives. Raises: `EngineFault` for an engine that hangs (rule W6)."""
        while True:
            if self._reconciler.totals.silent >= _SILENT_UPDATES:
                from producer.engine.embedded.worker import EngineFault  # brings torch, which is here by now

                _end_by_force(_END_S)
                raise EngineFault(f"{_SILENT_UPDATES} updates in a row ended without an answer, or without a token after them: the engine hangs")
            await self._registry.beat(self._status(EngineState.STARTING))
            await asyncio.sleep(BEAT_S)

    async def _stopped(self, stop: asyncio.Event, ending: asyncio.Event) -> None:
        await stop.wait()
        ending.set()

    async def _drained(self, ending: asyncio.Event) -> None:
        """Sets `ending` once the run drains and has had no producer for a while. A run that drains already when the host starts may be about to be resumed, so
        it must have been seen open.
        """
        was_open, deserted_since = False, 0.0
        while True:
            mark = self._waker.mark(Topic.RUN)
            state = await self._run_state()
            was_open = was_open or state is RunState.OPEN
            now = time.monotonic()
            if state is not RunState.DRAINING or not was_open or await self._producers.members():
                deserted_since = 0.0
            elif not deserted_since:
                deserted_since = now
            elif now - deserted_since >= _DRAINED_S:
                ending.set()
                return
            await self._waker.wait(Topic.RUN, since=mark)

    async def _run_state(self) -> RunState | None:
        """None: no such run yet."""
        try:
            return (await self._ledger.status()).state
        except RunMissing:
            return None

    async def _leave(self) -> None:
        """Off the routes, then to the end of what is under way, bounded. The server aborts the rest when it closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_S):
                await self._registry.beat(self._status(EngineState.LEAVING))
                await self._engine.until_idle()

    def _status(self, state: EngineState) -> EngineStatus:
        counters = self._engine.counters
        return EngineStatus(
            engine_id=self._id,
            boot_nonce=self._boot_nonce,
            url=self._engine.url,
            kind=self._config.engine.kind,
            state=state,
            running=counters.running,
            queued=counters.queued,
            capacity=self._config.engine.slots,
            generated_tokens=counters.generated_tokens,
            busy_s=counters.busy_s,
            uptime_s=time.monotonic() - self._started,
            paused_s=counters.paused_s,
            updates=counters.updates,
            host=socket.gethostname(),
            pid=os.getpid(),
            transport=self._reconciler.totals.transport,
            span_lag=self._reconciler.span_lag,
        )


def _end_by_force(after_s: float) -> None:
    """A thread that hangs in a call would keep this process, and its place in the run, for ever."""
    timer = threading.Timer(after_s, os._exit, (EXIT_FAULT,))
    timer.daemon = True
    timer.start()
