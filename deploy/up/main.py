"""`rollstream up`: Redis, trainer, engines and producers of one run as processes of this machine, to the end of the run.

Before anything is written or started: the configuration is whole, the files are there and well formed, the HTTP port is ours and those of the engines are
free, there is a Redis to start, the run is there and is this one (`--resume`) or not there (`--new`), and no other `up` holds its folder. A run that lies in
a Redis of its own is asked who it is once that is up, before anything else is touched. A `--new` that ends before the run has come to be leaves nothing that
a second `--new` would refuse.

Order of starting: Redis, then everything else at once; each waits for what it needs. Order of stopping: see `Supervisor`. Exit codes: 0 the run drained
and its summary is written; 1 fault, somebody had to be killed, or another trainer took the run over; 2 bad configuration; 75 Redis did not come up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
from redis.exceptions import RedisError

from buffer.contract import RunState
from buffer.redis_ledger import RedisLedger
from deploy.checks import check_all, check_carrier
from deploy.config import UpConfig, bind, check_ports
from deploy.redis_server import ServerCommand, server_command, wait_ready
from deploy.snapshot import PictureSource, picture_source
from deploy.stop_times import stop_seconds_of
from deploy.up.launcher import Hooks, Launcher
from deploy.up.plan import check_layout, plan
from deploy.up.records import write_atomically
from deploy.up.server_device import server_device, shared_gpu
from deploy.up.supervisor import Child, Finish, Policy, Role
from deploy.up.wishes import Wishes
from protocol.config import load
from protocol.connection import check_server, connect
from protocol.daemon import run_daemon
from protocol.errors import EXIT_REPLACED, ConfigError, IdentityMismatch, RedisUnavailable, RollstreamError, RunExists, RunMissing
from protocol.identity import RunIdentity, identify
from protocol.keys import Keys
from weightsync.config import relay_folder, store_folder

_LOG = logging.getLogger(__name__)
_TRACES = ("processes.json", "redis", "checkpoint", "audit.jsonl", "witness.jsonl", "metrics.jsonl", "summary.json")
"""What a run leaves in its folder; a data set, a model or a configuration that lies there too is not a run."""
_HEALTH_S = 5.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    config: str
    resume: bool
    sets: tuple[str, ...] = ()
    live: bool = True
    """A live view, where standard output is a terminal."""
    policy: Policy | None = None
    """None: the usual one, with the time that this configuration gives each role to end."""


class UpFailed(RollstreamError):
    """The run ended otherwise than drained; `exit_code` is what `up` exits with."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish.message or "the run did not end in good order")
        self.exit_code = finish.code


def run(options: argparse.Namespace) -> int:
    asked = UpOptions(config=options.config, resume=options.resume, sets=tuple(options.set), live=not options.no_live)

    async def body(_: asyncio.Event) -> None:
        await up(asked)

    return run_daemon("rollstream up", body)


async def up(options: UpOptions) -> Path:
    """Run to the end of the run; its folder. Installs signal handlers. Raises: `RollstreamError` with the exit code to use."""
    config = load(UpConfig, options.config, sets=options.sets)
    check_all(config)
    check_layout(config)
    if shared := shared_gpu(config):
        _LOG.warning("%s", shared)
    await asyncio.to_thread(check_carrier, config.weights, config.run, device=server_device(config))
    listener = bind(config.http)
    try:
        await _check_place(config, options)
        life = _Up(config, options, listener)
        if not options.resume:  # a run that goes on may have engines there that go on as well
            check_ports(config.engine, evals=config.eval.engines)
        folder = config.run.folder
        folder.mkdir(parents=True, exist_ok=True)
        with _hold(folder):
            finish = await life.run()
    finally:
        if listener is not None:
            listener.close()
    if finish.code:
        raise UpFailed(finish)
    sys.stdout.write(_last_word(config, options, cut_short=life.cut_short))
    return folder


def _last_word(config: UpConfig, options: UpOptions, *, cut_short: bool) -> str:
    """How the run ended, and how it goes on."""
    summary = config.run.folder / "summary.json"
    if not cut_short:
        return f"run {config.run.name} has ended: {summary}\n"
    if not summary.exists():
        return f"run {config.run.name} was stopped before it had begun\n"
    step = orjson.loads(summary.read_bytes())["steps"]
    again = shlex.join(["rollstream", "up", "-c", options.config, *(word for one in options.sets for word in ("--set", one)), "--resume"])
    return f"run {config.run.name} stopped at step {step}: {summary}\ngo on with: {again}\n"


