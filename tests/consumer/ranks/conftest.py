"""Trainers as real processes, one for each rank or one that starts the others."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from producer.engine.sglang.ports import held_port

ROOT = Path(__file__).parents[3]
Process = asyncio.subprocess.Process


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[Process]]]:
    """Starts a rank, or a trainer that starts its own; whatever a failed test leaves is killed."""
    processes: list[Process] = []

    async def begin(file: Path, how: str, *sets: str, launcher: Sequence[str] = (), **environment: str) -> Process:
        options = [part for item in sets for part in ("--set", item)]
        command = [sys.executable, *launcher, "-m", "consumer.main", "-c", str(file), how, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        processes.append(await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE))
        return processes[-1]

    yield begin
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.communicate()


@pytest.fixture
def meeting() -> Iterator[dict[str, str]]:
    """What a launcher tells each of two ranks, besides which it is."""
    with held_port("127.0.0.1", key="MASTER_PORT") as port:
        yield {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
