"""The `rollstream up` end of `rollstream scale`: follows what is wished for, and says how many there are to be and which are there."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from redis.exceptions import RedisError

from deploy.scaling import LAUNCHER, forget, wishes
from deploy.snapshot import Picture, PictureSource
from deploy.up.launcher import SCALED, Launcher
from deploy.up.supervisor import Phase
from protocol.connection import connect
from protocol.errors import RollstreamError
from protocol.keys import Keys
from protocol.messages import LauncherStatus
from protocol.presence import Presence
from protocol.wakeups import RECHECK_S, Topic, wakeups

_LOG = logging.getLogger(__name__)
_BEAT_S = 2.5
_DEADLINE_S = 5.0
_SAID = 500
"""Characters of what a child said that are passed on."""


class Wishes:
    """consumes: wishes, exits of children / produces: processes, `LauncherStatus` / waits for: a wish / unblocked by: wake-ups `run`, and a look every second
    while somebody is on the way.

    Wishes of before are forgotten: a run that starts, or goes on, begins with what its configuration says.
    """

    def __init__(self, url: str, run: str, folder: Path, launcher: Launcher, source: PictureSource) -> None:
        self._url, self._keys, self._launcher, self._source = url, Keys(run), launcher, source
        self._host = socket.gethostname()
        self._id = f"{self._host}:{folder}"
        """The same for whoever goes on with this folder."""
        self._number = 0
        self._refused: dict[str, str] = {}

    async def follow(self) -> None:
        """For ever. A Redis that is away is waited out."""
        client = connect(self._url, deadline_s=_DEADLINE_S, max_connections=8)
        presence = Presence(client, self._keys, LAUNCHER, LauncherStatus)
        try:
            async with wakeups(client, self._keys) as waker:
                forgotten = False
                while True:
                    mark = waker.mark(Topic.RUN)
                    settled = True
                    try:
                        if not forgotten:
                            await forget(client, self._keys)
                            forgotten = True
                        await self._take(*await wishes(client, self._keys))
                        status = self._status(await self._source.picture())
                        settled = not status.leaving and len(status.running) == sum(status.wanted.values())
                        await presence.beat(self._id, status)
                    except (RollstreamError, RedisError, OSError) as problem:
                        _LOG.warning("what is wished for is not known: %s", problem)
                    await waker.wait(Topic.RUN, since=mark, timeout_s=_BEAT_S if settled else RECHECK_S)
        finally:
            await client.aclose()

    async def _take(self, number: int, counts: dict[str, int]) -> None:
        if number < self._number:
            _LOG.warning("Redis has lost the newest wishes for more or fewer processes: what is there stays")
        elif number > self._number:
            self._refused = {role.value: await self._launcher.scale(role, counts[role]) for role in SCALED if role in counts}
        self._number = number

    def _status(self, picture: Picture) -> LauncherStatus:
        """Who runs: a process that is alive, was not told to leave, and has announced itself."""
        everyone = [*((one.host, one.pid) for one in picture.producers), *((one.host, one.pid) for one in picture.engines)]
        announced = {pid for host, pid in everyone if host == self._host}
        lives, alive = self._launcher.lives, {child: pid for role in SCALED for child, pid in self._launcher.processes(role).items()}
        leaving = [child for child in alive if lives[child].phase is Phase.STOPPING]
        return LauncherStatus(
            launcher_id=self._id,
            wanted={role.value: count for role, count in self._launcher.wanted.items()},
            running=tuple(str(child) for child, pid in sorted(alive.items()) if child not in leaving and pid in announced),
            leaving=tuple(map(str, sorted(leaving))),
            wish=self._number,
            refused={role: why for role, why in self._refused.items() if why},
            given_up={str(child): life.why[-_SAID:] for child, life in lives.items() if life.wanted and life.why},
            host=self._host,
            pid=os.getpid(),
        )
