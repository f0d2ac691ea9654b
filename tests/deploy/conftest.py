"""A small real run in Redis: two engines, a producer, a trainer, one trained step and a READY group."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest

from buffer.config import BufferConfig
from buffer.contract import ChunkRecord, Granted
from buffer.redis_ledger import RedisLedger
from protocol.codec import digest
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Edge, EngineId, EngineState, EngineStatus, GroupHeader, Manifest, ProducerStatus, TrainerStatus
from protocol.presence import Presence
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.registry import Registry

STATS = {
    "reward": 0.75,
    "tokens": 18,
    "masked": 2,
    "staleness": {"0": 12, "1": 6},
    "bias": {"trained": {"16": 18}, "masked": {"16": 2}, "masked_age": {"1": 2}},
    "seconds": 0.5,
    "wait_s": 0.1,
}
TTL_S = 600.0
"""Who announces itself once is here to the end of the test, however long that takes."""
SETTINGS = BufferConfig(groups_per_step=2, pipeline_depth=1.0, chunk_groups=2, byte_budget=1_000_000)


def manifest(version: Version) -> Manifest:
    return Manifest(version=version, kind="full", parent="", tensors=(), digest=f"d{version}", transport="store", location="/nowhere", total_bytes=64)


def engine(index: int, version: Version) -> EngineStatus:
    return EngineStatus(
        engine_id=EngineId(f"engine-{index}"),
        boot_nonce=f"nonce-{index}",
        url=f"http://127.0.0.1:{9000 + index}",
        kind="embedded",
        state=EngineState.ROUTABLE,
        version=version,
        capacity=8,
        running=index,
        generated_tokens=100 * index,
        busy_s=1.0,
        uptime_s=2.0,
    )


async def make_run(client: Client, keys: Keys) -> RedisLedger:
    """Engine 0 lags a step behind the trained one, engine 1 does not."""
    ledger, channel, registry = RedisLedger(client, keys), Channel(client, keys), Registry(client, keys)
    await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="rows", tokenizer="words"), SETTINGS)
    attachment = await ledger.attach(None, trainer_id="trainer")
    await channel.publish(manifest(Version(1, 0)), attachment.incarnation)
    for index in (0, 1):
        await registry.beat(engine(index, Version(1, 0)), ttl_s=TTL_S)
        await registry.ack(f"engine-{index}", f"nonce-{index}", Version(1, 0))
    granted = await ledger.reserve("owner", "request", 3, max_bytes=1000)
    assert isinstance(granted, Granted)
    for slot in granted.slots:
        payload = b"payload %d" % slot.seq
        header = GroupHeader(
            seq=slot.seq,
            attempt=slot.attempt,
            token=slot.token,
            prompt_id=f"row-{slot.seq}",
            producer_id="producer-0",
            group_size=1,
            lengths=(12,),
            sampled=(10,),
            trainable={Version(1, 0): 10},
            oldest=Version(1, 0),
            rewards=(0.5,),
            payload_bytes=len(payload),
            payload_digest=digest(payload),
        )
        await ledger.put(header, payload)
    await ledger.open_step(1, 1)
    assert isinstance(await ledger.lease(1, 1, 0), ChunkRecord)
    await ledger.trained(1, 1, "digest", STATS)
    await channel.publish(manifest(Version(1, 1)), 1)
    await registry.ack("engine-1", "nonce-1", Version(1, 1))
    producers = Presence(client, keys, "producer", ProducerStatus)
    await producers.beat(
        "producer-0", ProducerStatus(producer_id="producer-0", waiting_for=Edge.NO_SLOT, waiting_since=time.time() - 3.0, groups_put=3), ttl_s=TTL_S
    )
    await Presence(client, keys, "trainer", TrainerStatus).beat("trainer", TrainerStatus(trainer_id="trainer", incarnation=1, step=2, trained=1), ttl_s=TTL_S)
    return ledger


@pytest.fixture
def small_run(redis: Client, keys: Keys) -> Callable[[], Awaitable[RedisLedger]]:
    async def make() -> RedisLedger:
        return await make_run(redis, keys)

    return make
