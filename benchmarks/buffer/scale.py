"""What must not grow: the cost of a call with the backlog, memory with the groups that went through, and the lag of the event loop."""

from __future__ import annotations

import statistics
import time
import uuid
from collections import defaultdict

from benchmarks.buffer.loads import Load, header_of, tiny
from benchmarks.buffer.meter import loop_lag, script_us, spread
from benchmarks.buffer.sides import new_run
from buffer.config import BufferConfig
from buffer.contract import CheckpointRef, Granted, Slot
from buffer.redis_ledger import RedisLedger
from protocol.connection import Client
from protocol.messages import GroupHeader
from protocol.versions import Version

_CALLS = 60
_CHUNK = 8
_AT_ONCE = 512
"""Slots asked for in one call."""


async def reserve(ledger: RedisLedger, count: int, max_bytes: int) -> list[Slot]:
    """So many slots."""
    slots: list[Slot] = []
    while len(slots) < count:
        granted = await ledger.reserve("bench", uuid.uuid4().hex, min(_AT_ONCE, count - len(slots)), max_bytes=max_bytes)
        assert isinstance(granted, Granted), granted
        slots += granted.slots
    return slots


async def _fill(ledger: RedisLedger, count: int, version: Version = Version(1, 0)) -> list[GroupHeader]:  # noqa: B008 - a value
    headers: list[GroupHeader] = []

    async def one(index: int) -> None:
        header, payload = tiny(slots[index], version=version)
        headers.append(header)
        await ledger.put(header, payload)

    slots = await reserve(ledger, count, 512)
    await spread(count, one, at_once=32)
    return headers


async def backlog_cost(client: Client, few: int = 1_000, many: int = 100_000, *, blocks: int = 9) -> dict[str, float]:
    """Redis microseconds of one reserve, and of one lease of a chunk, with `few` and with `many` READY groups: both runs in one server, measured in turn, block
    by block; medians.
    """
    runs = {}
    for ready in (few, many):
        ledger, _, incarnation = await new_run(client, BufferConfig(groups_per_step=4 * many, chunk_groups=_CHUNK, byte_budget=1 << 40))
        await _fill(ledger, ready)
        await ledger.open_step(incarnation, 1)
        runs[ready] = ledger, incarnation
    seen: dict[str, list[float]] = defaultdict(list)
    leases = few // _CHUNK // 2 // blocks
    for block in range(blocks):
        for ready, (ledger, incarnation) in runs.items():
            await client.config_resetstat()
            for _ in range(_CALLS):
                await ledger.reserve("bench", uuid.uuid4().hex, 1, max_bytes=512)
            seen[f"reserve_us_{ready}"].append(await script_us(client))
            await client.config_resetstat()
            for index in range(block * leases, (block + 1) * leases):
                await ledger.lease(incarnation, 1, index)
            seen[f"lease_us_{ready}"].append(await script_us(client))
    await client.flushdb()
    cost = {name: statistics.median(values) for name, values in seen.items()}
    cost["ratio"] = max(cost[f"{name}_us_{many}"] / cost[f"{name}_us_{few}"] for name in ("reserve", "lease"))
    return cost


async def overhead(client: Client, load: Load) -> dict[str, float]:
    """Bytes of Redis memory a READY group takes beyond its payload, and what a bare SET of the same bytes takes beyond them."""
    count = len(load.payloads)

    await client.flushdb()
    before = await _settled(client)
    for index, payload in enumerate(load.payloads):
        await client.set(f"bare:{index}", payload)
    bare = (await _settled(client) - before) / count - load.payload_bytes
    await client.flushdb()
    ledger, _, _ = await new_run(client, BufferConfig(groups_per_step=max(64, count), byte_budget=1 << 40))
    slots = await reserve(ledger, count, load.payload_bytes + 1024)
    before = await _settled(client)
    for slot, group, payload in zip(slots, load.groups, load.payloads, strict=True):
        await ledger.put(header_of(slot, group, payload), payload)
    ours = (await _settled(client) - before) / count - load.payload_bytes
    await client.flushdb()
    return {"bare_set": bare, "group": ours}


async def _settled(client: Client) -> float:
    """Redis memory once nothing but data is left in it: connections, whose buffers grew with the payloads, are made anew."""
    await client.connection_pool.disconnect()
    seen: float = -1
    while (now := float((await client.info("memory"))["used_memory"])) != seen:
        seen = now
    return now


async def growth(client: Client, groups: int = 100_000, per_step: int = 256) -> dict[str, float]:
    """Bytes of Redis memory per group that went through a buffer of two steps, by least squares after the first tenth. The audit stream is trimmed as its spill
    does; answers to reserve are kept for `slot_seconds`, here 1, so that their window is full from the beginning.
    """
    ledger, keys, incarnation = await new_run(
        client, BufferConfig(groups_per_step=per_step, pipeline_depth=0.5, chunk_groups=32, slot_seconds=1.0, byte_budget=1 << 30)
    )
    done, samples = 0, []
    for step in range(1, groups // per_step + 1):
        await _fill(ledger, per_step, Version(incarnation, step - 1))
        record = await ledger.open_step(incarnation, step)
        for index in range(-(-record.groups // record.chunk)):
            await ledger.lease(incarnation, step, index)
        await ledger.trained(incarnation, step, f"{step:032x}", {})
        await ledger.checkpoint(incarnation, CheckpointRef(step=step, incarnation=incarnation, digest="", path=""), keep=2)
        await client.hset(keys.routable, "engine-0", f"1:{step}:{int(time.time() * 1000) + 3_600_000}")  # type: ignore[misc]
        await client.xtrim(keys.audit, maxlen=0)
        done += per_step
        if done > groups // 10:
            samples.append((done, float((await client.info("memory"))["used_memory"])))
    slope = statistics.linear_regression([x for x, _ in samples], [y for _, y in samples]).slope
    await client.flushdb()
    return {"groups": float(done), "bytes_per_group": slope, "first_bytes": samples[0][1], "last_bytes": samples[-1][1]}


async def lag(client: Client, load: Load, rounds: int = 3) -> dict[str, float]:
    """Event-loop lag in milliseconds, p99, idle and while payloads of about 1 MiB are put and read."""
    import asyncio

    idle: list[float] = []
    busy: list[float] = []
    for _ in range(rounds):
        async with loop_lag() as lags:
            await asyncio.sleep(0.5)
        idle += lags
        ledger, _, _ = await new_run(client, BufferConfig(groups_per_step=max(64, len(load.groups)), byte_budget=1 << 40))
        slots = await reserve(ledger, len(load.groups), load.payload_bytes + 1024)
        headers = [header_of(slot, group, payload) for slot, group, payload in zip(slots, load.groups, load.payloads, strict=True)]
        async with loop_lag() as lags:
            await spread(len(headers), lambda i, ledger=ledger, headers=headers: ledger.put(headers[i], load.payloads[i]))  # type: ignore[misc]
            await spread(len(headers), lambda i, ledger=ledger, headers=headers: ledger.payload(headers[i]))  # type: ignore[misc]
        busy += lags
        await client.flushdb()
    return {"idle_p99_ms": _p99(idle), "busy_p99_ms": _p99(busy)}


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)] if values else 0.0
