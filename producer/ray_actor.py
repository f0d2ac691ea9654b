"""Daemons as Ray actors: named, detached, started again by Ray wherever there is room, until what they run has ended.

::

    STARTING ── body runs, in a thread and an event loop of its own ──► ended 0, 2, 3, or stopped ──► told, and gone after LINGER_S
        ▲                                              │ 1, 75
        └── Ray starts the process again ◄── exit ◄────┘ after a pause; the ninth 1 in a row is an end too

The body is the same coroutine that the command line runs. It has a thread and a loop of its own, so that the actor answers whatever the body does. What others
ask is answered in the loop of Ray's worker, by coroutines that only wait: in an actor of threads a question may lie behind one that waits. Nothing of a run
lives in an actor: one that is lost with its node starts anew on another and finds the run in Redis. Why it failed, and how often, the head of the cluster keeps
over its processes. Ray is imported by whoever starts an actor or is one, never by importing this module.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from producer.engine.host import EngineHostConfig, run_host
from producer.engine.key import ADMIN_VARIABLE, VARIABLE
from producer.engine.node import RankTaken, run_node
from producer.engine.sglang.arguments import gpus_here
from producer.main import produce
from producer.ray_names import index_of, rank_of
from producer.teacher.config import TEACHER_VARIABLE
from protocol.config import load
from protocol.daemon import SUPERVISED, run_daemon
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, EXIT_TRY_AGAIN, Unavailable

_LOG = logging.getLogger(__name__)
LINGER_S = 30.0
"""How long an ended actor can still be asked how it ended."""
_AGAIN_S = 2.0
"""Before a body that failed is started again, spread by 0.5 to 1.5."""
MAX_FAILURES = 8
"""One fault more in a row, none of which lived `HEALTHY_S`, and the actor is not started again: as `rollstream up` on one machine."""
HEALTHY_S = 30.0
_PROBE_S = 60.0
"""For the bundles of an engine to say where they lie."""
_PEER_S = 5.0
"""For another actor of the run to answer one that leaves."""
_SAID = 2000
"""Characters of a message that are kept."""
_OVERRIDES = "ROLLSTREAM__"
SECRETS = (VARIABLE, ADMIN_VARIABLE, TEACHER_VARIABLE)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run's configuration by its contents: the machine of an actor need not have the file."""

    run: str
    text: str
    """The TOML file."""
    sets: tuple[str, ...] = ()
    """As `--set`: they outrank the file and any environment."""
    secrets: tuple[tuple[str, str], ...] = ()
    """Keys of engines, by the variable of the environment that they are read from."""
    digest: str = ""
    """Equal for equal settings."""

    @property
    def namespace(self) -> str:
        return namespace(self.run)

    @contextlib.contextmanager
    def file(self) -> Iterator[str]:
        """A path that holds `text` while the context is open. It lies in memory: what may hold a password is left on no disk."""
        descriptor = os.memfd_create("run.toml")
        try:
            os.write(descriptor, self.text.encode())
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)


