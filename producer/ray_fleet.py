"""The actors of one run, seen from outside Ray's actors: started, asked, followed to their end, stopped.

A driver that goes away takes nothing along: actors are detached, and whoever comes next finds them by name in the namespace of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from producer.config import ProducerDaemonConfig, stop_seconds
from producer.ray_actor import SECRETS, About, DaemonActor, ProducerActor, Settings, forget, namespace
from producer.ray_names import index_of, rank_of, role_of
from protocol.config import PlacementConfig, RayConfig, RunConfig, Tree, load
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, ConfigError, RollstreamError, Unavailable

_LOG = logging.getLogger(__name__)
_PROBE_S = 20.0
"""One question to an actor about its end; then it is asked again."""
_RETRY_S = 0.5
_PROMPT_S = 3.0
"""One that has been started answers within this, or has no process yet."""
_CHATTY = ("ray._private.worker", "ray.actor")
"""They warn of what is meant to be: signals that are not theirs, and actors in a group that outlive their driver, which leave before the group is removed."""
_ENVIRONMENT = "ROLLSTREAM__"
_PATHS = ("model.path", "data.path", "eval.path", "eval.sets", "weights.store", "weights.relay", "checkpoint.dir", "buffer.spill", "buffer.blobs")


T = TypeVar("T")


class RayUnavailable(Unavailable):
    """The cluster does not give what was asked for, or not in time."""


class ActorFailed(RollstreamError):
    """An actor ended otherwise than drained; `exit_code` is what its daemon would have exited with."""

    def __init__(self, name: str, code: int, how: str) -> None:
        super().__init__(f"{name} {how}")
        self.exit_code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How an actor that was asked to stop went."""

    name: str
    about: About | None = None
    """What it told of its end; None: it was gone before, or it was killed."""
    killed: bool = False
    """It was there, and did not end in time."""
    answered: bool = False
    """It had a process. One without waited for room, or was being moved."""

    @property
    def code(self) -> int:
        """As of a process: one that had to be ended by force is never drained. Where there was no process, none was forced."""
        if self.about is not None and self.about.code is not None:
            return self.about.code
        return EXIT_FAULT if self.killed and self.answered else EXIT_DRAINED

    @property
    def how(self) -> str:
        if self.about is not None:
            return ended_how(self.about)
        return "did not end in time and was killed" if self.killed else "was gone"


def ended_how(about: About) -> str:
    return f"ended on {about.host} with exit code {about.code}" + (f": {about.message}" if about.message else "")


def read_settings(path: str, sets: Iterable[str], config: Tree, *, run: str, digest: str = "") -> Settings:
    """The file's contents with everything that outranks it. `config`: what they say here, for paths, which mean the same on every node then."""
    overrides = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(_ENVIRONMENT):
            overrides.append(f"{name.removeprefix(_ENVIRONMENT).lower().replace('__', '.')}={value}")
    return Settings(
        run=run,
        text=Path(path).read_text("utf-8-sig"),
        sets=(*overrides, *sets, *(f"{key}={_toml(value)}" for key, value in absolute_paths(config).items())),
        secrets=tuple((name, os.environ[name]) for name in SECRETS if os.environ.get(name)),
        digest=digest,
    )


def absolute_paths(config: Tree) -> dict[str, str | dict[str, str]]:
    """Every relative path of a configuration by its key, from this process's working directory. URLs and what is left empty are as they are."""
    found: dict[str, str | dict[str, str]] = {}
    for key in _PATHS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section, None), name, "")
        if isinstance(value, dict):
            if value:
                found[key] = {label: _absolute(path) for label, path in value.items()}
        elif value:
            found[key] = _absolute(value)
    python = getattr(getattr(config, "engine", None), "python", "")
    if "/" in python:  # else it is looked for in the PATH of each node
        found["engine.python"] = _absolute(python)
    run = getattr(config, "run", None)
    if isinstance(run, RunConfig):
        found["run.dir"] = str(run.folder)
    return found


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - a slice may follow the path of a data set, and a link stays what it is


