"""The engine host: one engine, its reconciler and its heartbeat in one process (`rollstream engine`). Importing this module needs no torch.

    STARTING ── newest version applied, verified, acked ──► ROUTABLE ── stop, or the run drains and no producer is left ──► LEAVING ──► gone
       ▲  └─── another model than the run's ──► UNFIT              │
       └────── another life, after a wait ◄── the engine's end ────┘

What kind of engine it is, `producer.engine.hosted` hides. Each life of an engine is a boot of its own in the registry: base weights, off the routes until it
has acked. An embedded engine has one life, as it is a part of this process; servers are started again here, whoever started the host.

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
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import xxhash

from buffer.contract import RunState
from buffer.redis_ledger import RedisLedger
from producer.config import EvalConfig
from producer.engine.config import EngineConfig
from producer.engine.desk import Desk
from producer.engine.hosted import EngineFault, Hosted, Kind, Misfit
from producer.engine.key import admin_key, engine_key
from producer.engine.kinds import make_kind
from producer.engine.sglang.arguments import gpus_of
from producer.engine.turns import DeviceTurns
from producer.stopping import unless
from protocol.config import ModelConfig, PlacementConfig, RedisConfig, RolloutConfig, RunConfig, Tree
from protocol.connection import Client, check_server, connect
from protocol.errors import EXIT_FAULT, ConfigError, RollstreamError, RunMissing
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus, ProducerStatus
from protocol.presence import Presence
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.adapter_config import check_adapters
from weightsync.aim import EVAL_FLEET
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, is_url, relay_folder, store_folder
from weightsync.lora import LoraConfig, prefix_of
from weightsync.reconciler import Reconciler
from weightsync.registry import BEAT_S, Registry
from weightsync.store import VersionStore, open_store
from weightsync.transports.choose import make_transports
from weightsync.turns import Turns

_LOG = logging.getLogger(__name__)
_DRAINED_S = 2.0
"""The run drains and has had no producer for so long: nobody will ask this engine again."""
_FINISH_S = 5.0
"""Requests under way when the host stops have so long to finish; then they are aborted."""
_LEAVE_S = 3.0
_FIRST_CONTACT_S = 3.0
_SILENT_UPDATES = 2
"""So many times in a row that the engine ended an update in silence: its life ends. One may be a machine that is too busy."""
_END_S = 10.0
"""What a process that hangs with its engine has to end by itself."""
_REST_S, _LONGEST_REST_S = 1.0, 30.0
"""Between two lives; each that came to nothing doubles it."""
_MISFIT_S = 15.0
"""Between two looks at an engine of another model."""


class EngineHostConfig(Tree):
    """The sections an engine host reads."""

    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    lora: LoraConfig = LoraConfig()
    placement: PlacementConfig = PlacementConfig()

    def evaluates(self, index: int) -> bool:
        """Engine `index` is of the evaluation's own."""
        return self.engine.count <= index < self.engine.count + self.eval.engines

    def shares_device(self, index: int) -> bool:
        """Engine `index` and the trainer take turns."""
        return self.placement.layout == "colocated" and not self.evaluates(index)


async def run_host(config: EngineHostConfig, index: int, stop: asyncio.Event) -> None:
    """Run engine `index` of the run until `stop`, or until the run drains and no producer is left.

    Order of stopping: the reconciler ends (the engine is never left paused), the engine leaves the routes, requests under way finish to a deadline, the engine
    leaves the registry, the last to leave a run that drains clears its versions from shared memory, the server closes.

    Raises: `ConfigError` for a model that cannot be served, a port that is taken or settings that cannot be; `RedisUnavailable`; `Superseded` when another
    process took this engine's place; `EngineFault` when an embedded engine breaks, or falls silent in or after updates (the process ends then, whatever hangs
    in it), or when a server has not come to its first token several times in a row.
    """
    kind = _check(config, index)
    store = await asyncio.to_thread(open_store, config.weights, config.run, lora=config.lora)
    await _first_contact(config.redis.url)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        async with wakeups(client, Keys(config.run.name)) as waker:
            rest_s, vain, lives = _REST_S, 0, _Lives()
            while (fault := await _life(config, index, stop, kind=kind, lives=lives, store=store, client=client, waker=waker)) is not None:
                lives.count += 1
                vain = 0 if fault.was_ready else vain + 1
                if not kind.lives_on or 0 < kind.start_tries <= vain:
                    raise fault.problem
                rest_s = _REST_S if fault.was_ready else min(2 * rest_s, _LONGEST_REST_S)
                _LOG.warning("engine %d begins again in %.0f s: %s", index, rest_s, fault.problem)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await stop.wait()
                if stop.is_set():
                    return
    finally:
        await client.aclose()


