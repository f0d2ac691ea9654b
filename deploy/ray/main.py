"""`rollstream up --ray`: a run on a Ray cluster, to its end.

Before anything is started: the configuration is whole, the layout fits, Redis is there and reached by every node, the run is there and is this one (`--resume`)
or not there (`--new`). Then: room for everyone within a bound, the actors, and the same views as on one machine.

The command only watches: killed, it takes nothing along, and `--resume` finds what goes on. Ctrl-C, or SIGTERM, ends the run in good order: trainer, producers,
engines, summary; a second one leaves the command at once, and what was asked to stop stops. Exit codes: as `rollstream up`, so 1 where somebody had to be
killed; 75 also: no room on the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, replace

from buffer.redis_ledger import RedisLedger
from deploy.checks import check_all
from deploy.config import ReaderConfig, UpConfig, bind
from deploy.http.app import announcement, serve_app
from deploy.live import show
from deploy.placement import Placement
from deploy.ray.crew import Crew, placement_of
from deploy.ray.placement_group import reserve
from deploy.ray.reach import check_reach
from deploy.snapshot import PictureSource, picture_source
from deploy.stop_times import ENGINE, PRODUCER, TRAINER
from deploy.summary import write_summary
from deploy.up.supervisor import Child, Life
from producer.ray_actor import About, Settings, give_back
from producer.ray_fleet import Fleet, Left, connected, read_settings, unless
from producer.ray_names import role_of
from protocol.config import load
from protocol.connection import Client, check_server, connect
from protocol.daemon import run_daemon
from protocol.errors import EXIT_CONFIG, EXIT_DRAINED, EXIT_FAULT, EXIT_REPLACED, RollstreamError, RunExists, RunMissing
from protocol.identity import identify
from protocol.keys import Keys

_LOG = logging.getLogger(__name__)
_ALONE_S: Mapping[str, float] = {PRODUCER: 180.0, ENGINE: 30.0}
"""After a drained run these leave by themselves; we wait so long before we ask."""
_SUMMARY_S = 120.0
_STEADY_S = 20.0
"""An actor that is there when we come answers within this, or is being moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the run ended, or why it is to end."""

    code: int
    message: str = ""
    cut_short: bool = False
    """The operator asked for the end."""
    replaced: bool = False
    """The run goes on elsewhere: its record is not ours to close."""


_CUT_SHORT = Verdict(code=EXIT_DRAINED, cut_short=True)


def weigh(verdict: Verdict, left: Left) -> Verdict:
    """What the way somebody left makes of the verdict. Pure. What is bad already stays.

    A trainer must end in good order. Of the others a kill and a fault count; one that was to try again, or was replaced, had nothing to lose.
    """
    trainer = _is(left.name, TRAINER)
    code = EXIT_FAULT if trainer and left.killed else left.code
    if code == EXIT_DRAINED or not (trainer or code == EXIT_FAULT):
        return verdict
    replaced = trainer and code == EXIT_REPLACED
    return replace(
        verdict,
        code=verdict.code or (EXIT_FAULT if replaced else code),
        message=verdict.message or f"{left.name} {left.how}",
        replaced=verdict.replaced or replaced,
    )


class SummaryMissing(RollstreamError):
    """The run ended, and its summary could not be written; `rollstream summary` writes it where the trainer ran."""


class UpFailed(RollstreamError):
    """The run ended otherwise than drained."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message or "the run did not end in good order")
        self.exit_code = verdict.code


def run(options: argparse.Namespace) -> int:
    return run_daemon("rollstream up --ray", lambda stop: up_on_ray(options, stop))