def namespace(run: str) -> str:
    """Ray's namespace of a run: its actors are not met by those of another."""
    return f"rollstream-{run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What an actor tells of itself."""

    name: str
    digest: str
    node: str
    """Ray's id of the node."""
    address: str
    host: str
    pid: int
    gpus: str
    """CUDA_VISIBLE_DEVICES as the body sees it."""
    moved: bool
    """It has been started before."""
    code: int | None = None
    """As the exit code of the daemon; None: it runs, or is about to be started again."""
    message: str = ""
    """What ended the body last, be it in an earlier process."""
    failures: int = 0
    """How often the body has failed, over all processes."""
    gave_up: bool = False
    """It failed so often in a row that it is not started again."""
    leaving: bool = False
    """It has told how it ended, and is about to be gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """What is known of an actor's failures over all of its processes.

    >>> once = Failures().and_one(75, 3.0, "Redis did not answer").and_one(1, 3.0, "no such device")
    >>> once.times, once.in_a_row, once.message
    (2, 1, 'no such device')
    """

    times: int = 0
    in_a_row: int = 0
    """Faults (exit code 1), none of which came after a life of `HEALTHY_S`."""
    message: str = ""
    """Of the last one."""

    def and_one(self, code: int, lived_s: float, message: str) -> Failures:
        before = 0 if lived_s >= HEALTHY_S else self.in_a_row
        return Failures(times=self.times + 1, in_a_row=before + int(code == EXIT_FAULT), message=message[-_SAID:])


class BundlesApart(Unavailable):
    """The GPUs of an engine are not to be had together now; the actor is started again and looks again."""


class DaemonActor:
    """What every actor of a run does the same way. A subclass says what its body is."""

    linger_s = LINGER_S
    max_failures = MAX_FAILURES

    def __init__(self, name: str, settings: Settings, bundles: Sequence[int] = ()) -> None:
        import ray

        context = ray.get_runtime_context()
        self.name = name
        self.settings = settings
        self.bundles = tuple(bundles)
        self.address: str = ray.util.get_node_ip_address()
        self._node: str = context.get_node_id()
        self._moved = bool(context.was_current_actor_reconstructed)
        self._failures = recall(settings.namespace, name) if self._moved else Failures()
        self._gave_up = self._leaving = False
        self._code: int | None = None
        self._message = self._failures.message
        self._asked = threading.Event()
        """To stop."""
        self._ended: asyncio.Event | None = None
        """In the loop of Ray's worker, from when somebody first waits for it."""
        self._worker_loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the body."""
        self._lock = threading.Lock()
        forget_overrides()
        os.environ[SUPERVISED] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ.update(settings.secrets)
        threading.Thread(target=self._live, name=f"daemon:{name}", daemon=True).start()

    # what others ask ------------------------------------------------------------------------------------------------------------------
    async def about(self) -> About:
        return About(
            name=self.name,
            digest=self.settings.digest,
            node=self._node,
            address=self.address,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            moved=self._moved,
            code=self._code,
            message=self._message,
            failures=self._failures.times,
            gave_up=self._gave_up,
            leaving=self._leaving,
        )

    async def ended(self, timeout_s: float) -> About | None:
        """How it ended, once it has; None: it runs still after `timeout_s`."""
        with self._lock:
            if self._ended is None:
                self._worker_loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
                if self._code is not None:
                    self._ended.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return await self.about() if self._ended.is_set() else None

    async def stop(self) -> None:
        """As SIGTERM: end in good order, and stay ended."""
        self._asked.set()
        with self._lock:
            if self._stop is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)

    # the body -----------------------------------------------------------------------------------------------------------------------
    async def body(self, path: str, stop: asyncio.Event) -> None:
        raise NotImplementedError

    def _live(self) -> None:
        began = time.monotonic()
        with self.settings.file() as path:
            code = run_daemon(self.name, lambda stop: self._body(path, stop))
        if code in (EXIT_FAULT, EXIT_TRY_AGAIN) and not self._asked.is_set():
            self._failures = self._failures.and_one(code, time.monotonic() - began, self._message)
            keep(self.settings.namespace, self.name, self._failures)
            self._gave_up = self._failures.in_a_row > self.max_failures
            if not self._gave_up and not self._asked.wait(_AGAIN_S * random.uniform(0.5, 1.5)):
                os._exit(code)  # a process that failed is not trusted with another life
        with self._lock:
            self._code = code
            if code == EXIT_DRAINED:
                self._message = ""  # of an earlier life
            if self._ended is not None and self._worker_loop is not None:
                self._worker_loop.call_soon_threadsafe(self._ended.set)
        time.sleep(self.linger_s)
        self._leaving = True
        while not self._leave():
            time.sleep(_AGAIN_S)

    def _prepare(self) -> None:
        """Before the body. May ask Ray."""

    async def _body(self, path: str, stop: asyncio.Event) -> None:
        with self._lock:
            self._loop, self._stop = asyncio.get_running_loop(), stop
        if self._asked.is_set():
            return
        try:
            await asyncio.to_thread(self._prepare)
            await self.body(path, stop)
        except BaseException as problem:
            self._message = _said(problem)
            raise
        finally:
            with self._lock:
                self._loop = self._stop = None

    def _leave(self) -> bool:
        """For good. The last one of the run gives back what the run had reserved; of several that leave at once, each. False: to be tried again."""
        import ray
        from ray.exceptions import RayError

        try:
            forget(self.settings.namespace, self.name)
            if not any(self._stays(name) for name in ray.util.list_named_actors() if name != self.name):
                give_back(self.settings.run)
            ray.kill(ray.get_actor(self.name, self.settings.namespace), no_restart=True)
        except (RayError, RuntimeError, ValueError, OSError) as problem:
            _LOG.warning("%s could not leave (%s): it tries again", self.name, problem)
            return False
        return True

    def _stays(self, name: str) -> bool:
        """Whether another actor may still need what the run had reserved. One that does not answer may: it waits for room, or is being moved.

        Raises: `RayActorError` if it is lost while we ask: then it is asked for again, as it may be gone for good.
        """
        import ray
        from ray.exceptions import GetTimeoutError

        try:
            other = ray.get_actor(name, self.settings.namespace)
        except ValueError:
            return False  # gone meanwhile
        try:
            about: About = ray.get(other.about.remote(), timeout=_PEER_S)
        except GetTimeoutError:
            return True
        return not about.leaving


class ProducerActor(DaemonActor):
    """`rl-producer` under its index."""

    async def body(self, path: str, stop: asyncio.Event) -> None:
        options = argparse.Namespace(config=path, set=list(self.settings.sets), index=index_of(self.name), rollout_only=None, groups=None)
        await produce(options, stop)


class EngineActor(DaemonActor):
    """The host of an engine, or of its part on one more machine. What it starts has the GPUs of the actor's bundles, and no others."""

    def _prepare(self) -> None:
        if len(self.bundles) > 1:  # Ray tells an actor of the bundle it sits in alone; one bundle may have several
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(self.bundles))

    async def body(self, path: str, stop: asyncio.Event) -> None:
        config = load(EngineHostConfig, path, sets=self.settings.sets)
        engine, index, rank = config.engine, index_of(self.name), rank_of(self.name)
        here: dict[str, object] = {}
        if engine.host in LOOPBACK and engine.kind != "external":  # nobody on another node would reach it there
            here["host"] = self.address
        if engine.kind == "sglang" and engine.device == "cuda":  # it sees its own GPUs alone, so its first is 0, wherever engine 0 would begin
            here["gpu"] = -index * gpus_here(engine)
        config = config.model_copy(update={"engine": engine.model_copy(update=here)})
        if not rank:
            await run_host(config, index, stop)
            return
        try:
            await run_node(config, index, rank, stop)
        except RankTaken as problem:  # by a process of this actor's own, on a machine that was lost and has not noticed yet
            raise Unavailable(str(problem)) from problem


