"""The thin edge of the supervisor: starts, watches and ends real processes, adopts those an earlier `up` left, keeps `processes.json`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from deploy.scaling import change_to
from deploy.up.process import ChildProcess
from deploy.up.records import Record, read_records, write_records
from deploy.up.resources import Resources, measure
from deploy.up.supervisor import STOP_ORDER, Child, Command, Finish, Kill, Life, Policy, Role, Settle, Start, Supervisor, Terminate
from protocol.errors import EXIT_DRAINED, EXIT_FAULT, RedisUnavailable, RollstreamError

_LOG = logging.getLogger(__name__)
_SAMPLE_S = 5.0
_SETTLE_S = 120.0
_LEAVE_S = 10.0
SCALED = (Role.PRODUCER, Role.ENGINE)
"""Roles whose number may change while a run goes on."""
_TAIL_BYTES = 4000
_TAIL_LINES = 15


class Plan(Protocol):
    """Which children there are and how each is started."""

    @property
    def children(self) -> tuple[Child, ...]: ...
    @property
    def reserved(self) -> Collection[Child]:
        """Those whose number does not change."""

    def refuses(self, child: Child, /) -> str:
        """Why there cannot be this one too; empty: there can."""

    def argv(self, child: Child) -> tuple[str, ...]: ...
    def environment(self, child: Child, /) -> Mapping[str, str] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the launcher asks of the run it does not know."""

    redis_answers: Callable[[], Awaitable[None]]
    """Raises `RedisUnavailable` if not: then nobody is started into the void."""
    trainer_flag: Callable[[], Awaitable[str]]
    """`--new` if the run is not there yet, else `--resume`."""
    drained: Callable[[], Awaitable[bool]]
    """Whether the run has been declared at its end: the verdict on an adopted process, whose exit code nobody can learn."""
    settle: Callable[[], Awaitable[None]]
    """Everyone but Redis has left: write the summary. May be cancelled."""


@dataclass(frozen=True, slots=True)
class _Exited:
    child: Child
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class _NotStarted:
    """It could not be started (`code`), or has nothing to do at present (None)."""

    child: Child
    code: int | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    role: Role
    count: int
    refused: asyncio.Future[str]


@dataclass(frozen=True, slots=True)
class _StopAsked:
    pass


@dataclass(frozen=True, slots=True)
class _Settled:
    failure: str


