from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.redis_server import redis_server, server_command
from protocol import wakeups as module
from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.wakeups import Topic, Wakeups, wakeups

LONG_S = 120.0
"""Nothing in these tests takes so long; a test that waits it out has missed its wake-up and fails."""


async def subscribed(waker: Wakeups) -> None:
    """Return once a subscription stands that did not when asked."""
    await waker.wait(Topic.RUN, since=dict.fromkeys(Topic, 0), timeout_s=LONG_S)
    assert waker.mark(Topic.RUN)[Topic.RUN] > 0


@pytest_asyncio.fixture
async def waker(redis: Client, keys: Keys) -> AsyncIterator[Wakeups]:
    async with wakeups(redis, keys) as waker:
        await subscribed(waker)
        yield waker


async def test_a_message_wakes_its_waiter(waker: Wakeups, redis: Client, keys: Keys) -> None:
    mark = waker.mark(Topic.SLOT)
    waiting = asyncio.create_task(waker.wait(Topic.SLOT, since=mark, timeout_s=LONG_S), name="test:wait")
    await redis.publish(keys.wakeups, "slot")
    await waiting
    assert waker.mark(Topic.SLOT) != mark


async def test_one_message_wakes_every_waiter_of_any_of_its_topics(waker: Wakeups, redis: Client, keys: Keys) -> None:
    async with asyncio.timeout(LONG_S / 2), asyncio.TaskGroup() as group:
        for topics in [(Topic.READY,), (Topic.SLOT, Topic.READY), (Topic.READY, Topic.RUN)]:
            group.create_task(waker.wait(*topics, since=waker.mark(*topics), timeout_s=LONG_S), name="test:wait")
        await redis.publish(keys.wakeups, "ready")


async def test_a_message_between_mark_and_wait_is_not_missed(waker: Wakeups, redis: Client, keys: Keys) -> None:
    mark = waker.mark(Topic.SLOT, Topic.READY)
    await redis.publish(keys.wakeups, "ready")
    while waker.mark(Topic.SLOT, Topic.READY) == mark:
        await waker.wait(Topic.READY, since=mark, timeout_s=LONG_S)
    async with asyncio.timeout(LONG_S / 2):
        await waker.wait(Topic.SLOT, Topic.READY, since=mark, timeout_s=LONG_S)


async def test_messages_of_other_topics_and_of_newer_versions_wake_nobody(waker: Wakeups, redis: Client, keys: Keys) -> None:
    before = waker.mark(*Topic)
    for text in ("invented", b"\xff", "weights"):
        await redis.publish(keys.wakeups, text)
    await waker.wait(Topic.WEIGHTS, since=before, timeout_s=LONG_S)
    assert {topic for topic, seen in waker.mark(*Topic).items() if seen != before[topic]} == {Topic.WEIGHTS}


async def test_a_lost_message_costs_the_timeout_and_no_more(waker: Wakeups) -> None:
    mark = waker.mark(Topic.SLOT)
    async with asyncio.timeout(LONG_S):
        await waker.wait(Topic.SLOT, since=mark, timeout_s=0.01)
        await waker.wait(Topic.SLOT, timeout_s=0.01)
    assert waker.mark(Topic.SLOT) == mark


async def test_waiting_leaves_nothing_behind(waker: Wakeups) -> None:
    for _ in range(3):
        await waker.wait(Topic.SLOT, Topic.READY, timeout_s=0)
    cancelled = asyncio.create_task(waker.wait(Topic.SLOT, timeout_s=LONG_S), name="test:wait")
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled()
    assert not any(waker._waiters.values())


async def test_wake_ups_survive_a_restart_of_the_server(tmp_path: Path, keys: Keys) -> None:
    client = connect(server_command(tmp_path).url, deadline_s=LONG_S)
    try:
        async with wakeups(client, keys) as waker:
            async with redis_server(tmp_path):
                await subscribed(waker)
            mark = waker.mark(Topic.RUN)
            async with redis_server(tmp_path):
                await waker.wait(Topic.RUN, since=mark, timeout_s=LONG_S)
                assert waker.mark(Topic.RUN) != mark, "a new subscription wakes everybody"
                mark = waker.mark(Topic.SLOT)
                await client.publish(keys.wakeups, "slot")
                await waker.wait(Topic.SLOT, since=mark, timeout_s=LONG_S)
                assert waker.mark(Topic.SLOT) != mark
    finally:
        await client.aclose()


class Warned(logging.Handler):
    """Sets an event at the first warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


async def test_a_subscription_that_went_silent_is_made_anew(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_S", 0.05)
    warned = Warned()
    monkeypatch.setattr(module._LOG, "handlers", [warned])
    async with redis_server(tmp_path) as url:
        client = connect(url)
        pid = int((await client.info("server"))["process_id"])
        try:
            async with wakeups(client, keys) as waker:
                await subscribed(waker)
                os.kill(pid, signal.SIGSTOP)
                warned.event.clear()  # this process may have stood still for so long before
                try:
                    await warned.event.wait()
                    mark = waker.mark(Topic.RUN)
                finally:
                    os.kill(pid, signal.SIGCONT)
                await waker.wait(Topic.RUN, since=mark, timeout_s=LONG_S)
                assert waker.mark(Topic.RUN) != mark
        finally:
            await client.aclose()


async def test_the_caller_s_cancellation_is_not_swallowed(redis: Client, keys: Keys) -> None:
    inside = asyncio.Event()

    async def caller() -> None:
        async with wakeups(redis, keys):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(caller(), name="test:caller")
    await inside.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_cancellation_while_the_subscription_closes_is_not_swallowed(redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    closing, closed = asyncio.Event(), asyncio.Event()

    async def slow_to_close(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            await closed.wait()

    monkeypatch.setattr(Wakeups, "listen", slow_to_close)
    went_on = False

    async def caller() -> None:
        nonlocal went_on
        async with wakeups(redis, keys):
            await asyncio.sleep(0)
        went_on = True

    task = asyncio.create_task(caller(), name="test:caller")
    await closing.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not went_on
    closed.set()
    await asyncio.wait([other for other in asyncio.all_tasks() if other.get_name() == "wakeups:listen"])


async def test_an_error_of_the_body_comes_out_as_it_is(redis: Client, keys: Keys) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with wakeups(redis, keys):
            raise KeyError("mine")


async def test_a_bug_in_the_listener_is_raised_at_the_end(redis: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Wakeups, "listen", broken)
    with pytest.raises(ZeroDivisionError):
        async with wakeups(redis, keys) as waker:
            await waker.wait(Topic.RUN, timeout_s=0.01)
