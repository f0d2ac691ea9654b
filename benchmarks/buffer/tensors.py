"""From a lease to what a backend trains on, against reading the same bytes bare."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.buffer.loads import Load, header_of
from benchmarks.buffer.meter import Cost, measure, median, no_server, spread
from benchmarks.buffer.scale import reserve
from benchmarks.buffer.sides import new_run
from buffer.client import FETCH_BYTES, TrainerBuffer
from buffer.config import BufferConfig
from buffer.payloads import by_bytes
from buffer.redis_ledger import RedisLedger
from consumer.advantages import group_std
from consumer.batch import ChunkBatch, collate
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import GroupHeader
from protocol.wakeups import wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Medians, a group."""

    tokens: int
    groups: int
    ours: Cost
    raw: Cost
    """Bare GET, one payload a command, 8 under way."""
    batched: Cost
    """Bare MGET, as many bytes a command and as many commands under way as ours."""
    over_raw: Ratio
    over_batched: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Medians over rounds: what else the machine does weighs on both sides of a round."""

    wall: float
    cpu: float
    """Of this process."""


async def lease_to_tensors(client: Client, load: Load, groups: int, *, chunk: int, rounds: int) -> Way:
    """A step of `groups` groups in chunks: leased, read, verified, decoded, laid out as tensors, one chunk after the other, each held until the next one is
    there, as a trainer does. And the same keys by bare GET and MGET. In turn, after a round that is not counted.
    """
    costs: dict[str, list[Cost]] = {"ours": [], "raw": [], "batched": []}
    for number in range(rounds + 1):
        ledger, keys, incarnation = await new_run(client, BufferConfig(groups_per_step=groups, chunk_groups=chunk, byte_budget=1 << 40))
        headers = await _fill(ledger, load, groups)
        await ledger.open_step(incarnation, 1)
        async with wakeups(client, keys) as waker:
            buffer = TrainerBuffer(ledger, waker, incarnation)
            sides = {
                "ours": lambda buffer=buffer: _take(buffer, groups // chunk),
                "raw": lambda keys=keys, headers=headers: _get(client, [_name(keys, header) for header in headers]),
                "batched": lambda keys=keys, headers=headers: _mget(client, keys, headers),
            }
            names = list(sides)
            for name in (*names[number % 3 :], *names[: number % 3]):
                costs[name].append(await measure(groups, sides[name](), no_server))
        await client.flushdb()
    counted = {name: found[1:] for name, found in costs.items()}
    return Way(
        tokens=load.tokens,
        groups=groups,
        **{name: median(found) for name, found in counted.items()},
        over_raw=_ratio(counted["ours"], counted["raw"]),
        over_batched=_ratio(counted["ours"], counted["batched"]),
    )


def _ratio(ours: Sequence[Cost], bare: Sequence[Cost]) -> Ratio:
    pairs = list(zip(ours, bare, strict=True))
    return Ratio(
        wall=statistics.median(one.wall_us / other.wall_us for one, other in pairs),
        cpu=statistics.median(one.client_us / other.client_us for one, other in pairs),
    )


async def _fill(ledger: RedisLedger, load: Load, groups: int) -> list[GroupHeader]:
    headers = []
    for index, slot in enumerate(await reserve(ledger, groups, load.payload_bytes + 1024)):
        at = index % len(load.groups)
        headers.append(header_of(slot, load.groups[at], load.payloads[at]))
        await ledger.put(headers[-1], load.payloads[at])
    return headers


def _name(keys: Keys, header: GroupHeader) -> str:
    return keys.payload(header.seq, header.attempt, header.token)


async def _get(client: Client, names: Sequence[str]) -> None:
    await spread(len(names), lambda i: client.get(names[i]))


async def _mget(client: Client, keys: Keys, headers: Sequence[GroupHeader]) -> None:
    batches = [[_name(keys, header) for header in batch] for batch in by_bytes(headers, FETCH_BYTES)]
    await spread(len(batches), lambda i: client.mget(batches[i]), at_once=2)


async def _take(buffer: TrainerBuffer, chunks: int) -> None:
    last: ChunkBatch | None = None
    for index in range(chunks):
        leased, groups = await buffer.fetch(await buffer.lease(1, index))
        last = collate(leased.record, groups, group_std)
    assert last is None or last.groups