class Launcher:
    """The processes of one run folder. `take_over`, then `begin_redis` where there is one, then `adopt`, then `run`.

    Order of stopping: trainer, producers, engines, settle, Redis; see `Supervisor`.
    """

    def __init__(self, folder: Path, plan: Plan, *, settings: str, hooks: Hooks, redis_url: str = "", policy: Policy | None = None) -> None:
        self._folder = folder
        self._plan = plan
        self._settings = settings
        self._hooks = hooks
        self._redis_url = redis_url
        self._core = Supervisor(plan.children, policy or Policy(), Random())
        self._processes: dict[Child, ChildProcess] = {}
        self._records: dict[Child, Record] = {}
        self._log_offsets: dict[Child, int] = {}
        self._found: dict[Child, tuple[Record, ChildProcess]] = {}
        self._starting: dict[Child, asyncio.Task[None]] = {}
        """On their way: what they need is being asked for, and nobody else waits meanwhile."""
        self._settling: asyncio.Task[None] | None = None
        self._unwritten = False
        """`processes.json` is older than what runs."""
        self._watches: set[asyncio.Task[None]] = set()
        self._wanted = {role: len(self._scaled(role)) for role in SCALED}
        self._events: asyncio.Queue[_Exited | _NotStarted | _Scale | _StopAsked | _Settled] = asyncio.Queue(maxsize=1024)
        self._resources: Resources | None = None
        self.notes: deque[tuple[float, str]] = deque(maxlen=50)
        """What happened to processes, newest last, for the live view."""

    @property
    def lives(self) -> Mapping[Child, Life]:
        return self._core.lives

    @property
    def cut_short(self) -> bool:
        """The operator asked for the end before the run had come to its own."""
        return self._core.cut_short

    @property
    def resources(self) -> Resources | None:
        return self._resources

    def request_stop(self) -> None:
        """The operator asks for the end; see `Supervisor.stop`."""
        if not self._events.full():
            self._events.put_nowait(_StopAsked())

    @property
    def wanted(self) -> Mapping[Role, int]:
        """How many there are to be, of those roles whose number may change."""
        return self._wanted

    async def scale(self, role: Role, count: int) -> str:
        """Have so many: who is too many leaves in good order, who is missing is started. Why not, or empty."""
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._events.put(_Scale(role, count, refused))
        return await refused

    def processes(self, role: Role) -> dict[Child, int]:
        """The pid of each that is alive, of those whose number may change."""
        return {child: self._processes[child].identity.pid for child in self._scaled(role) if self._core.lives[child].alive and child in self._processes}

    def _scaled(self, role: Role) -> list[Child]:
        return [child for child in self._core.lives if child.role is role and child not in self._plan.reserved]

    def _change(self, wish: _Scale, now: float) -> list[Command]:
        role, lives = wish.role, self._core.lives
        there = [child.index for child in self._scaled(role) if lives[child].wanted and not lives[child].why]
        change = change_to(wish.count, there=there, reserved=[child.index for child in self._plan.reserved if child.role is role])
        added, gone = ([Child(role, index) for index in indices] for indices in (change.added, change.gone))
        refused = "the run is ending" if self._core.ending else next((why for child in added if (why := self._plan.refuses(child))), "")
        if not wish.refused.done():
            wish.refused.set_result(refused)
        if refused:
            return []
        self._wanted[role] = wish.count
        if added or gone:
            self._note(f"{wish.count} {role}s are wanted: {_named(added)} to come, {_named(gone)} to leave")
        given_up = [child for child in self._scaled(role) if lives[child].wanted and lives[child].why and child not in added]
        return self._core.scale(added, [*gone, *given_up], now)  # who was given up is not missed: the others are as many as are wanted

    def log_path(self, child: Child) -> Path:
        return self._folder / "logs" / f"{child}.log"

    # before the run ---------------------------------------------------------------------------------------------------------
    def take_over(self) -> set[Child]:
        """Find what an earlier `up` left alive; who it is."""
        for record in read_records(self._folder):
            if (process := ChildProcess.adopt(record.identity)) is not None:
                self._found[record.child] = (record, process)
        return set(self._found)

    def found_pids(self) -> dict[Child, int]:
        return {child: process.identity.pid for child, (_, process) in self._found.items()}

    async def begin_redis(self, ready: Callable[[float], Awaitable[None]], *, start_s: float = 30.0) -> None:
        """Adopt the server or start it, and wait until `ready(deadline_s)` returns.

        Raises: `RedisUnavailable` with the server's last words if it ends instead; what `ready` raises.
        """
        child = Child(Role.REDIS)
        if child in self._found:
            record, process = self._found[child]
            if record.command == self._plan.argv(child):
                del self._found[child]
                self._install(child, process, record)
            else:
                await self._end_found(child)
        if child not in self._processes:
            await self._start(child)
        process = self._processes[child]
        answers = asyncio.ensure_future(ready(start_s))
        ends = asyncio.ensure_future(process.ended())
        try:
            await asyncio.wait((answers, ends), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise RedisUnavailable(f"the Redis server ended at its start:\n{self._last_words(child)}")
            answers.result()
        finally:
            await _cancel(answers, ends)

    async def adopt(self, healthy: Collection[Child]) -> None:
        """Go on with those of the found that are healthy and were started as we would start them; end the rest."""
        for child in list(self._found):
            record, process = self._found[child]
            wanted = child in self._plan.children and self._same(record) and record.settings == self._settings
            if wanted and child in healthy:
                del self._found[child]
                self._install(child, process, record)
                self._note(f"{child} goes on (pid {process.identity.pid})")
        async with asyncio.TaskGroup() as group:
            for child in list(self._found):
                group.create_task(self._end_found(child), name=f"up:end-{child}")

    def _same(self, record: Record) -> bool:
        command = record.command
        if record.child.role is Role.TRAINER and command and command[-1] in ("--new", "--resume"):
            command = command[:-1]
        return command == self._plan.argv(record.child)

    async def _end_found(self, child: Child) -> None:
        _, process = self._found.pop(child)
        self._note(f"{child} of an earlier start is ended (pid {process.identity.pid})")
        await _end(process)

    async def retreat(self) -> None:
        """This was not ours to touch: end what was started here, and let go of what was found."""
        for process in self._processes.values():
            if process.adopted:
                process.close()
            elif process.open:
                await _end(process)
        for _, process in self._found.values():
            process.close()

    async def abandon(self) -> None:
        """End everything that was started or adopted: the run did not come to be, or we have a bug."""
        processes = [*self._processes.items(), *((child, process) for child, (_, process) in self._found.items())]
        for role in STOP_ORDER:
            async with asyncio.TaskGroup() as group:
                for child, process in processes:
                    if child.role is role and process.open:
                        group.create_task(_end(process), name=f"up:end-{child}")

    # the run ----------------------------------------------------------------------------------------------------------------
    async def run(self) -> Finish:
        """Until the run has ended. Consumes exits, stop requests and deadlines; produces starts and signals."""
        self._resources = Resources(self._folder, adopted=[process.identity.pid for process in self._processes.values() if process.adopted])
        async with asyncio.TaskGroup() as group:
            sampler = group.create_task(self._sample(self._resources), name="up:resources")
            for child in self._processes:
                self._have_watched(child, group)
            commands = self._core.begin(time.monotonic(), running=list(self._processes))
            while not (finish := self._carry_out(commands, group)):
                commands = await self._next()
            for task in (sampler, self._settling, *self._watches):  # watches: of those that the kernel did not let go
                if task is not None:
                    task.cancel()
        for process in self._processes.values():
            process.close()
        self._keep_resources()
        return finish

    async def _next(self) -> list[Command]:
        due = self._core.deadline()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                happened = await self._events.get()
        except TimeoutError:
            return self._core.tick(time.monotonic())
        now = time.monotonic()
        match happened:
            case _StopAsked():
                self._note("asked to stop")
                return self._core.stop(now)
            case _Settled(failure):
                return self._core.settled(now, failure=failure)
            case _Scale():
                return self._change(happened, now)
            case _NotStarted(child, code, message):
                return self._not_started(child, code, message, now)
            case _Exited(child, code, message):
                return self._exited(child, code, message, now)

    def _not_started(self, child: Child, code: int | None, message: str, now: float) -> list[Command]:
        if self._starting.pop(child, None) is None:
            return []  # it was called off in the meantime
        if code is not None:
            return self._exited(child, code, message, now)
        return self._core.hold(child, now)

    def _exited(self, child: Child, code: int, message: str, now: float) -> list[Command]:
        commands = self._core.exited(child, code, now, message=message)
        self._tell_exit(child, code)
        return commands

    def _carry_out(self, commands: list[Command], group: asyncio.TaskGroup) -> Finish | None:
        for command in commands:
            match command:
                case Start(child):
                    self._starting[child] = group.create_task(self._bring_up(child, group), name=f"up:start-{child}")
                case Terminate(child) | Kill(child) if child in self._starting:
                    self._starting.pop(child).cancel()
                    self._events.put_nowait(_Exited(child, -signal.SIGTERM, "called off before it was started"))
                case Terminate(child):
                    self._processes[child].terminate()
                case Kill(child):
                    self._note(f"{child} is killed")
                    self._processes[child].kill()
                case Settle():
                    self._settling = group.create_task(self._settle(), name="up:settle")
                case Finish():
                    return command
        return None

    async def _bring_up(self, child: Child, group: asyncio.TaskGroup) -> None:
        """Start it and have it watched. Nothing waits between the start of the process and its watch, so calling off leaves none behind."""
        try:
            if await self._has_nothing_to_do(child):
                await self._events.put(_NotStarted(child, None))
                return
            await self._start(child)
        except (OSError, RollstreamError) as problem:
            code = problem.exit_code if isinstance(problem, RollstreamError) else EXIT_FAULT
            await self._events.put(_NotStarted(child, code, f"cannot be started: {problem}"))
            return
        del self._starting[child]
        self._have_watched(child, group)

    def _have_watched(self, child: Child, group: asyncio.TaskGroup) -> None:
        watch = group.create_task(self._watch(child), name=f"up:watch-{child}")
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    async def _has_nothing_to_do(self, child: Child) -> bool:
        """While a run drains, a producer would only come to leave again, and so would an engine that has left."""
        idle = child.role is Role.PRODUCER or (child.role is Role.ENGINE and self._core.lives[child].code == EXIT_DRAINED)
        return idle and await self._hooks.drained()

    async def _start(self, child: Child) -> None:
        command = self._plan.argv(child)
        if child.role is not Role.REDIS:
            await self._hooks.redis_answers()
        if child.role is Role.TRAINER:
            command = (*command, await self._hooks.trainer_flag())
        log = self.log_path(child)
        self._log_offsets[child] = log.stat().st_size if log.exists() else 0
        process = ChildProcess.start(command, log=log, env=self._plan.environment(child))
        record = Record(child=child, identity=process.identity, command=command, settings=self._settings, started_at=time.time())
        if self._resources is not None and self._core.lives[child].restarts:
            self._resources.restarted(child.role.value)
        self._install(child, process, record)
        self._note(f"{child} started (pid {process.identity.pid})")

    def _install(self, child: Child, process: ChildProcess, record: Record) -> None:
        self._processes[child] = process
        self._records[child] = record
        self._keep_records()

    def _keep_records(self) -> None:
        """A disk that is full must not end a run; tried again until it is written."""
        try:
            write_records(self._folder, [*self._records.values(), *(found for found, _ in self._found.values())], redis_url=self._redis_url)
        except OSError as problem:
            self._unwritten = True
            _LOG.warning("processes.json was not written (%s): until it is, a later `rollstream up --resume` will not find all that runs now", problem)
        else:
            self._unwritten = False

    def _keep_resources(self) -> None:
        if self._resources is not None:
            try:
                self._resources.write()
            except OSError as problem:
                _LOG.warning("resources.json was not written: %s", problem)

    async def _watch(self, child: Child) -> None:
        process = self._processes[child]
        pid = process.identity.pid
        code = await process.wait()
        if code is None:
            in_order = self._core.ending if child.role is Role.REDIS else await self._hooks.drained()
            code = EXIT_DRAINED if in_order else EXIT_FAULT
        if self._resources is not None:
            self._resources.ended(pid, child.role.value, process.cpu_s)
        if self._processes[child] is process:  # else it was left behind, and its successor has been started
            await self._events.put(_Exited(child, code, self._last_words(child)))

    def _last_words(self, child: Child) -> str:
        """The end of what it wrote since it was started."""
        path = self.log_path(child)
        try:
            with path.open("rb") as log:
                size = log.seek(0, 2)
                log.seek(max(self._log_offsets.get(child, 0), size - _TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join([*text.splitlines()[-_TAIL_LINES:], f"(all of it in {path})"])

    async def _settle(self) -> None:
        self._keep_resources()
        failure = ""
        try:
            async with asyncio.timeout(_SETTLE_S):
                await self._hooks.settle()
        except Exception as problem:  # noqa: BLE001 - a summary that fails must not keep Redis and the rest from their end; it makes the exit code 1
            failure = f"the run is over, but its summary was not written: {problem!r}"
            _LOG.exception("settling")
        self._events.put_nowait(_Settled(failure))

    async def _sample(self, resources: Resources) -> None:
        """Samples what the children cost, for ever; cancelled at the end. A look that fails is told, and the run goes on."""
        while True:
            pids = {process.identity.pid: child.role.value for child, process in self._processes.items() if process.open}
            try:
                sample = await asyncio.to_thread(measure, pids)
                resources.record(sample, alive={process.identity.pid for process in self._processes.values() if process.open})
            except Exception:  # noqa: BLE001 - figures are not worth a run
                _LOG.exception("what the processes cost could not be measured")
            self._keep_resources()
            if self._unwritten:
                self._keep_records()
            await asyncio.sleep(_SAMPLE_S)

    def _tell_exit(self, child: Child, code: int) -> None:
        how = f"exit {code}" if code >= 0 else f"signal {-code}"
        life = self._core.lives[child]
        again = ""
        if life.at is not None and code != EXIT_DRAINED:  # who left in good order comes back only if the run goes on, and that is told then
            again = f"; starts again in {max(0.0, life.at - time.monotonic()):.1f} s"
        self._note(f"{child} ended ({how}){again}")

    def _note(self, text: str) -> None:
        _LOG.info("%s", text)
        self.notes.append((time.time(), text))


async def _end(process: ChildProcess) -> None:
    """SIGTERM, then SIGKILL past a deadline; what the kernel holds after another one is left behind."""
    for ask in (process.terminate, process.kill):
        ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await process.wait()
        if not process.open:
            return
    _LOG.error("process %d was killed and has not ended within %.0f s: the kernel holds it", process.identity.pid, _LEAVE_S)
    process.close()


def _named(children: Collection[Child]) -> str:
    return ", ".join(map(str, children)) or "none"


async def _cancel(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
