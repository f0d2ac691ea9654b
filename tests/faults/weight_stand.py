"""A stand: a run of real processes around the weight channel that lives over many rounds. Whoever is killed is started again, the others stay.

    Redis ◄── weight trainer: a new version every few tenths of a second, until it is killed
      ▲ ◄──── weight server (gloo) or relay (delta); nobody (store)
      └────── engine hosts, each with an embedded engine

Units: seconds, but where a name says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from buffer.audit import read_audit
from deploy.redis_server import server_command, wait_ready
from protocol.connection import Client, connect
from protocol.daemon import SUPERVISED
from protocol.failpoints import VARIABLE, Failpoint
from protocol.keys import Keys
from protocol.messages import EngineState, EngineStatus, Event
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups
from tests.faults import nursery
from weightsync.channel import Channel
from weightsync.registry import Registry

TRAINER, SERVER, RELAY = "trainer", "weight-server", "relay"
CARRIERS = {"gloo": (SERVER,), "delta": (RELAY,), "store": ()}
KILLED = -signal.SIGKILL
EVERY_S = 0.4
"""Between two versions."""
CONVERGE_S = 300.0
"""From the start of whoever was killed until every engine serves what was newest then: longer than any deadline in the run's file."""
_KILLED_S = 300.0
PRELOADED = (
    "tests.faults.weight_trainer",
    "tests.faults.weight_process",
    "deploy.relay",
    "deploy.weight_server",
    "producer.engine.host",
    "producer.engine.embedded.server",
    "transformers.models.qwen3.modeling_qwen3",
    "weightsync.transports.collective",
)
"""For the nursery: what these processes take seconds to import."""
NONE = Version(0, 0)
"""Older than any."""
_TOLD_EVENTS, _TOLD_LINES = 30, 15


class StandFailed(AssertionError):
    """What was wrong, and everything one needs to see why."""


