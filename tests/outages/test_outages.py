"""A run while its Redis is killed, frozen, full, slow or cut off: nothing acknowledged is lost, nothing is trained twice, and slots do not all expire."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from buffer.client import ProducerBuffer
from buffer.contract import PutResult
from buffer.redis_put import _AT_ONCE, PutRequest, Reply
from protocol.connection import connect
from protocol.errors import RedisUnavailable
from protocol.keys import Keys
from protocol.messages import GroupHeader, Reason
from protocol.versions import Version
from protocol.wakeups import wakeups
from tests.clusters import Server, free_ports
from tests.pair import Pair, made, settings
from tests.proxy import Proxy, proxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
DEADLINE_S = 1.0
"""Of one command; a test waits much longer for what must return by then."""
LONG_S = 90.0
Begin = Callable[..., Awaitable[Pair]]


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path / "redis", free_ports(1)[0])
    await server.start()
    try:
        yield server
    finally:
        if server.running:
            server.send(signal.SIGCONT)
        await server.stop()


@pytest_asyncio.fixture
async def network(server: Server) -> AsyncIterator[Proxy]:
    async with proxy(server.port) as between:
        yield between


@pytest_asyncio.fixture
async def begin() -> AsyncIterator[Begin]:
    """Pairs whose clients close at the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(url: str, **changes: object) -> Pair:
            client = connect(url, deadline_s=DEADLINE_S)
            stack.push_async_callback(client.aclose)
            keys = Keys("run")
            pair = Pair(client, keys, await stack.enter_async_context(wakeups(client, keys)), **changes)  # type: ignore[arg-type]
            await pair.begin()
            return pair

        yield begin


@pytest.mark.parametrize(("how", "appendfsync"), [(signal.SIGKILL, "always"), (signal.SIGKILL, "everysec"), (signal.SIGTERM, "everysec")])
async def test_a_restart_in_the_middle_costs_a_wait(server: Server, begin: Begin, how: signal.Signals, appendfsync: str) -> None:
    await server.ask("CONFIG SET", "appendfsync", appendfsync)
    pair = await begin(server.url)
    running = asyncio.create_task(pair.run(), name="test:run")
    for _ in range(3):
        await pair.soon(pair.trained_any, running)
        if how is signal.SIGKILL:
            await server.write_out()
        await server.stop(how)
        await pair.told_of_outage(running)
        await server.start()
    await pair.end(running)


async def test_a_pause_longer_than_a_slot_expires_nobody(server: Server, begin: Begin) -> None:
    pair = await begin(server.url, config=settings(slot_seconds=8.0))
    running = asyncio.create_task(pair.run(), name="test:run")
    await pair.soon(pair.trained_any, running)
    with server.frozen():
        await asyncio.wait([running], timeout=10.0)
        assert not running.done()
    await pair.end(running)


async def test_a_pause_of_thirty_seconds_is_lived_through(server: Server, begin: Begin) -> None:
    pair = await begin(server.url, config=settings(slot_seconds=10.0))
    running = asyncio.create_task(pair.run(), name="test:run")
    await pair.soon(pair.trained_any, running)
    with server.frozen():
        await asyncio.wait([running], timeout=30.0)
        assert not running.done()
    await pair.end(running)
    assert all("Redis did not answer in time" in told for told in pair.outages)
    assert len(pair.outages) >= 3, "producers, heartbeats and trainer were told, each at its deadline"


async def test_every_call_ends_at_its_deadline_while_nothing_answers(server: Server, network: Proxy, begin: Begin) -> None:
    pair = await begin(network.url)
    buffer = ProducerBuffer(pair.ledger, pair.wakeups, "p")
    slot, other, *_ = await pair.patiently(lambda: buffer.reserve(4, 1 << 20))
    header, payload = made(slot, Version(pair.incarnation, 0), 1000)
    network.silence()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: buffer.reserve(1, 1 << 20),
        lambda: buffer.put(header, payload),
        buffer.renew,
        lambda: buffer.release(other, Reason.GIVEN_BACK),
        lambda: pair.ledger.open_step(pair.incarnation, 1),
        lambda: pair.ledger.payloads((header,)),
        pair.ledger.status,
        lambda: pair.ledger.join(pair.identity),
    ]

    async def told(call: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(RedisUnavailable, match="Redis did not answer in time"):
            await call()

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(told(call) for call in calls))
    network.speak()
    assert await pair.patiently(lambda: buffer.put(header, payload)) in (PutResult.STORED, PutResult.DUPLICATE)
    assert len(await pair.patiently(lambda: buffer.reserve(1, 1 << 20))) == 1, "the request whose reply was lost, answered again"
    await pair.patiently(buffer.give_back)
    status = await pair.patiently(pair.ledger.status)
    assert (status.ready, status.generating) == (1, 0)


