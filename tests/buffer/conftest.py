"""Both implementations of the ledger behind one harness: the same tests run on the pure one and on a real Redis."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType

import orjson
import pytest
import pytest_asyncio

from buffer.config import BufferConfig
from buffer.contract import Blocked, CheckpointRef, ChunkRecord, DeadLetter, Granted, Ledger, Slot
from buffer.ledger import LocalLedger
from buffer.ledger_state import State, payload_name
from buffer.redis_ledger import RedisLedger
from protocol.codec import digest
from protocol.connection import Client, connect
from protocol.errors import RunMissing
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import Attempt, BlobRef, GroupHeader, Reason, Seq
from protocol.versions import Version
from tests.clusters import Cluster

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
        sampled=(3, 4),
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

    async def pass_time(self, seconds: float) -> None:
        """Everything that has a time gets older by this much."""
        raise NotImplementedError

    async def fill_letters(self, count: int) -> None:
        """Dead letters of groups that never were."""
        raise NotImplementedError

    async def lose_payload(self, header: GroupHeader) -> None:
        raise NotImplementedError

    async def payload_count(self) -> int:
        raise NotImplementedError

    async def violations(self) -> list[str]:
        raise NotImplementedError

    async def copy(self) -> object:
        """The server's data as they are now."""
        raise NotImplementedError

    async def go_back(self, copy: object) -> None:
        """The server comes back with an older copy of its data: it loses what it acknowledged since."""
        raise NotImplementedError

    # what every test does ---------------------------------------------------------------------------------------------------

    async def start(self, config: BufferConfig | None = None) -> int:
        """A run with a trainer attached and an engine at its first version; the incarnation."""
        assert await self.ledger.create(IDENTITY, config or settings())
        attachment = await self.ledger.attach(None, trainer_id="trainer")
        await self.serve(Version(attachment.incarnation, 0))
        return attachment.incarnation

    async def ask(self, n: int, *, max_bytes: int = 100, owner: str = "p1", served: Version | None = None) -> Granted | Blocked:
        self.requests += 1
        return await self.ledger.reserve(owner, f"r{self.requests}", n, max_bytes=max_bytes, served=served)

    async def reserve(self, n: int, *, max_bytes: int = 100, owner: str = "p1", served: Version | None = None) -> tuple[Slot, ...]:
        answer = await self.ask(n, max_bytes=max_bytes, owner=owner, served=served)
        assert isinstance(answer, Granted), answer
        return answer.slots

    async def put(
        self, slot: Slot, version: Version | Mapping[Version, int], size: int = 50, blobs: Mapping[str, BlobRef] = MappingProxyType({})
    ) -> GroupHeader:
        trainable = {version: 10} if isinstance(version, Version) else version
        payload = slot.token.encode().ljust(size, b".")[:size]
        header = dataclasses.replace(header_for(slot, trainable, payload), blobs=dict(blobs))
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

    async def train_blocked(self, incarnation: int, step: int) -> ChunkRecord | Blocked:
        """The first chunk of the step that cannot be had."""
        record = await self.ledger.open_step(incarnation, step)
        for index in range(-(-record.groups // record.chunk)):
            answer = await self.ledger.lease(incarnation, step, index)
            if isinstance(answer, Blocked):
                break
        return answer

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

    async def pass_time(self, seconds: float) -> None:
        self.now_ms += int(seconds * 1000)

    async def fill_letters(self, count: int) -> None:
        for seq in range(1_000_000, 1_000_000 + count):
            self.local.pure.state.letters[Seq(seq)] = DeadLetter(
                seq=Seq(seq), attempt=Attempt(1), reason=Reason.FAILED, failures=1, prompt_id=None, why="", at=0.0
            )

    async def lose_payload(self, header: GroupHeader) -> None:
        del self.local.pure.state.payloads[payload_name(header.seq, header.attempt, header.token)]

    async def payload_count(self) -> int:
        return len(self.local.pure.state.payloads)

    async def violations(self) -> list[str]:
        return self.local.pure.violations()

    async def copy(self) -> object:
        return deepcopy(self.local.pure.state)

    async def go_back(self, copy: object) -> None:
        assert isinstance(copy, State)
        self.local.pure.state = deepcopy(copy)


class RedisHarness(Harness):
    def __init__(self, client: Client, keys: Keys, *, cluster: bool | None = None) -> None:
        self.client, self.keys = client, keys
        self.passed_s = 0.0
        super().__init__(RedisLedger(client, keys, cluster=cluster))

    async def serve(self, *versions: Version) -> None:
        await self.client.delete(self.keys.routable)
        expires = int((time.time() + 3600) * 1000)
        for i, version in enumerate(versions):
            await self.client.hset(self.keys.routable, f"e{i}", f"{version}:{expires}")

    async def advance(self, seconds: float) -> None:
        await self.client.hincrby(self.keys.state, "clock", int(seconds * 1000))

    async def outage(self, seconds: float) -> None:
        await self.client.hincrby(self.keys.state, "seen", -int(seconds * 1000))

    async def pass_time(self, seconds: float) -> None:
        self.passed_s += seconds
        for name, at in (("ends", 1), ("readers", 1)):
            for field, raw in (await self.client.hgetall(self.keys.key(name))).items():
                parts = raw.decode().split(":")
                parts[at] = str(int(parts[at]) - int(seconds * 1000))
                await self.client.hset(self.keys.key(name), field, ":".join(parts))

    async def fill_letters(self, count: int) -> None:
        letter = orjson.dumps({"a": 1, "f": 1, "r": "failed", "w": "", "at": 0})
        seqs = range(1_000_000, 1_000_000 + count)
        await self.client.hset(self.keys.key("letters"), mapping={str(seq): letter for seq in seqs})
        await self.client.zadd(self.keys.key("letter_seqs"), {str(seq): seq for seq in seqs})
        await self.client.zadd(self.keys.key("letter_times"), {str(seq): seq - 2_000_000 for seq in seqs})

    async def lose_payload(self, header: GroupHeader) -> None:
        assert await self.client.delete(self.keys.payload(header.seq, header.attempt, header.token)) == 1

    async def payload_count(self) -> int:
        if await self.client.exists(self.keys.key("doomed"), self.keys.key("to_persist")):
            await self.ledger.sweep()
        return len([key async for key in self.client.scan_iter(match=f"rs:payload:{self.keys.run}:*")])

    async def violations(self) -> list[str]:
        return await redis_violations(self.client, self.keys)

    async def _names(self) -> list[bytes]:
        own = [key async for key in self.client.scan_iter(match=self.keys.key("*").replace("[", r"\["), count=1000)]
        return own + [key async for key in self.client.scan_iter(match=f"rs:payload:{self.keys.run}:*", count=1000)]

    async def copy(self) -> object:
        return self.passed_s, {name: (await self.client.dump(name), max(0, await self.client.pttl(name))) for name in await self._names()}

    async def go_back(self, copy: object) -> None:
        assert isinstance(copy, tuple)
        passed_s, values = copy
        if names := await self._names():
            await self.client.delete(*names)
        for name, (value, ttl) in values.items():
            await self.client.restore(name, ttl, value)
        now_s, self.passed_s = self.passed_s, passed_s
        await self.pass_time(now_s - passed_s)


async def redis_violations(client: Client, keys: Keys) -> list[str]:  # noqa: C901 - a list of checks
    """What invariants I1, I2 and I5 say of the keys as they lie in Redis."""
    state = {name.decode(): value.decode() for name, value in (await client.hgetall(keys.state)).items()}
    low, high = int(state.get("low_seq", 0)), int(state["next_seq"])
    groups = {int(seq): raw for seq, raw in (await client.hgetall(keys.key("groups"))).items()}
    rows = {seq: orjson.loads(raw) for seq, raw in groups.items() if raw != b"T"}
    found = []
    again = {seq for seq in groups if seq < low}
    if set(groups) - again != set(range(low, high)):
        found.append(f"I1: groups {sorted(groups)} are not {low} to {high}")
    if ended := {seq for seq in again if seq not in rows or rows[seq]["s"] == "dead"}:
        found.append(f"I1: {sorted(ended)} have come to their end below {low}")
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
    letters = {int(seq) for seq in await client.hkeys(keys.key("letters"))}
    if not letters == await members("letter_seqs") == await members("letter_times"):
        found.append("dead letters are not those in their orders")
    if alive := {seq for seq in letters & set(groups) if seq not in rows or rows[seq]["s"] != "dead"}:
        found.append(f"dead letters of groups that are not dead: {sorted(alive)}")
    chunks = {name.decode(): orjson.loads(raw)["seqs"] for name, raw in (await client.hgetall(keys.key("chunks"))).items()}
    out = min(int(state.get("spilled", 0)), int(state["trained"]))
    if any(rows[seq]["b"] for name, seqs in chunks.items() if int(name.split(":")[0]) <= out for seq in seqs):
        found.append(f"steps up to {out} are spilled and hold bytes")
    held = {f"{seq}:{row['a']}:{row['t']}" for seq, row in rows.items() if row["s"] in ("ready", "leased", "trained") and row["b"]}
    waiting = {name.decode() for name in await client.smembers(keys.key("to_persist"))}
    doomed = {name.decode() for name in await client.smembers(keys.key("doomed"))}
    if doomed & held:
        found.append(f"payloads to be deleted that are needed: {sorted(doomed & held)}")
    prefix = keys.payload(0, 0, "").removesuffix("0:0:")
    for name in {key.decode().removeprefix(prefix) async for key in client.scan_iter(match=f"{prefix}*")}:
        stays = await client.ttl(prefix + name) == -1
        if name in held and not stays and name not in waiting:
            found.append(f"payload {name} is needed and will expire")
        if name not in held and stays and name not in doomed:
            found.append(f"payload {name} is not needed and will stay")
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
async def on_cluster_terms(redis: Client, keys: Keys) -> AsyncIterator[Harness]:
    """A single node, treated as if payloads lay on others: no script touches them."""
    harness = RedisHarness(redis, keys, cluster=True)
    async for checked in _checked(harness):
        yield checked
    with contextlib.suppress(RunMissing):
        while await harness.ledger.sweep():
            pass
        assert not (wrong := await harness.violations()), wrong


@pytest_asyncio.fixture
async def on_cluster(three_nodes: Cluster) -> AsyncIterator[Harness]:
    """A real cluster of three nodes."""
    client = connect(three_nodes.url, deadline_s=60.0)
    harness = RedisHarness(client, Keys(f"c-{uuid.uuid4().hex[:12]}"))
    try:
        async for checked in _checked(harness):
            yield checked
        if names := await harness._names():
            await client.unlink(*names)
    finally:
        await client.aclose()


@pytest_asyncio.fixture
async def on_pure() -> AsyncIterator[Harness]:
    async for harness in _checked(PureHarness()):
        yield harness


@pytest.fixture(
    params=[
        "on_pure",
        pytest.param("on_redis", marks=pytest.mark.redis),
        pytest.param("on_cluster_terms", marks=pytest.mark.redis),
        pytest.param("on_cluster", marks=pytest.mark.cluster),
    ]
)
def world(request: pytest.FixtureRequest) -> Harness:
    harness: Harness = request.getfixturevalue(request.param)
    return harness
