"""What every test may use: a real Redis of its own, a run name nobody else has, and checks that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from deploy.redis_server import server_command, wait_ready
from protocol.connection import Client, connect
from protocol.keys import Keys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses the server is of the lane `redis`, without having to say so."""
    for item in items:
        if "redis_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.redis)


settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("ci")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server, shared by the session; each test uses its own run name."""
    with tempfile.TemporaryDirectory(prefix="rs-redis-") as folder:
        command = server_command(Path(folder))
        process = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(wait_ready(command.url))
            yield command.url
        finally:
            process.terminate()
            process.wait(10)


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    """A client; the test fails if it leaves keys without expiry outside its own run (see `keys`)."""
    client = connect(redis_url, deadline_s=5.0)
    try:
        yield client
    finally:
        await client.aclose()


@pytest_asyncio.fixture
async def keys(redis: Client) -> AsyncIterator[Keys]:
    """Key names of a run of the test's own; all of its keys are deleted afterwards, and keys of no run at all fail the test."""
    names = Keys(f"t-{uuid.uuid4().hex[:12]}")
    before = {key async for key in redis.scan_iter(match="*")}
    yield names
    after = {key async for key in redis.scan_iter(match="*")} - before
    own = {key for key in after if names.run.encode() in key}
    if own:
        await redis.delete(*own)
    assert not after - own, f"keys left outside the run: {sorted(after - own)[:5]}"


@pytest_asyncio.fixture(autouse=True)
async def no_leaked_tasks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """An asyncio test must not leave tasks behind."""
    yield
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"
