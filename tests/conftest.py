"""What every test may use: a real Redis of its own, a run name nobody else has, and checks that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, settings

from deploy.redis_server import server_command, wait_ready
from protocol.connection import Client, connect
from protocol.keys import Keys
from tests.clusters import Cluster, start_cluster

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses the server is of the lane `redis`, without having to say so."""
    for item in items:
        if "redis_url" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.redis)
        if "three_nodes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the check of descriptors, which collects garbage after each file, need not walk it again."""
    gc.collect()
    gc.freeze()


settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
settings.load_profile("ci")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server, shared by the session; each test uses its own run name."""
    with tempfile.TemporaryDirectory(prefix="rs-redis-") as folder:
        command = server_command(Path(folder))
        process = subprocess.Popen(command.argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(wait_ready(command.url, timeout_s=120.0))
            yield command.url
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[Cluster]:
    """A real cluster of three, shared by the session; each test uses its own run name and leaves every node and slot as it found them."""
    with tempfile.TemporaryDirectory(prefix="rs-cluster-") as folder:
        nodes = asyncio.run(start_cluster(Path(folder)))
        try:
            yield nodes
        finally:
            asyncio.run(nodes.close())


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB. Needs the right to mount; where that is missing, what uses it is skipped."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Client]:
    """A client; the test fails if it leaves keys without expiry outside its own run (see `keys`)."""
    client = connect(redis_url, deadline_s=60.0)
    try:
        yield client
    finally:
        await client.aclose()


@pytest_asyncio.fixture
async def keys(redis: Client) -> AsyncIterator[Keys]:
    """Key names of a run of the test's own; all of its keys are deleted afterwards. Keys of no run, and payloads that stay for ever without an entry in the
    ledger, fail the test.
    """
    names = Keys(f"t-{uuid.uuid4().hex[:12]}")
    before = {key async for key in redis.scan_iter(match="*")}
    yield names
    after = {key async for key in redis.scan_iter(match="*")} - before
    own = {key for key in after if names.run.encode() in key}
    prefix = names.payload(0, 0, "").rsplit(":", 3)[0].encode() + b":"
    lost = [
        key
        for key in own
        if key.startswith(prefix) and await redis.ttl(key) == -1 and not await redis.hexists(names.key("headers"), key.split(b":")[3].decode())
    ]
    if own:
        await redis.delete(*own)
    assert not lost, f"payloads that nobody will ever delete: {sorted(lost)[:5]}"
    assert not after - own, f"keys left outside the run: {sorted(after - own)[:5]}"


@pytest_asyncio.fixture(autouse=True)
async def no_leaked_tasks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """An asyncio test must not leave tasks behind."""
    yield
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"


def _descriptors() -> set[str]:
    """What this process holds open of sockets, pipes and files: each names an inode or a path."""
    held = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder's own, closed by now
            target = str(entry.readlink())
            if target.startswith(("socket:", "pipe:", "/")) and not target.startswith(("/dev/", "/proc/")):
                held.add(f"{entry.name} {target}")
    return held


@pytest.fixture(scope="module", autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    """The tests of a file must not leave sockets, pipes or files open."""
    uvloop.new_event_loop().close()  # the first one opens a pipe for signals that the process keeps
    before = _descriptors()
    yield
    gc.collect()
    left = _descriptors() - before
    assert not left, f"descriptors left open: {sorted(left)[:5]}"
