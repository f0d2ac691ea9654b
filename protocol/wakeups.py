"""Wake-ups: wait for a change that another process makes, without polling.

Scripts `PUBLISH` a topic to the run's wake-up channel when they change something somebody may wait for. A waiter reads the state, then waits for the topic
and reads again. A message that is lost (reconnect, failover) costs at most `RECHECK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from enum import StrEnum

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.connection import Client
from protocol.keys import Keys

RECHECK_S = 1.0
_RECONNECT_S = 0.2


class Topic(StrEnum):
    SLOT = "slot"
    """Capacity, budget or a version came free: reserve may succeed."""
    READY = "ready"
    """A group became READY: lease may succeed."""
    WEIGHTS = "weights"
    """The weight pointer moved."""
    ENGINES = "engines"
    """An engine changed state or version."""
    RUN = "run"
    """The run was created, attached, or drains."""


class Wakeups:
    """One subscription shared by all waiters of a process. Use `async with wakeups(client, keys) as w`."""

    def __init__(self) -> None:
        self._waiters: dict[Topic, asyncio.Event] = {topic: asyncio.Event() for topic in Topic}

    async def wait(self, *topics: Topic, since: dict[Topic, asyncio.Event] | None = None, timeout_s: float = RECHECK_S) -> None:
        """Return at the next message of any of `topics` after `mark()`, or after `timeout_s`. Read the state again either way."""
        events = since or self.mark(*topics)
        waits = [asyncio.ensure_future(events[topic].wait()) for topic in topics]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def mark(self, *topics: Topic) -> dict[Topic, asyncio.Event]:
        """Take this *before* reading the state, pass it to `wait` after: a change in between is then not missed."""
        return {topic: self._waiters[topic] for topic in topics}

    def _fire(self, topic: Topic) -> None:
        fired, self._waiters[topic] = self._waiters[topic], asyncio.Event()
        fired.set()

    async def _listen(self, client: Client, keys: Keys) -> None:
        while True:
            pubsub = client.pubsub()
            try:
                await pubsub.subscribe(keys.wakeups)
                for topic in Topic:  # whatever was missed before the subscription stood
                    self._fire(topic)
                while True:
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=None)
                    if message is not None:
                        with contextlib.suppress(ValueError):  # a topic of a newer minor version
                            self._fire(Topic(message["data"].decode()))
            except (RedisConnectionError, RedisTimeoutError, OSError):
                await asyncio.sleep(_RECONNECT_S)
            finally:
                await pubsub.aclose()


@contextlib.asynccontextmanager
async def wakeups(client: Client, keys: Keys) -> AsyncIterator[Wakeups]:
    """Wake-ups of a run while the context is open."""
    waker = Wakeups()
    task = asyncio.create_task(waker._listen(client, keys), name="wakeups:listen")
    try:
        yield waker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