async def test_a_burst_of_puts_ends_at_the_deadline_of_one(server: Server, network: Proxy, begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share their ways to the server: what waits for others that fail is not asked after them, one after the other."""
    pair = await begin(network.url, config=settings(groups_per_step=40))
    buffer = ProducerBuffer(pair.ledger, pair.wakeups, "p")
    slots = [slot for _ in range(4) for slot in await pair.patiently(lambda: buffer.reserve(10, 1 << 20))]
    groups = [made(slot, Version(pair.incarnation, 0), 100_000) for slot in slots]
    together, asked = pair.ledger._puts._together, 0
    send = together._send

    async def counted(batch: Sequence[PutRequest]) -> Sequence[Reply | Exception]:
        nonlocal asked
        asked += 1
        return await send(batch)

    monkeypatch.setattr(together, "_send", counted)
    network.silence()

    async def told(header: GroupHeader, payload: bytes) -> None:
        with pytest.raises(RedisUnavailable, match="put: Redis did not answer in time"):
            await pair.ledger.put(header, payload)

    async with asyncio.timeout(LONG_S):
        await asyncio.gather(*(told(*group) for group in groups))
    assert asked <= _AT_ONCE, "who waited for a way was told with those who had one"
    network.speak()
    await asyncio.gather(*(pair.patiently(lambda group=group: pair.ledger.put(*group)) for group in groups))
    assert (await pair.patiently(pair.ledger.status)).ready == 40


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
async def test_a_connection_cut_within_a_large_put_stores_it_once(server: Server, network: Proxy, begin: Begin, share: float) -> None:
    pair = await begin(network.url)
    buffer = ProducerBuffer(pair.ledger, pair.wakeups, "p")
    slot, *_ = await pair.patiently(lambda: buffer.reserve(1, 16 << 20))
    header, payload = made(slot, Version(pair.incarnation, 0), 1 << 20)
    network.reset_after = int(len(payload) * share)
    assert await pair.patiently(lambda: buffer.put(header, payload)) is PutResult.STORED
    assert network.resets == 1
    status = await pair.patiently(pair.ledger.status)
    assert (status.ready, status.bytes_used) == (1, len(payload))
    assert await pair.ledger.payload(header) == payload
    assert len([key async for key in pair.client.scan_iter("rs:payload:*")]) == 1


async def test_a_run_goes_on_over_a_slow_and_narrow_network(server: Server, network: Proxy, begin: Begin) -> None:
    """200 ms each way and 1 MB/s, with groups of 90 kB."""
    pair = await begin(network.url, config=settings(groups_per_step=4, chunk_groups=2, slot_seconds=30.0), tokens=10_000)
    network.delay_s, network.bytes_per_s = 0.2, 1e6
    await pair.run(1)
    network.delay_s, network.bytes_per_s = 0.0, 0.0
    await pair.check(1)


async def test_connections_that_break_all_the_time_lose_nothing(server: Server, network: Proxy, begin: Begin) -> None:
    pair = await begin(network.url, tokens=2_000)
    running = asyncio.create_task(pair.run(), name="test:run")
    while network.resets < 20:
        network.reset_after = 30_000
        await pair.soon(pair.trained_any, running)
    network.reset_after = 0
    await pair.end(running)


async def test_a_server_that_fills_up_makes_producers_wait_and_lets_the_trainer_work(server: Server, begin: Begin) -> None:
    """`maxmemory` is far below the budget: a payload is refused until a checkpoint frees an older one."""
    pair = await begin(server.url, config=settings(groups_per_step=4, chunk_groups=2), tokens=100_000)
    used = int((await server.ask("INFO", "memory"))["used_memory"])
    await server.ask("CONFIG SET", "maxmemory", used + 11 * 900_000)
    await pair.run(10)
    await pair.check(10)
    assert any("is at maxmemory; raise it, or lower buffer.byte_budget" in text for text in pair.outages)
