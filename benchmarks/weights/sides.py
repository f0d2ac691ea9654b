"""The two sides: every engine moves by itself, or all of them stop for every version. Both have a run of their own on the same engines and the same trainer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from benchmarks.weights.calls import Calls
from benchmarks.weights.child import Answer, Child
from benchmarks.weights.fleet import Engine, Fleet
from benchmarks.weights.following import Following
from benchmarks.weights.served import weight_server
from protocol.config import RunConfig
from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.messages import EngineId
from protocol.versions import Version
from protocol.wakeups import Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.config import WeightsConfig, relay_folder
from weightsync.control import EngineControl
from weightsync.fallback import Transports
from weightsync.store import open_store
from weightsync.transports.choose import make_transports

LIVE_S, _APPLY_S = 120.0, 60.0
_INCARNATION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version on all engines; lists go by engine."""

    published: Mapping[str, Any]
    pause_s: list[float]
    apply_s: list[float]
    """With a loading call of the engine under way."""
    live_s: list[float]
    """From handing the copy to the publisher until the engine serves it, acked."""
    pauses: list[tuple[float, float]]
    by: list[str]


class Side:
    """A publisher of its own in the trainer's process, a store, and a weight server where the transport needs one."""

    def __init__(self, name: str, weights: Mapping[str, Any], *, trainer: Child, fleet: Fleet, redis: str, work: Path) -> None:
        self.run = f"{name}-{weights['transport']}-{uuid.uuid4().hex[:4]}"
        self._weights, self._trainer, self.fleet, self._redis, self._work = weights, trainer, fleet, redis, work
        self.config = WeightsConfig(**weights)
        self.keys = Keys(self.run)
        self.calls = Calls()
        self._stack = contextlib.AsyncExitStack()
        self._n = -1
        self.client: Client
        self.waker: Wakeups

    async def __aenter__(self) -> Self:
        for folder in (self.config.store, self.config.relay):
            self._stack.callback(shutil.rmtree, Path(folder) / self.run, ignore_errors=True)
            self._stack.callback(shutil.rmtree, Path(folder) / f"{self.run}-relay", ignore_errors=True)
        self.client = connect(self._redis)
        self._stack.push_async_callback(self.client.aclose)
        self.waker = await self._stack.enter_async_context(wakeups(self.client, self.keys))
        await self._trainer.ask("open", run=self.run, redis=self._redis, weights=self._weights, deadline_s=60)
        self._stack.push_async_callback(self._trainer.ask, "close", run=self.run, deadline_s=60)
        server = weight_server(self.run, self._redis, self._weights, client=self.client, log=self._work / "weight-server.log")
        await self._stack.enter_async_context(server)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    async def session(self) -> aiohttp.ClientSession:
        """For the control of one engine, every call timed."""
        return await self._stack.enter_async_context(aiohttp.ClientSession(trace_configs=[self.calls.trace()]))

    async def publish(self, kind: str) -> Answer:
        """A step's worth of change, copied and handed to the publisher: when, and how long training stood still."""
        self._n += 1
        await self._trainer.ask("step", kind=kind, seed=self._n, deadline_s=120)
        return await self._trainer.ask("publish", run=self.run, n=self._n, deadline_s=120)

    async def published(self) -> Answer:
        """Once it is durable and the pointer has moved."""
        return await self._trainer.ask("published", run=self.run, deadline_s=250)

    @property
    def version(self) -> Version:
        return Version(_INCARNATION, self._n)


class OneByOne(Side):
    """Ours: a reconciler an engine."""

    following: list[Following]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.following = []
        for engine in self.fleet.engines:
            one = Following(
                self.run,
                engine.name,
                engine.boot_nonce,
                engine.url,
                client=self.client,
                waker=self.waker,
                session=await self.session(),
                config=self.config,
                kind="embedded",
            )
            self.following.append(await self._stack.enter_async_context(one))
        return self

    async def update(self, kind: str) -> Update:
        out = dict(await self.publish(kind))
        waits = [asyncio.create_task(one.serves(self.version, deadline_s=LIVE_S)) for one in self.following]
        out |= await self.published()
        live = await asyncio.gather(*waits)
        found = [self.calls.pauses(engine.url, since=out["submitted"])[-1] for engine in self.fleet.engines]
        audits = [await one.applied(self.version) for one in self.following]
        return Update(
            published=out,
            pause_s=[one.seconds for one in found],
            apply_s=[one.loading_s for one in found],
            live_s=[at - out["submitted"] for at in live],
            pauses=[(one.began, one.ended) for one in found],
            by=[str(one["transport"]) for one in audits],
        )


class StopTheWorld(Side):
    """All engines pause, all take the version, all go on: what peers do. In its favour, what files need is prepared before the pause."""

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        about, store = RunConfig(name=self.run), open_store(self.config, RunConfig(name=self.run))
        self._channel = Channel(self.client, self.keys)
        self._hands: list[tuple[Engine, EngineControl, Transports]] = []
        for engine in self.fleet.engines:
            session = await self.session()
            control = EngineControl(session, engine.url)
            ways = make_transports(
                self.config,
                store=store,
                control=control,
                session=session,
                client=self.client,
                keys=self.keys,
                engine_id=EngineId(engine.name),
                boot_nonce=engine.boot_nonce,
                folder=relay_folder(self.config, about),
            )
            self._stack.push_async_callback(ways.aclose)
            self._hands.append((engine, control, ways))
        return self

    async def update(self, kind: str) -> Update:
        out = dict(await self.publish(kind))
        out |= await self.published()
        manifest = await self._channel.newest()
        assert manifest is not None
        assert manifest.version == self.version
        # One right to send is there: of a collective, preparing takes it, so engines take turns while all are paused.
        before = self.config.transport in ("store", "delta")
        if before:
            for _, _, ways in self._hands:
                await ways.prepare(manifest, deadline_s=LIVE_S)
        began = time.monotonic()
        await asyncio.gather(*(control.pause(self.config.pause_mode) for _, control, _ in self._hands))

        async def take(ways: Transports) -> None:
            if not before:
                await ways.prepare(manifest, deadline_s=LIVE_S)
            await ways.apply(manifest, deadline_s=_APPLY_S)

        try:
            await asyncio.gather(*(take(ways) for _, _, ways in self._hands))
        finally:
            await asyncio.gather(*(control.resume() for _, control, _ in self._hands))
        ended = time.monotonic()
        found = [self.calls.pauses(engine.url, since=began)[-1] for engine, _, _ in self._hands]
        return Update(
            published=out,
            pause_s=[one.seconds for one in found],
            apply_s=[one.loading_s for one in found],
            live_s=[ended - out["submitted"]] * len(found),
            pauses=[(began, ended)] * len(found),
            by=[ways.name for _, _, ways in self._hands],
        )


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
