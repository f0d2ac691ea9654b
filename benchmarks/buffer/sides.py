"""The sides of the comparison that need no Ray: the ceiling, ours, a plain Redis stream, and a queue in one process."""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

from benchmarks.buffer.loads import Load, header_of, use
from benchmarks.buffer.meter import ServerCpu, no_server, redis_cpu, spread
from buffer.client import FETCH_BYTES, TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import Granted, Slot
from buffer.group_commit import GroupCommit
from buffer.redis_ledger import RedisLedger
from buffer.redis_put import MOST_BYTES, MOST_GROUPS
from protocol.codec import decode_group, encode_group
from protocol.connection import Client
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.wakeups import Wakeups

IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=8, dataset="bench", tokenizer="bench")
_HOUR_MS = 3_600_000
_CHUNK = 32


class Side(Protocol):
    """Moves all groups of a load in, then out, as fast as it can with `IN_FLIGHT` operations under way."""

    name: str
    server_cpu: ServerCpu

    async def prepare(self, load: Load) -> None:
        """What is not measured: connections, slots, an empty store."""

    async def put(self, load: Load) -> None: ...

    async def get(self, load: Load) -> None: ...

    async def clear(self) -> None: ...


class _OnRedis:
    def __init__(self, client: Client) -> None:
        self._client = client

    async def server_cpu(self) -> float:
        return await redis_cpu(self._client)


class Ceiling(_OnRedis):
    """SET and GET of the payload bytes, nothing else, one command a call."""

    name = "ceiling"

    async def prepare(self, load: Load) -> None:
        self._prefix = f"ceiling:{uuid.uuid4().hex}:"

    async def put(self, load: Load) -> None:
        await spread(len(load.payloads), lambda i: self._client.set(f"{self._prefix}{i}", load.payloads[i], nx=True, px=120_000))

    async def get(self, load: Load) -> None:
        await spread(len(load.payloads), lambda i: self._client.get(f"{self._prefix}{i}"))

    async def clear(self) -> None:
        await self._client.flushdb()


class CeilingBatched(Ceiling):
    """The same bytes as our own calls batch them: SETs that come together in one pipeline, MGET of as many bytes."""

    name = "ceiling batched"

    async def prepare(self, load: Load) -> None:
        await super().prepare(load)

        async def send(batch: Sequence[int]) -> list[object]:
            async with self._client.pipeline(transaction=False) as pipe:
                for i in batch:
                    pipe.set(f"{self._prefix}{i}", load.payloads[i], nx=True, px=120_000)
                return list(await pipe.execute())

        self._together: GroupCommit[int, object] = GroupCommit(send, size=lambda _: load.payload_bytes, most_size=MOST_BYTES, most_items=MOST_GROUPS, at_once=4)

    async def put(self, load: Load) -> None:
        await spread(len(load.payloads), self._together)

    async def get(self, load: Load) -> None:
        names = [f"{self._prefix}{i}" for i in range(len(load.payloads))]
        size = max(1, FETCH_BYTES // load.payload_bytes)
        batches = [names[at : at + size] for at in range(0, len(names), size)]
        await spread(len(batches), lambda i: self._client.mget(batches[i]), at_once=2)


async def new_run(client: Client, settings: BufferConfig) -> tuple[RedisLedger, Keys, int]:
    """A run of its own with a trainer attached and an engine that is routable for an hour; its incarnation."""
    keys = Keys(f"bench-{uuid.uuid4().hex[:12]}")
    ledger = RedisLedger(client, keys)
    await ledger.create(IDENTITY, settings)
    attachment = await ledger.attach(None, trainer_id="bench")
    await client.hset(keys.routable, "engine-0", f"1:0:{int(time.time() * 1000) + _HOUR_MS}")  # type: ignore[misc]
    return ledger, keys, attachment.incarnation


class Rollstream(_OnRedis):
    """Reserved slots are put; chunks of 32 are leased, read and verified. `objects`: from arrays to arrays, else from payload bytes to payload bytes."""

    def __init__(self, client: Client, *, objects: bool) -> None:
        super().__init__(client)
        self.name = "rollstream" if objects else "rollstream bytes"
        self._objects = objects
        self._slots: tuple[Slot, ...] = ()

    async def prepare(self, load: Load) -> None:
        count = len(load.groups)
        self._ledger, self._keys, self._incarnation = await new_run(
            self._client, BufferConfig(groups_per_step=count, chunk_groups=min(_CHUNK, count), byte_budget=1 << 40)
        )
        granted = await self._ledger.reserve("bench", uuid.uuid4().hex, count, max_bytes=load.payload_bytes + 1024)
        assert isinstance(granted, Granted)
        self._slots = granted.slots

    async def put(self, load: Load) -> None:
        async def one(i: int) -> None:
            payload = encode_group(load.groups[i]) if self._objects else load.payloads[i]
            await self._ledger.put(header_of(self._slots[i], load.groups[i], payload), payload)

        await spread(len(load.groups), one)

    async def get(self, load: Load) -> None:
        record = await self._ledger.open_step(self._incarnation, 1)
        buffer = TrainerBuffer(self._ledger, Wakeups(), self._incarnation)
        for index in range(-(-record.groups // record.chunk)):
            chunk = await buffer.lease(1, index)
            if self._objects:
                use((await buffer.fetch(chunk))[1])
                continue
            size = max(1, FETCH_BYTES // load.payload_bytes)
            batches = [chunk.headers[at : at + size] for at in range(0, len(chunk.headers), size)]
            await spread(len(batches), lambda i, batches=batches: self._ledger.payloads(batches[i]), at_once=2)  # type: ignore[misc]

    async def clear(self) -> None:
        await self._client.flushdb()


class RedisStream(_OnRedis):
    """XADD of the payload; XREADGROUP one entry at a time, XACK and XDEL."""

    name = "redis stream"

    async def prepare(self, load: Load) -> None:
        self._key = f"stream:{uuid.uuid4().hex}"
        await self._client.xgroup_create(self._key, "trainers", mkstream=True)

    async def put(self, load: Load) -> None:
        await spread(len(load.groups), lambda i: self._client.xadd(self._key, {"p": encode_group(load.groups[i])}))

    async def get(self, load: Load) -> None:
        async def one(i: int) -> None:
            ((_, ((entry, fields),)),) = await self._client.xreadgroup("trainers", f"c{i % 8}", {self._key: ">"}, count=1)
            list(decode_group(fields[b"p"]).rollouts)
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.xack(self._key, "trainers", entry)
                pipe.xdel(self._key, entry)
                await pipe.execute()

        await spread(len(load.groups), one)

    async def clear(self) -> None:
        await self._client.flushdb()


class InProcess:
    """asyncio.Queue and pickle in one process: no crash safety, no second process; a reference for what crossing a process costs."""

    name = "asyncio.Queue"
    server_cpu = staticmethod(no_server)

    async def prepare(self, load: Load) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def put(self, load: Load) -> None:
        for group in load.groups:
            await self._queue.put(pickle.dumps([(one.tokens, one.logprobs, one.mask, one.reward) for one in group.rollouts], protocol=5))

    async def get(self, load: Load) -> None:
        for _ in load.groups:
            pickle.loads(await self._queue.get())

    async def clear(self) -> None:
        return