@dataclass(frozen=True, slots=True)
class _Fault:
    """How a life ended that nobody had asked to end."""

    problem: EngineFault | BaseExceptionGroup[RollstreamError]
    was_ready: bool


@dataclass(slots=True)
class _Lives:
    """What outlives a life of the engine."""

    count: int = 0
    run_was_open: bool = False


async def _life(
    config: EngineHostConfig, index: int, stop: asyncio.Event, *, kind: Kind, lives: _Lives, store: VersionStore, client: Client, waker: Wakeups
) -> _Fault | None:
    """One life of the engine, under a nonce of its own (rule W3). None: it ended in good order."""
    boot_nonce = uuid.uuid4().hex[:16]
    host: _Host | None = None
    try:
        async with contextlib.AsyncExitStack() as open_here:
            session = await open_here.enter_async_context(aiohttp.ClientSession())
            desk = Desk(session, api_key=engine_key(), admin_key=admin_key())
            device: DeviceTurns | None = None
            if config.shares_device(index):
                device = DeviceTurns(Turns(client, Keys(config.run.name), waker), engine_id(config.run, index), boot_nonce)
                open_here.push_async_callback(device.end)
                await unless(stop, device.begin(), name="engine:device")
                if stop.is_set():
                    return None
            engine = await open_here.enter_async_context(kind.life(boot_nonce, desk))
            host = _Host(
                config=config,
                index=index,
                boot_nonce=boot_nonce,
                kind=kind,
                lives=lives,
                engine=engine,
                desk=desk,
                device=device,
                store=store,
                client=client,
                waker=waker,
            )
            await host.run(stop)
            return None
    except EngineFault as problem:
        return _Fault(problem, host is not None and host.was_ready)
    except ConfigError as problem:  # it could be right before: a port that somebody has taken since, say
        if not lives.count:
            raise
        return _Fault(EngineFault(str(problem)), was_ready=False)
    except BaseExceptionGroup as group:
        faults, others = group.split((EngineFault, ConfigError) if lives.count else (EngineFault,))  # the second as above
        if faults is None or others is not None:
            raise
        return _Fault(_only(faults), host is not None and host.was_ready)


