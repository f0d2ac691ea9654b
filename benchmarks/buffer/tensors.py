"""From a lease to what a backend trains on, against reading the same bytes bare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.buffer.loads import Load, header_of
from benchmarks.buffer.meter import Cost, measure, median, no_server, spread
from benchmarks.buffer.scale import reserve
from benchmarks.buffer.sides import new_run
from buffer.client import TrainerBuffer
from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from consumer.advantages import group_std
from consumer.batch import ChunkBatch, collate
from protocol.connection import Client
from protocol.messages import GroupHeader
from protocol.wakeups import wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Medians, a group. Ratios are of each round: what else the machine does weighs on both sides of it."""

    tokens: int
    groups: int
    ours: Cost
    raw: Cost
    ratio: float
    cpu_ratio: float
    """Of this process's CPU time."""


async def lease_to_tensors(client: Client, load: Load, groups: int, *, chunk: int, rounds: int) -> Way:
    """A step of `groups` groups in chunks: leased, read, verified, decoded, laid out as tensors, one chunk after the other and all held until the step is over,
    as a trainer does. And the same keys by bare GET, 8 under way. In turn, after a round that is not counted.
    """
    ours: list[Cost] = []
    raw: list[Cost] = []
    for number in range(rounds + 1):
        ledger, keys, incarnation = await new_run(client, BufferConfig(groups_per_step=groups, chunk_groups=chunk, byte_budget=1 << 40))
        headers = await _fill(ledger, load, groups)
        names = [keys.payload(header.seq, header.attempt, header.token) for header in headers]
        await ledger.open_step(incarnation, 1)
        async with wakeups(client, keys) as waker:
            buffer = TrainerBuffer(ledger, waker, incarnation)
            for side in (raw, ours) if number % 2 else (ours, raw):
                work = _get(client, names) if side is raw else _take(buffer, groups // chunk)
                side.append(await measure(groups, work, no_server))
        await client.flushdb()
    pairs = list(zip(ours[1:], raw[1:], strict=True))
    return Way(
        tokens=load.tokens,
        groups=groups,
        ours=median(ours[1:]),
        raw=median(raw[1:]),
        ratio=statistics.median(one.wall_us / bare.wall_us for one, bare in pairs),
        cpu_ratio=statistics.median(one.client_us / bare.client_us for one, bare in pairs),
    )


async def _fill(ledger: RedisLedger, load: Load, groups: int) -> list[GroupHeader]:
    headers = []
    for index, slot in enumerate(await reserve(ledger, groups, load.payload_bytes + 1024)):
        at = index % len(load.groups)
        headers.append(header_of(slot, load.groups[at], load.payloads[at]))
        await ledger.put(headers[-1], load.payloads[at])
    return headers


async def _get(client: Client, names: Sequence[str]) -> None:
    await spread(len(names), lambda i: client.get(names[i]))


async def _take(buffer: TrainerBuffer, chunks: int) -> None:
    batches: list[ChunkBatch] = []
    for index in range(chunks):
        leased, groups = await buffer.fetch(await buffer.lease(1, index))
        batches.append(collate(leased.record, groups, group_std))