def _toml(value: str | dict[str, str]) -> str:
    """JSON strings are TOML strings; a table is written inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {json.dumps(path)}" for key, path in value.items()) + "}"
    return json.dumps(value)


@contextlib.asynccontextmanager
async def connected(address: str, run: str) -> AsyncIterator[None]:
    """This process is a driver on the cluster, in the namespace of the run. Raises: `ConfigError` if no cluster answers, or Ray is not installed."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as problem:
        raise ConfigError(f"Ray is not installed ({problem}): install the extra `rollstream[ray]`, or leave out --ray and ray.address") from problem
    where = address or "auto"
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        await asyncio.to_thread(ray.init, address=where, namespace=namespace(run), log_to_driver=False, configure_logging=False, ignore_reinit_error=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as problem:
        raise ConfigError(f"ray.address {where}: no Ray cluster answers ({str(problem)[:300]}); start one (`ray start --head`), or correct it") from problem
    _take_signals_back()
    try:
        yield
    finally:
        await asyncio.to_thread(ray.shutdown)


def _take_signals_back() -> None:
    """Ray's core has made SIGTERM a crash with a stack trace, below what Python knows of; whoever listened to it listens again."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


class Fleet:
    """By name (`ray_names`). Needs a connection to Ray."""

    def __init__(self, run: str) -> None:
        self._namespace = namespace(run)

    async def names(self, role: str = "") -> list[str]:
        """Who is there, or is on the way to another node; of one role, by index."""
        import ray

        found = [name for name in await asyncio.to_thread(ray.util.list_named_actors) if role_of(name) == role or not role]
        return sorted(found, key=lambda name: (role_of(name), index_of(name), rank_of(name)))

    async def start(
        self, kind: type[DaemonActor], name: str, settings: Settings, *, cpus: float, gpus: float = 0, where: Any = None, bundles: Any = ()
    ) -> None:
        """An actor of that name, if there is none. Returns at once: it may wait for room."""
        import ray

        options = {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": -1,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": where or "SPREAD",
        }
        await asyncio.to_thread(lambda: ray.remote(kind).options(**options).remote(name, settings, tuple(bundles)))

    async def about(self, name: str, *, timeout_s: float) -> About | None:
        """None: it does not answer, as it waits for room or is being moved, or there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(*_away()):
                        found: About | None = await self._ask(name, "about")
                        return found
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            return None

    async def ended(self, name: str, *, tell: Callable[[str], None] = _LOG.info) -> About | None:
        """Return once the actor has ended, over all of its lives; None: there is none, or none any more. `tell` is told of what happens to it meanwhile."""
        away, failures = False, 0
        while True:
            try:
                if await self._handle(name) is None:
                    return None
                if away:
                    back: About | None = await self._ask(name, "about")
                    if back is not None:
                        tell(f"{name} is back" + (f"; failure {back.failures} was: {back.message}" if back.failures > failures else ""))
                        away, failures = False, back.failures
                about: About | None = await self._ask(name, "ended", _PROBE_S)
            except _away() as problem:
                if not away:
                    _LOG.info("%s does not answer (%s): Ray moves it, or starts it again", name, type(problem).__name__)
                away = True
                await asyncio.sleep(_RETRY_S)
            else:
                if about is not None:
                    return about

    async def stop(self, name: str, *, within_s: float) -> Left:
        """Have it end in good order, or by force after `within_s`; how it went. It is gone then."""
        about: About | None = None
        answered = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while about is None:
                    try:
                        if await self._handle(name) is None:
                            return Left(name=name)
                        await self._ask(name, "stop")
                        answered = True
                        about = await self._ask(name, "ended", 1.0)
                    except _away():
                        await asyncio.sleep(_RETRY_S)
        await self.kill(name)
        return Left(name=name, about=about, killed=about is None, answered=answered)

    async def kill(self, name: str) -> None:
        import ray

        if (handle := await self._handle(name)) is not None:
            await asyncio.to_thread(ray.kill, handle, no_restart=True)
            await asyncio.to_thread(forget, self._namespace, name)

    async def kill_silent(self, names: Iterable[str]) -> None:
        """Those of them that have no process yet need no good order, and would not answer."""
        asked = list(names)
        found = await asyncio.gather(*(self.about(name, timeout_s=_PROMPT_S) for name in asked))
        await asyncio.gather(*(self.kill(name) for name, about in zip(asked, found, strict=True) if about is None))

    async def wait_started(self, names: Iterable[str], *, within_s: float) -> list[About]:
        """Return once each of them has a place: where. Raises: `RayUnavailable` naming those that have none, and what is free."""
        wanted = list(names)
        found = await asyncio.gather(*(self.about(name, timeout_s=within_s) for name in wanted))
        if late := [name for name, about in zip(wanted, found, strict=True) if about is None]:
            raise RayUnavailable(f"{', '.join(late)}: not started within {within_s:.0f} s; {await asyncio.to_thread(free)}")
        return [about for about in found if about is not None]

    async def refuse_others(self, names: Sequence[str], digest: str) -> None:
        """Make sure that whoever has one of these names was started with the settings of `digest`. One that has ended makes room.

        Raises: `ConfigError` naming those of other settings; `RayUnavailable` if one does not tell.
        """
        there = set(await self.names())
        taken = [name for name in names if name in there]
        found = dict(zip(taken, await asyncio.gather(*(self.about(name, timeout_s=_PROBE_S) for name in taken)), strict=True))
        others = [name for name, about in found.items() if about is not None and about.code is None and about.digest != digest]
        if others:
            raise ConfigError(
                f"{', '.join(others)}: there already, started by `rollstream up --ray` or with other settings; give an --index that is free, or use "
                "`rollstream scale producers`"
            )
        if silent := [name for name, about in found.items() if about is None]:
            raise RayUnavailable(f"{', '.join(silent)}: there already, and waiting for room or being moved, so whose it is cannot be told; try again later")
        await asyncio.gather(*(self.stop(name, within_s=_PROBE_S) for name, about in found.items() if about is not None and about.code is not None))

    async def _handle(self, name: str) -> Any:
        import ray

        try:
            return await asyncio.to_thread(ray.get_actor, name, self._namespace)
        except ValueError:
            return None

    async def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        handle = await self._handle(name)
        return None if handle is None else await getattr(handle, method).remote(*arguments)


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` comes to; None: `stop` was first, and `work` was cancelled and has cleaned up."""
    task, asked = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        asked.cancel()
        await asyncio.gather(task, asked, return_exceptions=True)


def _away() -> tuple[type[Exception], ...]:
    """What a question to an actor raises while its process or node is lost and Ray has it start elsewhere. A fault of the actor's own is none of them."""
    from ray import exceptions

    return (exceptions.RayActorError, exceptions.NodeDiedError, exceptions.WorkerCrashedError, exceptions.RpcError, exceptions.GetTimeoutError)


def free() -> str:
    """What the cluster has, for people."""
    import ray

    total, left = ray.cluster_resources(), ray.available_resources()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = sorted((node["Resources"].get("GPU", 0) for node in nodes), reverse=True)
    return (
        f"the cluster has {len(nodes)} nodes with {total.get('GPU', 0):g} GPUs and {total.get('CPU', 0):g} CPUs, of which {left.get('GPU', 0):g} GPUs and "
        f"{left.get('CPU', 0):g} CPUs are free; GPUs of each node: {', '.join(f'{gpus:g}' for gpus in each)}"
    )


class ProducersConfig(ProducerDaemonConfig):
    """What starting producers on Ray needs."""

    ray: RayConfig = RayConfig()
    placement: PlacementConfig = PlacementConfig()


async def produce_on_ray(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """`rl-producer --ray`: producer.count producers as actors, or the one of `--index`, until they have ended; `stop` ends them in good order.

    A process that is killed leaves them: they go on, and the same command finds them. Raises: `ConfigError`; `RayUnavailable` where there is no room for all
    within placement.wait_seconds: those of them that it started and that have no process yet are gone then; `ActorFailed`.
    """
    config = load(ProducersConfig, options.config, sets=options.set)
    if not config.redis.url:
        raise ConfigError("redis.url is empty: actors on other nodes need the URL of a Redis that all nodes reach")
    digest = f"{ProducerActor.__name__} {xxhash.xxh3_128_hexdigest(config.model_dump_json(exclude={'placement'}).encode())}"
    settings = read_settings(options.config, options.set, config, run=config.run.name, digest=digest)
    names = [f"producer-{index}" for index in (range(config.producer.count) if options.index is None else (options.index,))]
    async with connected(options.ray or config.ray.address, config.run.name):
        fleet = Fleet(config.run.name)
        await fleet.refuse_others(names, digest)
        there = await fleet.names()
        for name in names:
            await fleet.start(ProducerActor, name, settings, cpus=config.ray.producer_cpus)
        try:
            await unless(stop, fleet.wait_started(names, within_s=config.placement.wait_seconds))
        except RayUnavailable:
            await fleet.kill_silent(name for name in names if name not in there)
            raise
        follow = asyncio.gather(*(fleet.ended(name) for name in names))
        asked = asyncio.ensure_future(stop.wait())
        await asyncio.wait((follow, asked), return_when=asyncio.FIRST_COMPLETED)
        if not follow.done():
            follow.cancel()
            ends = [
                (left.name, left.code, left.how) for left in await asyncio.gather(*(fleet.stop(name, within_s=stop_seconds(config.producer)) for name in names))
            ]
        else:
            asked.cancel()
            ends = [(about.name, about.code or EXIT_DRAINED, ended_how(about)) for about in await follow if about is not None]
        if failed := next((end for end in ends if end[1]), None):
            raise ActorFailed(*failed)