async def _check_place(config: UpConfig, options: UpOptions) -> None:
    """Whether the run is there or not, as asked. Writes nothing."""
    folder = config.run.folder
    found = [name for name in _TRACES if (folder / name).exists()]
    if not options.resume and found:
        raise RunExists(f"run.dir {folder} holds a run already ({', '.join(found)}): go on with it by --resume, or choose another run.name or run.dir")
    if config.redis.url:
        client = connect(config.redis.url, deadline_s=2.0)
        try:
            facts = await check_server(client, url=config.redis.url)
            there = bool(await client.exists(Keys(config.run.name).state))
            if there and options.resume:
                await RedisLedger(client, Keys(config.run.name)).join(await _identity(config))
        finally:
            await client.aclose()
        _LOG.info("Redis %s at %s: %s", facts.version, config.redis.url, facts.durability)
        if there and not options.resume:
            raise RunExists(f"run {config.run.name!r} is in {config.redis.url} already: go on with it by --resume, or choose another run.name")
        if not there and options.resume:
            raise RunMissing(f"there is no run {config.run.name!r} in {config.redis.url} to resume: start it with --new, or correct run.name or redis.url")
    elif options.resume and not (folder / "redis").is_dir():
        raise RunMissing(f"run.dir {folder} holds no run to resume: start it with --new, or correct run.name or run.dir")


async def _identity(config: UpConfig) -> RunIdentity:
    """Reads the data set and the tokenizer once more."""
    return await asyncio.to_thread(identify, config.run, config.model, config.data, config.rollout)


