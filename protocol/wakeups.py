"""Wake-ups: wait for a change that another process makes, without polling.

Scripts `PUBLISH` a topic to the run's wake-up channel when they change something somebody may wait for. A waiter reads the state, then waits for the topic
and reads again. A message that is lost (reconnect, failover) costs at most `RECHECK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import TypeAlias

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from protocol.connection import Client
from protocol.keys import Keys

RECHECK_S = 1.0
_RECONNECT_S = 0.2
_SILENCE_S = 4.0
"""After so long without a message the connection is asked whether it lives; after twice as long it is made anew."""
_LOG = logging.getLogger(__name__)


class Topic(StrEnum):
    SLOT = "slot"
    """Capacity, budget or a version came free: reserve may succeed."""
    READY = "ready"
    """A group became READY: lease may succeed."""
    WEIGHTS = "weights"
    """The weight pointer moved, or an engine needs weights: a new boot, or one found unfit."""
    ENGINES = "engines"
    """An engine changed state or version."""
    RUN = "run"
    """The run was created, attached, or drains."""


Mark: TypeAlias = Mapping[Topic, int]
"""Messages seen so far, by topic."""


class Wakeups:
    """One subscription shared by all waiters of a process. Use `async with wakeups(client, keys) as w`."""

    def __init__(self) -> None:
        self._seen = dict.fromkeys(Topic, 0)
        self._waiters: dict[Topic, set[asyncio.Future[None]]] = {topic: set() for topic in Topic}

    async def wait(self, *topics: Topic, since: Mark | None = None, timeout_s: float = RECHECK_S) -> None:
        """Return at the next message of any of `topics` after `mark()`, or after `timeout_s`. Read the state again either way."""
        if since is not None and any(self._seen[topic] != since[topic] for topic in topics):
            return
        woken = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiters[topic].add(woken)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await woken
        finally:
            for topic in topics:
                self._waiters[topic].discard(woken)

    def mark(self, *topics: Topic) -> Mark:
        """Take this *before* reading the state, pass it to `wait` after: a change in between is then not missed."""
        return {topic: self._seen[topic] for topic in topics}

    async def listen(self, client: Client, keys: Keys) -> None:
        """Wake the waiters at every message of the run, for ever; `wakeups` runs it.

        Consumes: the run's channel. Waits for: Redis, with a new subscription after every break. A new subscription wakes everybody, for whatever
        was missed before it stood.
        """
        while True:
            await self._listen(client, keys)
            await asyncio.sleep(_RECONNECT_S)

    async def _listen(self, client: Client, keys: Keys) -> None:
        """One subscription, until it breaks."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                await client.members()  # in a cluster the subscription goes through one of these, each time another
                pubsub = client.pubsub()
                stack.push_async_callback(pubsub.aclose)
                await pubsub.subscribe(keys.wakeups)
                silent = False
                while True:
                    message = await pubsub.get_message(timeout=_SILENCE_S)
                    if message is None and silent:
                        raise RedisConnectionError("the subscription does not answer")
                    if message is None:
                        await pubsub.ping()
                    else:
                        self._heard(message["type"], message["data"])
                    silent = message is None
            except (RedisError, OSError) as problem:
                _LOG.warning("wake-ups of %s are interrupted, waiters look every %.0f s: %s", keys.run, RECHECK_S, problem)

    def _heard(self, kind: str, text: bytes | int | None) -> None:
        if kind == "subscribe":
            for topic in Topic:
                self._fire(topic)
        elif kind == "message" and isinstance(text, bytes):
            with contextlib.suppress(ValueError):  # a topic of a newer minor version
                self._fire(Topic(text.decode()))

    def _fire(self, topic: Topic) -> None:
        self._seen[topic] += 1
        for woken in self._waiters[topic]:
            if not woken.done():
                woken.set_result(None)


@contextlib.asynccontextmanager
async def wakeups(client: Client, keys: Keys) -> AsyncIterator[Wakeups]:
    """Wake-ups of a run while the context is open."""
    waker = Wakeups()
    task = asyncio.create_task(waker.listen(client, keys), name="wakeups:listen")
    try:
        yield waker
    finally:
        task.cancel()
        await asyncio.wait([task])  # unlike `await task`, this tells our caller's cancellation from the task's
    if not task.cancelled():
        task.result()
