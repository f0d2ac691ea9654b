"""`rollstream scale producers N` and `scale engines N`: while a run goes on, on this machine or on a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable

from deploy.config import UpConfig, reader_url
from deploy.scaling import LAUNCHER, ROLES, wish
from producer.stopping import unless
from protocol.config import load
from protocol.connection import Client, check_server, connect
from protocol.daemon import run_daemon
from protocol.errors import ConfigError, RollstreamError, Unavailable
from protocol.keys import Keys
from protocol.messages import LauncherStatus
from protocol.presence import Presence
from protocol.wakeups import RECHECK_S, Topic, Wakeups, wakeups

_ANSWER_S = 15.0
"""For the `up` of this run to take notice: it looks every few seconds, and a wake-up is seldom lost."""


class NotScaled(RollstreamError):
    """Whoever was added cannot run; the run goes on without."""


class Slow(Unavailable):
    """Whoever was added has not announced itself in time; `up` goes on trying."""


def scale(options: argparse.Namespace) -> int:
    config = load(UpConfig, options.config, sets=options.set)
    if options.ray is None and not config.ray.address:
        return run_daemon("rollstream scale", lambda stop: unless(stop, _scale_here(options, config), name="scale"))
    from deploy.ray.scale import scale_on_ray

    return run_daemon("rollstream scale", lambda _: scale_on_ray(options, config))


async def _scale_here(options: argparse.Namespace, config: UpConfig) -> None:
    """Have the `up` of the run bring the number of them to N; return once who was added has announced itself and who was too many has left.

    Engines of an evaluation's own are not counted and stay. Raises: `ConfigError` (no `up` runs, or it refuses), `NotScaled`, `Slow`.
    """
    url, role = reader_url(config.run, config.redis), ROLES[options.what]
    client = connect(url, deadline_s=5.0)
    keys = Keys(config.run.name)
    try:
        await check_server(client, url=url)
        async with wakeups(client, keys) as waker:
            one = _Launcher(client, keys, waker, role)
            before = of(role, (await one.find(_by_hand(options, config))).running)
            number = await wish(client, keys, role, options.count)
            after = await one.follows(number, options.count, wait_s=config.placement.wait_seconds)
    finally:
        await client.aclose()
    added, left = (", ".join(sorted(names, key=_index)) or "none" for names in (after - before, before - after))
    sys.stdout.write(f"{options.what}: {options.count} now; added {added}; left {left}\n")


class _Launcher:
    """The `up` of a run, as its status tells."""

    def __init__(self, client: Client, keys: Keys, waker: Wakeups, role: str) -> None:
        self._presence = Presence(client, keys, LAUNCHER, LauncherStatus)
        self._waker, self._role = waker, role

    async def find(self, by_hand: str) -> LauncherStatus:
        """Raises: `ConfigError` if there is none, or if there are several."""
        found = await self._presence.members()
        if not found:
            raise ConfigError(f"no `rollstream up` of this run is there: start it (`--resume` goes on with what runs). {by_hand}")
        if len(found) > 1:
            raise ConfigError(
                f"several `rollstream up` have this run ({', '.join(one.launcher_id for one in found)}): which is meant cannot be told. {by_hand}"
            )
        return found[0]

    async def follows(self, number: int, count: int, *, wait_s: float) -> set[str]:
        """Return once there are so many, and nobody leaves any more: their names."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._until(lambda status: status.wish >= number)
        except TimeoutError as problem:
            raise Slow(f"`rollstream up` has not answered within {_ANSWER_S:.0f} s: look at its log") from problem
        try:
            async with asyncio.timeout(wait_s):
                return of(self._role, (await self._until(lambda status: reached(status, self._role, count))).running)
        except TimeoutError as problem:
            raise Slow(
                f"not all of the {count} {self._role}s have announced themselves within placement.wait_seconds = {wait_s:g}: `rollstream up` goes on trying, "
                "and its log says why"
            ) from problem

    async def _until(self, holds: Callable[[LauncherStatus], bool]) -> LauncherStatus:
        """Raises: `NotScaled` if the `up` leaves."""
        while True:
            mark = self._waker.mark(Topic.RUN, Topic.ENGINES)
            found = await self._presence.members()
            if not found:
                raise NotScaled("`rollstream up` has ended meanwhile")
            for status in found:
                if holds(status):
                    return status
            await self._waker.wait(Topic.RUN, Topic.ENGINES, since=mark, timeout_s=RECHECK_S / 2)


def reached(status: LauncherStatus, role: str, count: int) -> bool:
    """Whether there are so many, and nobody leaves any more. Pure.

    Raises: `ConfigError` for a wish that is refused, `NotScaled` for one that nothing comes of.
    """
    if refused := status.refused.get(role):
        raise ConfigError(f"`rollstream up` does not do it: {refused}")
    wanted = status.wanted.get(role)
    if wanted != count:
        raise NotScaled(f"somebody else has wished for {wanted} meanwhile")
    there, leaving = of(role, status.running), of(role, status.leaving)
    if given_up := [status.given_up[name] for name in sorted(of(role, status.given_up))]:
        raise NotScaled(f"{len(there)} of {count} are there: {'; '.join(given_up)}")
    return len(there) == count and not leaving


def of(role: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name.rpartition("-")[0] == role}


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])


def _by_hand(options: argparse.Namespace, config: UpConfig) -> str:
    command = f"rl-producer -c {options.config} --index I" if options.what == "producers" else f"rollstream engine -c {options.config} --index I"
    redis = "" if config.redis.url else f" --set redis.url=URL (redis_url in {config.run.folder / 'processes.json'})"
    return f"By hand, with an index that is free: `{command}{redis}`; Ctrl-C ends it in good order. A run on Ray: --ray [ADDRESS], or ray.address"