@contextlib.contextmanager
def _hold(folder: Path) -> Iterator[None]:
    """One `up` a folder. The lock goes with the process, however it ends."""
    with (folder / ".up.lock").open("a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            raise ConfigError(f"run.dir {folder}: another `rollstream up` holds this run; stop it, or choose another run.name or run.dir") from problem
        yield


def policy_for(config: UpConfig) -> Policy:
    """Whoever ends in good order within deadlines of its own must not be killed before them."""
    usual = Policy()
    own = {role: stop_seconds_of(config, role) for role in (Role.TRAINER, Role.PRODUCER, Role.ENGINE)}
    return replace(usual, stop_s={**usual.stop_s, **own})


class _Up:
    """One life of `up`, from the lock to the end. Making it writes nothing. Raises: `ConfigError` if there is no Redis to start."""

    def __init__(self, config: UpConfig, options: UpOptions, listener: socket.socket | None) -> None:
        self._config = config
        self._options = options
        self._listener = listener
        self._folder = config.run.folder
        self._live = options.live and sys.stdout.isatty()
        self._server: ServerCommand | None = None
        if not config.redis.url:
            self._server = server_command(self._folder / "redis", appendfsync=config.redis.appendfsync)
        self._url = config.redis.url or (self._server.url if self._server else "")
        self._fresh = not options.resume and not (self._folder / "redis").exists()
        self._nothing_came_of_it = self._fresh
        """Nobody can have made the run, or everybody has left and it is not there."""
        self.cut_short = False
        """The operator asked for the end before the run had come to its own."""

    async def run(self) -> Finish:
        file = self._folder / "run.toml"
        sets = (*self._options.sets, f"redis.url={self._url}")
        processes = plan(self._config, file, sets, redis=self._server)
        async with picture_source(
            self._url, self._config.run.name, folder=self._folder, patience_s=self._config.run.stall_seconds, transport=self._config.weights.transport
        ) as source:
            hooks = Hooks(
                redis_answers=lambda: _redis_answers(source),
                trainer_flag=lambda: _trainer_flag(source),
                drained=lambda: _drained(source),
                settle=lambda: self._settle(source),
            )
            policy = self._options.policy or policy_for(self._config)
            launcher = Launcher(self._folder, processes, settings=self._config.digest, hooks=hooks, redis_url=self._url, policy=policy)
            finished = False
            try:
                with _signals(launcher), _log_to(self._folder / "logs" / "up.log" if self._live else None):
                    await self._prepare(launcher, source, file)
                    async with self._observers(launcher, source):
                        self._nothing_came_of_it = False
                        finish = await launcher.run()
                        self.cut_short = launcher.cut_short
                finished = True
            except IdentityMismatch:
                await asyncio.shield(launcher.retreat())
                finished = True
                raise
            finally:
                if not finished:
                    await asyncio.shield(launcher.abandon())
                if self._fresh and self._nothing_came_of_it:
                    self._leave_no_trace()
        if not any(child.role is Role.TRAINER and life.code == EXIT_REPLACED for child, life in launcher.lives.items()):
            await self._clear_memory()  # nobody of ours is left, and nobody else could read it
        if self._server is not None:
            self._server.socket.unlink(missing_ok=True)
        return finish

    def _leave_no_trace(self) -> None:
        """Nothing was made here that anybody could resume; configuration and logs stay, and tell why."""
        if self._server is not None:
            self._server.socket.unlink(missing_ok=True)
            shutil.rmtree(self._folder / "redis", ignore_errors=True)
        for name in ("processes.json", "resources.json"):
            (self._folder / name).unlink(missing_ok=True)

    def _keep_configuration(self, kept: Path) -> None:
        """The file as it is now: what restarts read, and what the folder tells about the run."""
        if Path(self._options.config).resolve() != kept.resolve():
            write_atomically(kept, Path(self._options.config).read_bytes())

    async def _prepare(self, launcher: Launcher, source: PictureSource, file: Path) -> None:
        found = launcher.take_over()
        if self._server is not None:
            await self._begin_redis(self._server, launcher, fresh=Child(Role.REDIS) not in found)
        self._keep_configuration(file)
        healthy = await _healthy(source, launcher.found_pids()) if found - {Child(Role.REDIS)} else set()
        await launcher.adopt(healthy)
        if not healthy and not await _in_use(source):
            # Nobody serves or writes a version of this run: what lies there is stale, and the trainer publishes before anything is generated.
            await self._clear_memory()

    async def _begin_redis(self, server: ServerCommand, launcher: Launcher, *, fresh: bool) -> None:
        """Start or adopt our own server. Raises: `IdentityMismatch` if the run in it is not the configured one."""
        (self._folder / "redis").mkdir(exist_ok=True)
        if fresh:
            server.socket.unlink(missing_ok=True)
        await launcher.begin_redis(lambda deadline_s: wait_ready(server.url, timeout_s=deadline_s))
        client = connect(server.url, deadline_s=5.0)
        try:
            await check_server(client, url=server.url)
            with contextlib.suppress(RunMissing):
                await RedisLedger(client, Keys(self._config.run.name)).join(await _identity(self._config))
        finally:
            await client.aclose()

    async def _clear_memory(self) -> None:
        """Remove the run's versions, and copies of them, from this machine's shared memory, where nobody else keeps anything. A store on disk or behind a URL
        is the publisher's to sweep, and a chosen folder of copies the relay's: others may read them.
        """
        weights, run = self._config.weights, self._config.run
        folders = [*([] if weights.store else [store_folder(weights, run)]), *([] if weights.relay else [relay_folder(weights, run)])]
        for folder in folders:
            if not folder.is_relative_to(self._folder):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def _observers(self, launcher: Launcher, source: PictureSource) -> AsyncIterator[None]:
        """HTTP, the view and `rollstream scale`: their faults are told, and never end a run."""
        from deploy.http.app import announcement, serve_app
        from deploy.live import show

        wishes = Wishes(self._url, self._config.run.name, self._folder, launcher, source)
        looks = [
            self._observe("view", show(source, launcher, live=self._live, last_step=self._config.stop.steps)),
            self._observe("wishes", wishes.follow()),
        ]
        if self._listener is not None:
            sys.stdout.write(announcement(self._listener))
            sys.stdout.flush()
            looks.append(self._observe("http", serve_app(source, self._listener)))
        tasks = [asyncio.create_task(look, name=f"up:observer-{index}") for index, look in enumerate(looks)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @staticmethod
    async def _observe(name: str, look: Coroutine[None, None, None]) -> None:
        try:
            await look
        except Exception:  # noqa: BLE001 - an observer that fails must not end a run
            _LOG.exception("%s ended; the run goes on without it", name)

    async def _settle(self, source: PictureSource) -> None:
        """The summary, while Redis is still there."""
        if await source.exists():
            await _summarise(self._folder, self._url, self._config.run.name)
        else:
            self._nothing_came_of_it = True


async def _summarise(folder: Path, url: str, run_name: str) -> None:
    from deploy.summary import write_summary

    client = connect(url, deadline_s=5.0)
    try:
        await write_summary(folder, client, Keys(run_name))
    finally:
        await client.aclose()


async def _redis_answers(source: PictureSource) -> None:
    try:
        await source.ping()
    except (RedisError, OSError) as problem:
        raise RedisUnavailable(f"Redis does not answer ({problem})") from problem


async def _trainer_flag(source: PictureSource) -> str:
    try:
        return "--resume" if await source.exists() else "--new"
    except (RedisError, OSError) as problem:
        raise RedisUnavailable(f"whether the run is there: Redis does not answer ({problem})") from problem


async def _drained(source: PictureSource) -> bool:
    try:
        ledger = (await source.picture()).ledger
    except (RollstreamError, RedisError, OSError):
        return False
    return ledger is not None and ledger.state is RunState.DRAINING


async def _healthy(source: PictureSource, found: dict[Child, int]) -> Collection[Child]:
    """Those that announce themselves in Redis; asked for as long as two heartbeats take, as Redis may just have come back."""
    wanted = {pid: child for child, pid in found.items() if child.role is not Role.REDIS}
    healthy: set[Child] = set()
    for _ in range(int(_HEALTH_S / _LOOK_S)):
        picture = await source.picture()
        members = (picture.engines, picture.producers, picture.trainers, picture.relays, picture.weight_servers)
        announced = {member.pid for role in members for member in role}
        healthy = {child for pid, child in wanted.items() if pid in announced}
        if len(healthy) == len(wanted):
            break
        await asyncio.sleep(_LOOK_S)
    return healthy


async def _in_use(source: PictureSource) -> bool:
    """Whether an engine or a trainer that is not ours to start is here."""
    picture = await source.picture()
    return bool(picture.engines or picture.trainers)


@contextlib.contextmanager
def _log_to(path: Path | None) -> Iterator[None]:
    """The live view owns the terminal: what is logged meanwhile goes to `path`."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    before = root.handlers[:]
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers[:] = [file]
    try:
        yield
    finally:
        root.handlers[:] = before
        file.close()


@contextlib.contextmanager
def _signals(launcher: Launcher) -> Iterator[None]:
    """Every signal is a wish to stop: the first in good order, a further one at once. A closed terminal is a wish too."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, launcher.request_stop)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