def forget_overrides() -> None:
    """Settings in this process's environment are those of whoever started Ray on this node: those of the run are in `Settings.sets`."""
    for variable in [variable for variable in os.environ if variable.startswith(_OVERRIDES)]:
        del os.environ[variable]


def gpus_of(bundles: Sequence[int]) -> list[str]:
    """The GPUs of these bundles of the actor that asks. Raises: `BundlesApart` if they do not lie on its node, or do not answer in time."""
    import ray
    from ray.exceptions import GetTimeoutError

    context = ray.get_runtime_context()
    group = ray.util.get_current_placement_group()
    assert group is not None, "an actor with bundles sits in their group"
    try:
        found = ray.get([probe(group, bundle) for bundle in bundles], timeout=_PROBE_S)
    except GetTimeoutError as problem:
        raise BundlesApart(f"the bundles of this engine's {len(bundles)} GPUs did not answer within {_PROBE_S:.0f} s: one may wait for a node") from problem
    if away := {node for node, _, _ in found} - {context.get_node_id()}:
        raise BundlesApart(
            f"the GPUs of one engine lie on {len(away) + 1} nodes since Ray has moved them: add an engine in its place by `rollstream scale engines`, or end "
            "the run by Ctrl-C and go on by `--resume`, which reserves anew"
        )
    return [gpu for _, _, gpu in found]


def probe(group: Any, bundle: int) -> Any:
    """A reference to (node, address, GPU) of a bundle, asked in the bundle itself. The GPU is empty where there is none."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpu = "GPU" in group.bundle_specs[bundle]
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    task = ray.remote(_here).options(num_cpus=0, num_gpus=0.01 if gpu else 0, max_retries=3, scheduling_strategy=where)
    return task.remote()


def _here() -> tuple[str, str, str]:
    import ray

    context = ray.get_runtime_context()
    return context.get_node_id(), ray.util.get_node_ip_address(), next(iter(context.get_accelerator_ids().get("GPU", [])), "")


def give_back(run: str) -> None:
    """Remove the placement groups of a run."""
    import ray

    for entry in list(ray.util.placement_group_table().values()):
        name = entry["name"]
        if name.split("/")[0] == namespace(run) and entry["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(name))


def recall(where: str, name: str) -> Failures:
    """Of the actor `name` in the namespace `where`; none, if the head of the cluster does not tell."""
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        found = _internal_kv_get(_key(where, name))
    except (RayError, RuntimeError, OSError) as problem:
        _LOG.warning("earlier failures of %s are not known: %s", name, problem)
        return Failures()
    return Failures(**json.loads(found)) if found else Failures()


def keep(where: str, name: str, failures: Failures) -> None:
    """At the head of the cluster, until `forget`. What cannot be kept is in the log."""
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_put

    try:
        _internal_kv_put(_key(where, name), json.dumps(dataclasses.asdict(failures)))
    except (RayError, RuntimeError, OSError) as problem:
        _LOG.warning("%s cannot be kept for %s: %s", failures, name, problem)


def forget(where: str, name: str) -> None:
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(where, name))


def _key(where: str, name: str) -> str:
    return f"{where}/failures/{name}"


def _said(problem: BaseException) -> str:
    if isinstance(problem, BaseExceptionGroup):
        return "; ".join(_said(part) for part in problem.exceptions)
    return str(problem) or type(problem).__name__