def _only(group: BaseExceptionGroup[RollstreamError]) -> EngineFault | BaseExceptionGroup[RollstreamError]:
    """What it says, if it is one alone."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        (inner,) = inner.exceptions
    if isinstance(inner, ConfigError):
        return EngineFault(str(inner))
    return inner if isinstance(inner, EngineFault) else group


def _check(config: EngineHostConfig, index: int) -> Kind:
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
    check_adapters(config.lora, config.weights, config.placement)
    if config.shares_device(index) and engine.kind == "external":
        raise ConfigError('placement.layout colocated with engine.kind "external": servers of others are not told to free their memory; use another layout')
    return make_kind(
        engine,
        config.weights,
        lora=config.lora,
        shares_device=config.shares_device(index),
        index=index,
        model=str(Path(config.model.path).absolute()),
        longest=_longest(config),
        seed=lambda boot_nonce: _sampling_seed(config.run.seed, index, boot_nonce),
        log=config.run.folder / "logs" / f"sglang-{index}.log",
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


def _sampling_seed(run_seed: int, index: int, boot_nonce: str) -> int:
    """Noise of this boot's own: an engine that starts again does not draw its first life's again. A request with a seed of its own is repeatable anyway."""
    return xxhash.xxh3_64_intdigest(f"{run_seed}:{index}:{boot_nonce}".encode()) >> 1


def engine_id(run: RunConfig, index: int) -> EngineId:
    """Of engine `index` of the run, in every life of it."""
    return EngineId(f"{run.name}-engine-{index}")


class _Host:
    """One life of the engine as the registry knows it: heartbeat, reconciler, and the watch for its end."""

    def __init__(
        self,
        *,
        config: EngineHostConfig,
        index: int,
        boot_nonce: str,
        kind: Kind,
        lives: _Lives,
        engine: Hosted,
        desk: Desk,
        device: DeviceTurns | None,
        store: VersionStore,
        client: Client,
        waker: Wakeups,
    ) -> None:
        keys = Keys(config.run.name)
        self._config = config
        self._id = engine_id(config.run, index)
        self._device = device
        self._fleet = EVAL_FLEET if config.evaluates(index) else "rollout"
        self._boot_nonce = boot_nonce
        self._kind = kind
        self._lives = lives
        self._engine = engine
        self._misfit = ""
        self.was_ready = False
        """Whether this life came so far that the engine could be given weights."""
        self._registry = Registry(client, keys)
        self._ledger = RedisLedger(client, keys)
        self._producers: Presence[ProducerStatus] = Presence(client, keys, "producer", ProducerStatus)
        self._waker = waker
        self._started = time.monotonic()
        self._adapters = prefix_of(config.run.name) if config.lora.adapters else ""
        self._control = control = desk.reconciling(engine.url, adapters=self._adapters)
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
                session=desk.session,
                client=client,
                keys=keys,
                engine_id=self._id,
                boot_nonce=boot_nonce,
                folder=relay_folder(config.weights, config.run),
                ranks=config.engine.tp,
                gpus=gpus_of(config.engine, index, os.environ),
                lora=config.lora,
                fixed=self._fleet == EVAL_FLEET,
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
        with contextlib.suppress(TimeoutError):  # its registration runs out by itself
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
            follow = group.create_task(self._follow(), name="engine:follow")
            ends = [
                group.create_task(self._stopped(stop, ending), name="engine:stop"),
                group.create_task(self._drained(ending), name="engine:drain"),
            ]
            await ending.wait()
            for task in (*ends, follow):
                task.cancel()
            await asyncio.wait({follow})
            await self._leave()
            beat.cancel()

    async def _follow(self) -> None:
        """From the engine's start: once it is ready it follows the newest version, until cancelled. Raises: `EngineFault`."""
        while True:
            try:
                await self._engine.ready()
                break
            except Misfit as problem:
                if self._misfit != str(problem):
                    self._misfit = str(problem)
                    _LOG.warning("engine %s is left alone: %s", self._id, self._misfit)
                await self._registry.mark_unfit(self._id, self._boot_nonce, self._misfit)
                await asyncio.sleep(_MISFIT_S)
        self._misfit, self.was_ready = "", True
        await self._registry.beat(self._status(EngineState.STARTING))  # what is known from here on, before anybody is sent to it
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engine.failed(), name="engine:fault")
            group.create_task(self._reconcile(), name="engine:reconciler")

    async def _reconcile(self) -> None:
        if self._device is None:
            await self._reconciler.run()
        else:
            await self._device.follow(self._reconciler.run, control=self._control, registry=self._registry)

    async def _beat(self) -> None:
        """Renew the registration, for as long as the host lives. Raises: `EngineFault` for an engine that hangs (rule W6)."""
        while True:
            if self._reconciler.totals.silent >= _SILENT_UPDATES:
                if not self._kind.lives_on:
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
        deserted_since = 0.0
        while True:
            mark = self._waker.mark(Topic.RUN)
            state = await self._run_state()
            self._lives.run_was_open = self._lives.run_was_open or state is RunState.OPEN
            now = time.monotonic()
            if state is not RunState.DRAINING or not self._lives.run_was_open or await self._producers.members():
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
        with contextlib.suppress(TimeoutError, EngineFault):
            async with asyncio.timeout(_FINISH_S):
                await self._registry.beat(self._status(EngineState.LEAVING))
                await self._engine.until_idle()

    def _status(self, state: EngineState) -> EngineStatus:
        figures, totals = self._engine.figures, self._reconciler.totals
        return EngineStatus(
            engine_id=self._id,
            boot_nonce=self._boot_nonce,
            url=self._engine.url,
            kind=self._kind.name,
            state=state,
            running=figures.running,
            queued=figures.queued,
            capacity=figures.capacity,
            generated_tokens=figures.generated_tokens,
            busy_s=figures.busy_s,
            uptime_s=time.monotonic() - self._started,
            paused_s=totals.paused_s,
            updates=totals.updates,
            host=socket.gethostname(),
            pid=os.getpid(),
            transport=totals.transport,
            span_lag=self._reconciler.span_lag,
            trouble=self._misfit or self._engine.trouble or totals.trouble,
            kv_usage=figures.kv_usage,
            fleet=self._fleet,
            adapters=self._adapters,
        )


def _end_by_force(after_s: float) -> None:
    """A thread that hangs in a call would keep this process, and its place in the run, for ever."""
    timer = threading.Timer(after_s, os._exit, (EXIT_FAULT,))
    timer.daemon = True
    timer.start()
