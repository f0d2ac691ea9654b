"""A producer and an engine in a process of their own: groups made beforehand are put as fast as slots come, every version is acknowledged at once.

python -m benchmarks.gpu.speed.feed REDIS RUN SIZE
"""

from __future__ import annotations

import asyncio
import sys

from benchmarks.gpu.speed.workload import SIZES, group_of, header_of
from buffer.client import ProducerBuffer
from buffer.redis_ledger import RedisLedger
from protocol.codec import digest, encode_group
from protocol.connection import Client, connect
from protocol.errors import RunEnded, RunMissing
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, Wakeups, wakeups
from weightsync.channel import Channel
from weightsync.registry import Registry

_CHARGE = 1 << 20
_MADE = 32


async def produce(client: Client, keys: Keys, waker: Wakeups, size: str) -> None:
    made = {}
    buffer = ProducerBuffer(RedisLedger(client, keys), waker, "speed")
    while True:
        mark = waker.mark(Topic.RUN)
        try:
            slots = await buffer.reserve(1, _CHARGE)
        except (RunMissing, RunEnded):
            await waker.wait(Topic.RUN, since=mark)
            continue
        for slot in slots:
            which = slot.seq % _MADE, slot.min_version
            if which not in made:
                group = group_of(which[0], SIZES[size], version=slot.min_version)
                made[which] = group, encode_group(group)
            group, payload = made[which]
            header = header_of(group, seq=slot.seq, attempt=slot.attempt, token=slot.token, payload_bytes=len(payload), payload_digest=digest(payload))
            await buffer.put(header, payload)


async def serve(client: Client, keys: Keys, waker: Wakeups) -> None:
    registry, channel = Registry(client, keys), Channel(client, keys)
    status = EngineStatus(engine_id=EngineId("e0"), boot_nonce="n0", url="http://127.0.0.1:9", kind="embedded", state=EngineState.STARTING)
    acked: Version | None = None
    while True:
        mark = waker.mark(Topic.WEIGHTS)
        await registry.beat(status)
        newest = await channel.newest_version()
        if newest is not None and newest != acked:
            await registry.ack("e0", "n0", newest)
            acked = newest
        await waker.wait(Topic.WEIGHTS, since=mark)


async def main(url: str, run: str, size: str) -> None:
    client, keys = connect(url), Keys(run)
    async with wakeups(client, keys) as waker, asyncio.TaskGroup() as group:
        group.create_task(produce(client, keys, waker, size), name="producer")
        group.create_task(serve(client, keys, waker), name="engine")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