async def up_on_ray(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """Run to the end of the run, or until `stop`. Raises: `RollstreamError` with the exit code to use."""
    config = load(UpConfig, options.config, sets=options.set)
    check_all(config)
    placement = placement_of(config)
    check_reach(config, ())
    settings = read_settings(options.config, options.set, config, run=config.run.name, digest=config.digest)
    listener = bind(config.http)
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        await _check_run(config, client, resume=options.resume)
        async with connected(options.ray or config.ray.address, config.run.name):
            import ray

            check_reach(config, {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
            crew = Crew(config, settings, Fleet(config.run.name))
            there = await crew.fleet.names()
            if there and not options.resume:
                raise RunExists(f"run {config.run.name!r} has actors on this cluster ({', '.join(there)}): go on with it by --resume, or use another run.name")
            life = _Life(crew, stop)
            if not await life.make_room(placement, client):
                verdict = await life.end(_CUT_SHORT)
            else:
                async with (
                    picture_source(
                        config.redis.url,
                        config.run.name,
                        folder=config.run.folder,
                        patience_s=config.run.stall_seconds,
                        transport=config.weights.transport,
                    ) as source,
                    _observers(config, source, life, listener, live=not options.no_live and sys.stdout.isatty()),
                ):
                    verdict = await life.run(crew.wanted(placement))
    finally:
        await client.aclose()
        if listener is not None:
            listener.close()
    if verdict.code:
        raise UpFailed(verdict)
    sys.stdout.write(f"{verdict.message}\n")


async def _check_run(config: UpConfig, client: Client, *, resume: bool) -> None:
    """Whether the run is there or not, as asked. Writes nothing."""
    facts = await check_server(client, url=config.redis.url)
    _LOG.info("Redis %s at %s: %s", facts.version, config.redis.url, facts.durability)
    there = bool(await client.exists(Keys(config.run.name).state))
    if there and not resume:
        raise RunExists(f"run {config.run.name!r} is in {config.redis.url} already: go on with it by --resume, or choose another run.name")
    if there:
        await RedisLedger(client, Keys(config.run.name)).join(await asyncio.to_thread(identify, config.run, config.model, config.data, config.rollout))
    elif resume:
        raise RunMissing(f"there is no run {config.run.name!r} in {config.redis.url} to resume: start it with --new, or correct run.name or redis.url")


class _Life:
    """The run as this command sees it, from the first actor to the summary."""

    def __init__(self, crew: Crew, stop: asyncio.Event) -> None:
        self._crew = crew
        self._fleet = crew.fleet
        self._stop = stop
        self._trainer_node = ""
        self.notes: deque[tuple[float, str]] = deque(maxlen=50)
        self.lives: Mapping[Child, Life] = {}
        """For the live view, which shows processes of this machine; here are none."""

    async def make_room(self, placement: Placement, client: Client) -> bool:
        """Who has ended makes room, and there is room for everyone; False: `stop` came first. Raises: as `reserve`."""
        crew = self._crew
        await self._clear_ended()
        asked = reserve(
            placement,
            crew.names,
            rooms=crew.rooms(placement),
            run=crew.config.run.name,
            cpus=crew.cpus,
            wait_s=crew.config.placement.wait_seconds,
            client=client,
        )
        if (room := await unless(self._stop, asked)) is None:
            return False
        crew.group, crew.dealt = room
        return True

    async def run(self, wanted: list[str]) -> Verdict:
        """Order of stopping: trainer, producers, engines, summary, what was reserved."""
        there = await self._clear_others(wanted)
        mine = [name for name in wanted if name not in there]
        try:
            for name in wanted:
                await self._crew.start(name)
            started = await unless(self._stop, self._fleet.wait_started(wanted, within_s=self._crew.config.placement.wait_seconds))
        except RollstreamError as problem:
            if not there:
                await self._fleet.kill_silent(mine)
                await self.end(Verdict(code=EXIT_FAULT))
                raise
            _LOG.warning("%s; the run goes on without, and Ray starts them once there is room", problem)
        else:
            if started is None:
                await self._fleet.kill_silent(mine)
                return await self.end(_CUT_SHORT)
            for about in started:
                _LOG.info("%s runs on %s (node %s)%s", about.name, about.host, about.node[:8], f", GPU {about.gpus}" if about.gpus else "")
        verdict = await self._follow(wanted)
        return await self.end(verdict)

    async def _clear_ended(self) -> None:
        """Who has ended makes room, and so does what was reserved, if nobody sits in it any more: it may have been for another layout."""
        there = await self._there()
        ended = [name for name, about in there.items() if about is not None and about.code is not None]
        for name in ended:
            _LOG.info("%s of an earlier start has ended", name)
        await self._crew.stop(*ended)
        if ended and all(_is(name, PRODUCER) for name in there if name not in ended):
            await asyncio.to_thread(give_back, self._crew.config.run.name)

    async def _clear_others(self, wanted: list[str]) -> set[str]:
        """Who runs with other settings makes room for who is to run now; the names of those that stay. Who is moved, or was added by others, is let be."""
        stay = set()
        for name, about in (await self._there()).items():
            if name in wanted and about is not None and about.digest != self._crew.settings.digest:
                _LOG.info("%s runs with other settings and is ended", name)
                await self._crew.stop(name)
                continue
            stay.add(name)
            if name in wanted:
                _LOG.info("%s goes on", name)
        return stay

    async def _there(self) -> dict[str, About | None]:
        """Whoever is on the cluster, in the order of stopping, and what they tell; None: does not answer."""
        names = sorted(await self._fleet.names(), key=_stop_rank)
        return dict(zip(names, await asyncio.gather(*(self._fleet.about(name, timeout_s=_STEADY_S) for name in names)), strict=True))

    async def _follow(self, names: list[str]) -> Verdict:
        """Until the trainer has ended, or everyone has where there is none; until a fault that only a person can mend; or until `stop`."""
        watches = {asyncio.create_task(self._fleet.ended(name, tell=self._note), name=f"up:watch-{name}"): name for name in names}
        asked = asyncio.create_task(self._stop.wait(), name="up:stop")
        decides = TRAINER if any(name.startswith(TRAINER) for name in names) else PRODUCER
        try:
            while any(name.startswith(decides) for name in watches.values()):
                await asyncio.wait({*watches, asked}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    return _CUT_SHORT
                for watch in [watch for watch in watches if watch.done()]:
                    if (verdict := self._judge(watches.pop(watch), watch.result())) is not None:
                        return verdict
            return Verdict(code=EXIT_DRAINED)
        finally:
            for task in (*watches, asked):
                task.cancel()
            await asyncio.gather(*watches, asked, return_exceptions=True)

    def _judge(self, name: str, about: About | None) -> Verdict | None:
        """What the end of an actor means for the run; None: nothing."""
        if about is None:
            self._note(f"{name} is gone")
            return (
                Verdict(code=EXIT_FAULT, message=f"{name} was ended by somebody: `--resume` goes on from its last checkpoint") if _is(name, TRAINER) else None
            )
        self._note(f"{name} ended with exit code {about.code} on {about.host}" + (f": {about.message}" if about.message else ""))
        if _is(name, TRAINER):
            self._trainer_node = about.node
            if about.code == EXIT_DRAINED:
                return Verdict(code=EXIT_DRAINED)
            code = EXIT_FAULT if about.code == EXIT_REPLACED else about.code or EXIT_FAULT
            return Verdict(code=code, message=f"{name} ended (exit {about.code}):\n{about.message}", replaced=about.code == EXIT_REPLACED)
        if about.gave_up:
            return Verdict(code=EXIT_FAULT, message=f"{name} failed {about.failures} times and gave up, last with exit {about.code}:\n{about.message}")
        if about.code == EXIT_CONFIG:
            return Verdict(code=EXIT_CONFIG, message=f"{name} cannot run like this (exit 2):\n{about.message}")
        return None

    async def end(self, verdict: Verdict) -> Verdict:
        """Everyone leaves, also who was added by others; then the summary is written where the trainer ran. Worse than `verdict` where one did not end well."""
        names = await self._fleet.names()
        drains = verdict.code == EXIT_DRAINED and not verdict.cut_short
        for role in (TRAINER, PRODUCER, ENGINE):
            mine = [name for name in names if _is(name, role)]
            if drains and role in _ALONE_S:
                await self._let_end(mine, within_s=_ALONE_S[role])
            for left in await self._crew.stop(*mine):
                if left.code or left.killed:
                    self._note(f"{left.name} {left.how}")
                if left.about is not None and role == TRAINER:
                    self._trainer_node = left.about.node
                verdict = weigh(verdict, left)
        told = f"run {self._crew.config.run.name} " + ("was stopped" if verdict.cut_short else "has ended")
        if not verdict.replaced and self._trainer_node:
            try:
                told = f"{told} at step {await self._summarise()}: {self._crew.config.run.folder / 'summary.json'}"
            except RunMissing:
                told = f"{told} before its trainer had begun it"
            except RollstreamError as problem:
                verdict = replace(verdict, code=verdict.code or EXIT_FAULT, message=verdict.message or f"the summary could not be written: {problem}")
        await asyncio.to_thread(give_back, self._crew.config.run.name)
        return replace(verdict, message=verdict.message or told)

    async def _let_end(self, names: list[str], *, within_s: float) -> None:
        """A further wish to stop does not wait for it."""
        watches = [asyncio.create_task(self._fleet.ended(name), name=f"up:leave-{name}") for name in names]
        asked = asyncio.create_task(self._stop.wait(), name="up:stop")
        everyone = asyncio.gather(*watches)
        await asyncio.wait((everyone, asked), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (everyone, asked):
            task.cancel()
        await asyncio.gather(everyone, asked, return_exceptions=True)

    async def _summarise(self) -> int:
        """The step the run came to. The record lies on the trainer's node, so it is read there, if that still is. Raises: `RollstreamError`."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self._trainer_node, soft=True)
        try:
            async with asyncio.timeout(_SUMMARY_S):
                return int(await ray.remote(summarise).options(num_cpus=0, scheduling_strategy=where, max_retries=2).remote(self._crew.settings))
        except (RayError, TimeoutError) as problem:
            if isinstance(problem, RunMissing):  # what a task raises is of its own class too
                raise
            raise SummaryMissing(str(problem) or f"no answer within {_SUMMARY_S:.0f} s") from problem

    def _note(self, text: str) -> None:
        self.notes.append((time.time(), text))
        _LOG.info("%s", text)


def summarise(settings: Settings) -> int:
    """Write `summary.json` of the run where this is called; the step it came to."""

    async def write() -> int:
        with settings.file() as path:
            config = load(ReaderConfig, path, sets=settings.sets)
        client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
        try:
            return int((await write_summary(config.run.folder, client, Keys(config.run.name)))["steps"])
        finally:
            await client.aclose()

    return asyncio.run(write())


@contextlib.asynccontextmanager
async def _observers(config: UpConfig, source: PictureSource, life: _Life, listener: socket.socket | None, *, live: bool) -> AsyncIterator[None]:
    """HTTP and the view: their faults are told, and never end a run."""
    looks = {"view": show(source, life, live=live, last_step=config.stop.steps)}
    if listener is not None:
        sys.stdout.write(announcement(listener))
        sys.stdout.flush()
        looks["http"] = serve_app(source, listener)
    tasks = [asyncio.create_task(_observe(name, look), name=f"up:{name}") for name, look in looks.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _observe(name: str, look: Coroutine[None, None, None]) -> None:
    try:
        await look
    except Exception:  # noqa: BLE001 - an observer that fails must not end a run
        _LOG.exception("%s ended; the run goes on without it", name)


def _is(name: str, role: str) -> bool:
    return role_of(name) == role


def _stop_rank(name: str) -> int:
    return (TRAINER, PRODUCER, ENGINE).index(role_of(name))
