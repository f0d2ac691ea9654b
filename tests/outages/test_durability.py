"""What a kill of the one server costs, by how it writes to disk. `docs/durability.md` claims no more."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from buffer import durability
from buffer.durability import Durability
from protocol.connection import check_server, connect
from protocol.errors import LedgerRegressed, RunMissing
from protocol.keys import Keys
from protocol.wakeups import wakeups
from tests.clusters import Server, free_ports
from tests.pair import Pair

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
STEPS = 3


@pytest_asyncio.fixture
async def server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    server = Server(tmp_path / "redis", free_ports(1)[0], getattr(request, "param", {"appendfsync": "always"}))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest_asyncio.fixture
async def pair(server: Server) -> AsyncIterator[Pair]:
    client, keys = connect(server.url, deadline_s=60.0), Keys("run")
    try:
        async with wakeups(client, keys) as waker:
            pair = Pair(client, keys, waker)
            await pair.begin()
            yield pair
    finally:
        await client.aclose()


def log_of(server: Server) -> Path:
    """The file that the server appends to now."""
    return max((server.folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))


def forget(server: Server, size: int) -> None:
    """What a power cut does to a file whose end was not on disk yet."""
    os.truncate(log_of(server), size)


@pytest.mark.parametrize("server", [{"appendfsync": "always"}, {"appendfsync": "everysec"}], indirect=True, ids=str)
async def test_a_kill_of_the_process_loses_nothing_that_is_in_the_append_only_file(server: Server, pair: Pair) -> None:
    await pair.train_until(STEPS)
    before = await pair.ledger.status()
    await server.write_out()
    await server.stop()
    await server.start()
    after = await pair.ledger.status()
    assert (after.trained, after.ready, after.next_seq) == (STEPS, before.ready, before.next_seq)
    await pair.run(STEPS + 2)
    await pair.check(STEPS + 2)
    assert not pair.regressions


@pytest.mark.parametrize("server", [{"appendonly": "no"}], indirect=True, ids=str)
async def test_without_an_append_only_file_a_kill_loses_the_run(server: Server, pair: Pair) -> None:
    await pair.train_until(STEPS)
    await server.stop()
    await server.start()
    with pytest.raises(RunMissing, match="does not exist in this Redis"):
        await pair.ledger.open_step(pair.incarnation, STEPS + 1)


async def test_a_lost_end_of_the_append_only_file_is_noticed_and_the_steps_are_asserted_again(server: Server, pair: Pair) -> None:
    await pair.train_until(STEPS)
    kept = log_of(server).stat().st_size
    await pair.train_until(STEPS + 1)
    await server.stop()
    forget(server, kept)
    await server.start()
    assert (await pair.ledger.status()).trained == STEPS
    with pytest.raises(LedgerRegressed, match=r"Redis lost writes it had acknowledged; its trainer re-asserts them"):
        await pair.ledger.open_step(pair.incarnation, STEPS + 2)
    await pair.reassert()
    assert (await pair.ledger.status()).trained == STEPS + 1
    await pair.run(STEPS + 3)
    assert set(pair.trained[STEPS + 1]) <= pair.trained_once()
    assert (await pair.ledger.status()).trained == STEPS + 3


async def test_a_loss_while_producers_work_trains_nothing_twice(server: Server, pair: Pair) -> None:
    """Their groups since are lost, and generated again under the same numbers."""
    await pair.train_until(STEPS)
    kept = log_of(server).stat().st_size
    await pair.train_until(STEPS + 2)
    await server.stop()
    forget(server, kept)
    await server.start()
    await pair.run(STEPS + 4)
    assert pair.regressions == 1
    assert pair.trained_once() >= {seq for step in range(1, STEPS + 3) for seq in pair.trained[step]}
    now = await pair.ledger.status()
    assert now.trained_groups == len(pair.trained_once())
    assert now.trained_groups + now.outstanding + now.released + sum(now.dead.values()) == now.next_seq, "a number was passed over"


@pytest.mark.parametrize("server", [{"appendfsync": "everysec"}, {"appendfsync": "always"}], indirect=True, ids=str)
async def test_the_disk_confirms_what_was_written(server: Server, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = await check_server(pair.client, url=server.url)
    monkeypatch.setattr(durability, "_WAIT_S", 15.0)
    await pair.train_until(1)
    assert await Durability(pair.client, pair.keys, facts)("a step")
    monkeypatch.setattr(durability, "_WAIT_S", 2.5)
    assert not await Durability(pair.client, pair.keys, facts, replicas=1)("a step"), "there is no replica"