@dataclass(slots=True)
class Stand:
    """`async with Stand(...) as stand`: everybody runs, and every engine serves."""

    folder: Path
    model: Path
    transport: str
    nest: Path
    engines: int = 2
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of the run's configuration: section, key, value."""
    paced_by: Sequence[str] = ()
    """Roles of engines: the trainer publishes no version before these serve the one before."""
    keys: Keys = field(default_factory=lambda: Keys("weights"))
    client: Client = field(init=False)
    waker: Wakeups = field(init=False)
    session: aiohttp.ClientSession = field(init=False)
    _alive: dict[str, nursery.Forked] = field(default_factory=dict)
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    @property
    def url(self) -> str:
        return server_command(self.folder / "redis").url

    @property
    def roles(self) -> tuple[str, ...]:
        return (TRAINER, *CARRIERS[self.transport], *(f"engine-{index}" for index in range(self.engines)))

    @property
    def registry(self) -> Registry:
        return Registry(self.client, self.keys)

    def engine_id(self, role: str) -> str:
        return f"{self.keys.run}-{role}"

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_run()
        try:
            await self._start_redis()
            self.client = connect(self.url, deadline_s=60.0)
            self._stack.push_async_callback(self.client.aclose)
            self.waker = await self._stack.enter_async_context(wakeups(self.client, self.keys))
            self.session = await self._stack.enter_async_context(aiohttp.ClientSession())
            for role in self.roles:
                await self.start(role)
            await self.converge()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._alive.values():
            process.kill()
        for process in self._alive.values():
            await process.wait()
        await self._stack.aclose()

    # -- processes -----------------------------------------------------------------------------------------------------------------------------

    async def start(self, role: str, at: Failpoint | None = None, nth: int = 1, *, sets: Sequence[str] = ()) -> None:
        """A new life of `role`, which is not running; with `at`, one that ends there. `sets`: of this life alone."""
        environ = os.environ | {"OMP_NUM_THREADS": "1", SUPERVISED: "1"}
        if at is not None:
            environ[VARIABLE] = f"{at}:{nth}"
        config = ["-c", str(self.folder / "run.toml"), *(part for one in sets for part in ("--set", one))]
        if role == TRAINER:
            command = ["tests.faults.weight_trainer", *config, "--every", str(EVERY_S), "--paced-by", *map(self.engine_id, self.paced_by)]
        elif role in (SERVER, RELAY):
            command = ["tests.faults.weight_process", role, *config]
        else:
            command = ["tests.faults.weight_process", "engine", *config, "--index", role.removeprefix("engine-")]
        self._alive[role] = await nursery.start(self.nest, command[0], command[1:], environ=environ, log=self.folder / f"{role}.log")

    async def kill(self, role: str) -> None:
        """Wherever it is."""
        process = self._alive.pop(role)
        process.kill()
        if (code := await process.wait()) != KILLED:
            raise await self.failure(f"{role} had ended already, with exit code {code}")

    async def killed(self, role: str) -> None:
        """Return once `role` has come to its failpoint."""
        process = self._alive.pop(role)
        try:
            async with asyncio.timeout(_KILLED_S):
                code = await process.wait()
        except TimeoutError:
            self._alive[role] = process
            raise await self.failure(f"{role} did not get to be killed within {_KILLED_S:g} s") from None
        if code != KILLED:
            raise await self.failure(f"{role} ended with exit code {code}")

    async def check_alive(self) -> None:
        """Nobody has ended by itself. Raises: `StandFailed`."""
        for role, process in self._alive.items():
            if process.ended:
                raise await self.failure(f"{role} ended by itself, with exit code {await process.wait()}")

    # -- what engines serve --------------------------------------------------------------------------------------------------------------------

    async def newest(self) -> Version:
        return await Channel(self.client, self.keys).newest_version() or NONE

    async def converge(self, beyond: Version = NONE) -> Version:
        """Return once something newer than `beyond` is out, and every engine serves it or what came after; that version.

        Raises: `StandFailed` at the deadline.
        """
        wanted = NONE
        try:
            async with asyncio.timeout(CONVERGE_S):
                while True:
                    mark = self.waker.mark(Topic.ENGINES, Topic.WEIGHTS)
                    wanted = wanted if wanted > beyond else await self.newest()
                    engines = await self.registry.engines()
                    if wanted > beyond and len(engines) == self.engines and all(_serves(engine, wanted) for engine in engines):
                        return wanted
                    await self.waker.wait(Topic.ENGINES, Topic.WEIGHTS, since=mark)
        except TimeoutError:
            states = ", ".join(f"{one.engine_id} {one.state} {one.version} {one.reason}" for one in await self.registry.engines())
            raise await self.failure(f"not every engine serves {wanted} within {CONVERGE_S:g} s: {states}") from None

    async def events(self) -> list[Event]:
        return list(await read_audit(self.folder / "run" / "audit.jsonl", self.client, self.keys))

    async def failure(self, *problems: str) -> StandFailed:
        """The problems with the tail of events and of every log."""
        told = [*(f"  * {problem}" for problem in problems), "last events:"]
        told += [f"  {one.id} {one.op} {json.dumps(dict(one.fields))[:220]}" for one in (await self.events())[-_TOLD_EVENTS:] if one.op in _SHOWN]
        for log in sorted(self.folder.glob("*.log")):
            told += [f"{log.name}:", *(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TOLD_LINES:])]
        return StandFailed("\n".join(told))

    # -- the run's files -----------------------------------------------------------------------------------------------------------------------

    async def _start_redis(self) -> None:
        (self.folder / "redis").mkdir(exist_ok=True)
        with (self.folder / "redis.log").open("ab") as log:
            redis = await asyncio.create_subprocess_exec(*server_command(self.folder / "redis").argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        async def end() -> None:
            redis.kill()
            await redis.wait()

        self._stack.push_async_callback(end)
        await wait_ready(self.url, timeout_s=120.0)

    def _write_run(self) -> None:
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": self.keys.run, "dir": str(self.folder / "run")},
            "redis": {"url": self.url},
            "model": {"path": str(self.model)},
            "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 24},
            "engine": {"slots": 4},
            "weights": {
                "transport": self.transport,
                "store": str(self.folder / "weights"),
                "relay": str(self.folder / "relay"),
                "full_every": 6,
                "group_deadline_s": 4.0,
                "apply_deadline_s": 20.0,
            },
        }
        for section, values in self.changes.items():
            tables[section] = tables.get(section, {}) | dict(values)
        text = "".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items())
        (self.folder / "run.toml").write_text(text)


_SHOWN = frozenset({"attached", "published", "applied", "unfit", "prepare_failed", "engine_started", "engine_left"})


def _serves(engine: EngineStatus, wanted: Version) -> bool:
    return engine.state is EngineState.ROUTABLE and engine.version is not None and engine.version >= wanted
