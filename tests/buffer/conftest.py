"""Both implementations of the ledger behind one harness: the same tests run on the pure one and on a real Redis."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import orjson
import pytest
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.contract import Blocked, CheckpointRef, ChunkRecord, Granted, Ledger, Slot
from buffer.ledger import LocalLedger
from buffer.ledger_state import payload_name
from buffer.redis_ledger import RedisLedger
from protocol.codec import digest
from protocol.connection import Client
from protocol.errors import RunMissing
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import GroupHeader
from protocol.versions import Version

IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=2, dataset="rows", tokenizer="words")


def settings(**changes: object) -> BufferConfig:
    """B = 4 in chunks of 2, D = 1, K = 8, unless changed."""
    base: dict[str, object] = {"groups_per_step": 4, "pipeline_depth": 1.0, "chunk_groups": 2, "byte_budget": 100_000}
    return BufferConfig.model_validate(base | changes)


def header_for(slot: Slot, trainable: Mapping[Version, int], payload: bytes) -> GroupHeader:
    return GroupHeader(
        seq=slot.seq,
        attempt=slot.attempt,
        token=slot.token,
        prompt_id=f"row-{slot.seq}",
        producer_id="producer",
        group_size=2,
        lengths=(5, 6),
        trainable=dict(trainable),
        oldest=min(trainable, default=Version(0, 0)),
        rewards=(0.5, 1.0),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )


@dataclass
class Harness:
    """A ledger, and a hand on the world around it."""

    ledger: Ledger
    requests: int = 0

    async def serve(self, *versions: Version) -> None:
        """These, and no others, are the versions that routable engines serve."""
        raise NotImplementedError

    async def advance(self, seconds: float) -> None:
        """Move the ledger clock."""
        raise NotImplementedError

    async def outage(self, seconds: float) -> None:
        """Let wall time pass with nobody calling."""
        raise NotImplementedError

    async def lose_payload(self, header: GroupHeader) -> None:
        raise NotImplementedError

    async def payload_count(self) -> int:
        raise NotImplementedError

    async def violations(self) -> list[str]:
        raise NotImplementedError

    # what every test does ---------------------------------------------------------------------------------------------------

    async def start(self, config: BufferConfig | None = None) -> int:
        """A run with a trainer attached and an engine at its first version; the incarnation."""
        assert await self.ledger.create(IDENTITY, config or settings())
        attachment = await self.ledger.attach(None, trainer_id="trainer")
        await self.serve(Version(attachment.incarnation, 0))
        return attachment.incarnation

    async def ask(self, n: int, *, max_bytes: int = 100, owner: str = "p1") -> Granted | Blocked:
        self.requests += 1
        return await self.ledger.reserve(owner, f"r{self.requests}", n, max_bytes=max_bytes)

    async def reserve(self, n: int, *, max_bytes: int = 100, owner: str = "p1") -> tuple[Slot, ...]:
        answer = await self.ask(n, max_bytes=max_bytes, owner=owner)
        assert isinstance(answer, Granted), answer
        return answer.slots

    async def put(self, slot: Slot, version: Version | Mapping[Version, int], size: int = 50) -> GroupHeader:
        trainable = {version: 10} if isinstance(version, Version) else version
        payload = slot.token.encode().ljust(size, b".")[:size]
        header = header_for(slot, trainable, payload)
        await self.ledger.put(header, payload)
        return header

    async def produce(self, n: int, version: Version) -> list[GroupHeader]:
        """Reserve and put `n` groups written by `version`."""
        made: list[GroupHeader] = []
        while len(made) < n:
            made += [await self.put(slot, version) for slot in await self.reserve(n - len(made))]
        return made

    async def lease(self, incarnation: int, step: int) -> list[ChunkRecord]:
        record = await self.ledger.open_step(incarnation, step)
        chunks: list[ChunkRecord] = []
        for index in range(-(-record.groups // record.chunk)):
            chunk = await self.ledger.lease(incarnation, step, index)
            assert isinstance(chunk, ChunkRecord), chunk
            chunks.append(chunk)
        return chunks

    async def train(self, incarnation: int, step: int, digest: str | None = None) -> list[int]:
        """Lease the whole step and mark it trained; the groups in it."""
        chunks = await self.lease(incarnation, step)
        await self.ledger.trained(incarnation, step, digest or f"w{step}", {})
        return seqs_of(*chunks)

    async def checkpoint(self, incarnation: int, step: int, keep: int = 2) -> tuple[CheckpointRef, ...]:
        return await self.ledger.checkpoint(incarnation, reference(step, incarnation), keep=keep)


def reference(step: int, incarnation: int) -> CheckpointRef:
    return CheckpointRef(step=step, incarnation=incarnation, digest=f"w{step}", path=f"checkpoint/step-{step:06d}-{incarnation}")


def seqs_of(*chunks: ChunkRecord) -> list[int]:
    return [int(header.seq) for chunk in chunks for header in chunk.headers]


class PureHarness(Harness):
    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.local = LocalLedger(now_ms=lambda: self.now_ms)
        super().__init__(self.local)

    async def serve(self, *versions: Version) -> None:
        self.local.pure.state.routable = {f"e{i}": version for i, version in enumerate(versions)}

    async def advance(self, seconds: float) -> None:
        self.local.pure.state.clock_ms += int(seconds * 1000)

    async def outage(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)

    async def lose_payload(self, header: GroupHeader) -> None:
        del self.local.pure.state.payloads[payload_name(header.seq, header.attempt, header.token)]

    async def payload_count(self) -> int:
        return len(self.local.pure.state.payloads)

    async def violations(self) -> list[str]:
        return self.local.pure.violations()


class RedisHarness(Harness):
    def __init__(self, client: Client, keys: Keys) -> None:
        self.client, self.keys = client, keys
        super().__init__(RedisLedger(client, keys))

    async def serve(self, *versions: Version) -> None:
        await self.client.delete(self.keys.routable)
        expires = int((time.time() + 3600) * 1000)
        for i, version in enumerate(versions):
            await self.client.hset(self.keys.routable, f"e{i}", f"{version}:{expires}")

    async def advance(self, seconds: float) -> None:
        await self.client.hincrby(self.keys.state, "clock", int(seconds * 1000))

    async def outage(self, seconds: float) -> None:
        await self.client.hincrby(self.keys.state, "seen", -int(seconds * 1000))

    async def lose_payload(self, header: GroupHeader) -> None:
        assert await self.client.delete(self.keys.payload(header.seq, header.attempt, header.token)) == 1

    async def payload_count(self) -> int:
        return len([key async for key in self.client.scan_iter(match=f"rs:payload:{self.keys.run}:*")])

    async def violations(self) -> list[str]:
        return await redis_violations(self.client, self.keys)


async def redis_violations(client: Client, keys: Keys) -> list[str]:  # noqa: C901 - a list of checks
    """What invariants I1, I2 and I5 say of the keys as they lie in Redis."""
    state = {name.decode(): value.decode() for name, value in (await client.hgetall(keys.state)).items()}
    low, high = int(state.get("low_seq", 0)), int(state["next_seq"])
    groups = {int(seq): raw for seq, raw in (await client.hgetall(keys.key("groups"))).items()}
    rows = {seq: orjson.loads(raw) for seq, raw in groups.items() if raw != b"T"}
    found = []
    if set(groups) != set(range(low, high)):
        found.append(f"I1: groups {sorted(groups)} are not {low} to {high}")
    states = Counter(row["s"] for row in rows.values())

    async def members(name: str) -> set[int]:
        return {int(seq) for seq in await client.zrange(keys.key(name), 0, -1)}

    for name, kind in (("deadlines", "generating"), ("ready", "ready"), ("retry", "released")):
        if await members(name) != {seq for seq, row in rows.items() if row["s"] == kind}:
            found.append(f"I1: {name} is not what is {kind}")
    if int(state.get("leased", 0)) != states["leased"]:
        found.append(f"I1: leased counts {state.get('leased')} of {states['leased']}")
    journalled = [seq for raw in await client.hvals(keys.key("chunks")) for seq in orjson.loads(raw)["seqs"]]
    if len(journalled) != len(set(journalled)):
        found.append("I2: a group is in two chunks")
    if set(journalled) != {seq for seq, row in rows.items() if row["s"] in ("leased", "trained")}:
        found.append("I2: the journal is not what is leased or trained")
    charged = sum(row["m"] if row["s"] == "generating" else row.get("b", 0) for row in rows.values())
    if not 0 <= int(state.get("bytes", 0)) == charged <= int(state["budget"]):
        found.append(f"I5: {state.get('bytes')} bytes counted, {charged} charged")
    if int(state.get("trained_bytes", 0)) != sum(row["b"] for row in rows.values() if row["s"] == "trained"):
        found.append("I5: trained bytes")
    kept = {seq for seq, row in rows.items() if row["s"] in ("ready", "leased", "trained")}
    if {int(seq) for seq in await client.hkeys(keys.key("headers"))} != kept:
        found.append("headers are not those of READY, LEASED and TRAINED groups")
    versions: Counter[str] = Counter()
    for row in rows.values():
        if row["s"] == "ready":
            versions.update(row["v"])
    if {version.decode(): int(count) for version, count in (await client.hgetall(keys.key("ready_versions"))).items()} != dict(versions):
        found.append("ready_versions")
    return found


async def _checked(harness: Harness) -> AsyncIterator[Harness]:
    """Whatever a test did, the invariants hold after it (a run that it deleted or never created has none)."""
    yield harness
    with contextlib.suppress(KeyError, RunMissing):
        wrong = await harness.violations()
        assert not wrong, wrong


@pytest_asyncio.fixture
async def on_redis(redis: Client, keys: Keys) -> AsyncIterator[Harness]:
    async for harness in _checked(RedisHarness(redis, keys)):
        yield harness


@pytest_asyncio.fixture
async def on_pure() -> AsyncIterator[Harness]:
    async for harness in _checked(PureHarness()):
        yield harness


@pytest.fixture(params=["on_pure", pytest.param("on_redis", marks=pytest.mark.redis)])
def world(request: pytest.FixtureRequest) -> Harness:
    harness: Harness = request.getfixturevalue(request.param)
    return harness
