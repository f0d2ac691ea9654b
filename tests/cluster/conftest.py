"""Clients and runs on the cluster of the session, and a cluster of a file's own for tests that kill nodes."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.slots import slot_of_key
from tests.clusters import Cluster, start_cluster


@pytest_asyncio.fixture
async def redis(three_nodes: Cluster) -> AsyncIterator[Client]:
    """Takes the place of the single server's, also for tests of other folders that are imported here."""
    client = connect(three_nodes.url, deadline_s=60.0)
    try:
        yield client
    finally:
        await client.aclose()


@pytest_asyncio.fixture
async def keys(redis: Client) -> AsyncIterator[Keys]:
    """Key names of a run of the test's own; its keys are deleted afterwards, and nobody else's may be left."""
    names = Keys(f"c-{uuid.uuid4().hex[:12]}")
    before = {key async for key in redis.scan_iter(match="*")}
    yield names
    after = {key async for key in redis.scan_iter(match="*")} - before
    if after:
        await redis.unlink(*after)
    foreign = sorted(key for key in after if names.run.encode() not in key)
    assert not foreign, f"keys left outside the run: {foreign[:5]}"


@pytest.fixture(scope="module")
def mortal(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of this file's own, to kill. Its tests leave every node running."""
    replicas = getattr(request.module, "REPLICAS", ())
    with tempfile.TemporaryDirectory(prefix="rs-mortal-") as folder:
        nodes = asyncio.run(start_cluster(Path(folder), replicas=replicas))
        try:
            yield nodes
        finally:
            asyncio.run(nodes.close())


def run_on(nodes: Cluster, number: int) -> Keys:
    """A run of a new name whose small state lies on master `number`, as the slots were dealt."""
    share = -(-REDIS_CLUSTER_HASH_SLOTS // len(nodes.masters))
    while True:
        keys = Keys(f"c-{uuid.uuid4().hex[:12]}")
        if slot_of_key(keys.state) // share == number:
            return keys
