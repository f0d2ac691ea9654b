"""Cost of an operation: wall time, and CPU of the client and of whatever serves it, per group."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

import psutil

from protocol.connection import Client

IN_FLIGHT = 8
"""Operations under way at once, the same for every side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds a group."""

    wall_us: float
    client_us: float
    server_us: float

    @property
    def groups_per_s(self) -> float:
        return 1e6 / self.wall_us


ServerCpu = Callable[[], Awaitable[float]]
"""CPU seconds the serving processes have used so far."""


async def measure(groups: int, work: Awaitable[None], server_cpu: ServerCpu) -> Cost:
    """Cost of `work`, which moves `groups` groups."""
    server_s, client_s, started_s = await server_cpu(), _own_cpu(), time.perf_counter()
    await work
    wall_s, used_s = time.perf_counter() - started_s, _own_cpu() - client_s
    return Cost(wall_us=wall_s / groups * 1e6, client_us=used_s / groups * 1e6, server_us=(await server_cpu() - server_s) / groups * 1e6)


def median(costs: Iterable[Cost]) -> Cost:
    """Each figure's own median."""
    rows = list(costs)
    return Cost(
        wall_us=statistics.median(one.wall_us for one in rows),
        client_us=statistics.median(one.client_us for one in rows),
        server_us=statistics.median(one.server_us for one in rows),
    )


async def spread(count: int, one: Callable[[int], Awaitable[object]], *, at_once: int = IN_FLIGHT) -> None:
    """`one(0)` … `one(count - 1)`, a few at once."""
    left = iter(range(count))

    async def worker() -> None:
        for index in left:
            await one(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(worker())


async def redis_cpu(client: Client) -> float:
    info = await client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def script_us(client: Client) -> float:
    """Redis microseconds a script call since the last `CONFIG RESETSTAT`."""
    stats = await client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec_per_call"])


async def no_server() -> float:
    return 0.0


async def children_cpu() -> float:
    """CPU seconds of every process this one started."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.asynccontextmanager
async def loop_lag(every_s: float = 0.002) -> AsyncIterator[list[float]]:
    """Delays of a timer in milliseconds, while the context is open: what everything else on the event loop waits."""
    lags: list[float] = []
    clock = asyncio.get_running_loop().time

    async def watch() -> None:
        while True:
            due = clock() + every_s
            await asyncio.sleep(every_s)
            lags.append((clock() - due) * 1e3)

    task = asyncio.create_task(watch())
    try:
        yield lags
    finally:
        task.cancel()


def machine() -> str:
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown CPU")
    return f"{os.cpu_count()} x {model}, load {os.getloadavg()[0]:.1f}"


def _cpuinfo() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - not a file of ours
        return file.readlines()
    return []


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
