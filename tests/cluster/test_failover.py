"""A master is killed and its replica promoted. What a run keeps is what `docs/durability.md` claims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from buffer import durability
from buffer.durability import Durability
from protocol.connection import check_server, connect
from protocol.errors import LedgerRegressed
from protocol.wakeups import wakeups
from tests.clusters import Cluster, Server, until
from tests.pair import Pair

from .conftest import run_on

pytestmark = pytest.mark.cluster
REPLICAS = (0,)
"""The node that holds the run has a replica."""
STEPS = 3


@pytest_asyncio.fixture
async def pair(mortal: Cluster) -> AsyncIterator[Pair]:
    """A run on master 0, which is a master again, with its replica, at the end."""
    client, keys = connect(mortal.url, deadline_s=60.0), run_on(mortal, 0)
    try:
        async with wakeups(client, keys) as waker:
            pair = Pair(client, keys, waker)
            await pair.begin()
            yield pair
            await pair.ledger.delete_run()
    finally:
        await client.aclose()


async def master_and_replica(mortal: Cluster) -> tuple[Server, Server]:
    master = await mortal.owner(run_on(mortal, 0).state)
    return master, next(node for node in (mortal.nodes[0], mortal.nodes[3]) if node is not master)


async def die(mortal: Cluster, master: Server, replica: Server) -> None:
    """kill -9; return once the replica serves in its place."""
    await master.stop()

    async def promoted() -> bool:
        return (await replica.ask("INFO", "replication"))["role"] == "master"

    async with mortal.impatient():
        await until(promoted, "the replica takes over")
        await mortal.settled()


async def return_as_replica(mortal: Cluster, died: Server, now: Server) -> None:
    await died.start()
    await mortal.settled()
    await mortal.replicas_follow(now)


async def cut_off(master: Server) -> None:
    """Nothing more reaches the replicas, and the master does not care: it acknowledges what only it has."""
    await master.ask("ACL SETUSER", "default", "-psync", "-sync")
    await master.ask("CLIENT KILL", "TYPE", "replica")


async def test_the_run_goes_on_with_the_replica_and_what_it_had_is_kept(mortal: Cluster, pair: Pair) -> None:
    master, replica = await master_and_replica(mortal)
    await pair.train_until(STEPS)
    await mortal.replicas_follow(master)
    before = await pair.ledger.status()
    await die(mortal, master, replica)
    after = await pair.ledger.status()
    assert (after.trained, after.ready, after.checkpoints) == (STEPS, before.ready, before.checkpoints)
    await return_as_replica(mortal, master, replica)
    await pair.run(STEPS + 2)
    await pair.check(STEPS + 2)


async def test_a_kill_in_the_middle_trains_nothing_twice(mortal: Cluster, pair: Pair) -> None:
    """Replication is asynchronous: something may be lost, and is asserted again by the trainer."""
    master, replica = await master_and_replica(mortal)
    running = asyncio.create_task(pair.run(), name="test:run")
    for _ in range(STEPS):
        await pair.soon(pair.trained_any, running)
    await die(mortal, master, replica)
    await return_as_replica(mortal, master, replica)
    for _ in range(STEPS):
        await pair.soon(pair.trained_any, running)
    pair.enough.set()
    await running
    assert (await pair.ledger.status()).trained == len(pair.trained)
    pair.trained_once()


async def test_a_failover_that_loses_steps_is_noticed_and_they_are_asserted_again(mortal: Cluster, pair: Pair) -> None:
    """The worst case, staged: the replica has nothing of the last step, which the master acknowledged."""
    master, replica = await master_and_replica(mortal)
    await pair.train_until(STEPS)
    await mortal.replicas_follow(master)
    await cut_off(master)
    await pair.train_until(STEPS + 1)
    lost = pair.trained[STEPS + 1]
    assert (await pair.ledger.status()).trained == STEPS + 1
    await die(mortal, master, replica)
    assert (await pair.ledger.status()).trained == STEPS, "the replica never heard of the step"
    with pytest.raises(LedgerRegressed, match=r"Redis lost writes it had acknowledged; its trainer re-asserts them"):
        await pair.ledger.open_step(pair.incarnation, STEPS + 2)
    await pair.reassert()
    assert (await pair.ledger.status()).trained == STEPS + 1
    await return_as_replica(mortal, master, replica)
    await pair.run(STEPS + 3)
    assert set(lost) <= pair.trained_once()
    assert (await pair.ledger.status()).trained == STEPS + 3


async def test_what_a_replica_confirmed_survives_and_a_cut_off_one_confirms_nothing(mortal: Cluster, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    master, replica = await master_and_replica(mortal)
    with_a_replica = Durability(pair.client, pair.keys, await check_server(pair.client, url=mortal.url), replicas=1)
    alone = Durability(pair.client, pair.keys, await check_server(pair.client, url=mortal.url))
    monkeypatch.setattr(durability, "_WAIT_S", 15.0)
    await pair.train_until(STEPS)
    assert await with_a_replica("a step")
    await cut_off(master)
    await pair.train_until(STEPS + 1)
    assert await alone("a step")
    monkeypatch.setattr(durability, "_WAIT_S", 1.0)
    assert not await with_a_replica("a step")
    await die(mortal, master, replica)
    assert (await pair.ledger.status()).trained == STEPS
    await return_as_replica(mortal, master, replica)
