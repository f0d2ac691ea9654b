"""The smallest producers and trainer that go through everything a run's do: reserve, heartbeat, put, lease, fetch, trained, checkpoint. No model, no engine.

They keep their own books: every put that was acknowledged, every group that was trained, by whom else than the server nobody can lose.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from buffer.client import ProducerBuffer, TrainerBuffer
from buffer.config import BufferConfig
from buffer.contract import CheckpointRef, ChunkRecord, History, PastStep, PutResult, RunState, Slot
from buffer.redis_ledger import RedisLedger
from producer.outage import through_outage
from protocol.codec import digest, encode_group
from protocol.connection import Client
from protocol.errors import LedgerRegressed, RedisUnavailable, RunEnded, SlotLost
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import GroupHeader, Rollout, RolloutGroup, Span
from protocol.versions import Version
from protocol.wakeups import Wakeups

IDENTITY = RunIdentity(schema_major=1, seed=0, group_size=1, dataset="rows", tokenizer="words")
T = TypeVar("T")


def settings(**changes: object) -> BufferConfig:
    base: dict[str, object] = {
        "groups_per_step": 8,
        "pipeline_depth": 1.0,
        "chunk_groups": 4,
        "byte_budget": 64 << 20,
        "slot_seconds": 60.0,
        "max_staleness": 1000,
    }
    return BufferConfig.model_validate(base | changes)


@dataclass(eq=False)
class Pair:
    """Some producers and a trainer of one run. Redis may be away for `patience_s`."""

    client: Client
    keys: Keys
    wakeups: Wakeups
    config: BufferConfig = field(default_factory=settings)
    tokens: int = 64
    """Of a group; its payload has about 9 bytes for each."""
    patience_s: float = 600.0
    acknowledged: set[tuple[int, int, str]] = field(default_factory=set)
    duplicates: int = 0
    """Puts whose first reply was lost."""
    lost_slots: int = 0
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Step → its groups, noted before the ledger is told, as a trainer's witness file is."""
    outages: list[str] = field(default_factory=list)
    """What each call that had to be asked again was told."""
    put_any: asyncio.Event = field(default_factory=asyncio.Event)
    trained_any: asyncio.Event = field(default_factory=asyncio.Event)
    outage_any: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends a run after the step under way."""
    identity: RunIdentity = IDENTITY

    def __post_init__(self) -> None:
        self.ledger = RedisLedger(self.client, self.keys)
        self.incarnation, self.incarnation_id = 0, ""
        self.past: dict[int, PastStep] = {}
        self.checkpoints: tuple[CheckpointRef, ...] = ()
        self.regressions = 0

    async def begin(self) -> None:
        """Make the run and attach."""
        assert await self.patiently(lambda: self.ledger.create(IDENTITY, self.config)) or self.outages, "there was a run already"
        attached = await self.patiently(lambda: self.ledger.attach(None, trainer_id="trainer"))
        self.incarnation, self.incarnation_id = attached.incarnation, attached.incarnation_id
        await self.serve()

    async def serve(self) -> None:
        """An engine that serves whatever is asked for, for an hour."""
        await self.client.hset(self.keys.routable, "e0", f"{self.incarnation}:1000000:{int((time.time() + 3600) * 1000)}")

    async def run(self, steps: int = 1_000_000, *, producers: int = 2) -> None:
        """Until `steps` are trained, or it is `enough`, and the producers have heard of the end."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(producers):
                tasks.create_task(self.produce(f"p{number}"), name=f"test:producer-{number}")
            await self.train(steps)

    # producers ----------------------------------------------------------------------------------------------------------------

    async def produce(self, owner: str) -> None:
        """Groups, one after the other, until the run drains."""
        buffer = ProducerBuffer(RedisLedger(self.client, self.keys), self.wakeups, owner)
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat(buffer), name=f"test:beat-{owner}")
            try:
                while True:
                    for slot in await self.patiently(lambda: buffer.reserve(2, self.config.byte_budget // 64)):
                        putting = asyncio.create_task(self._put(buffer, slot), name=f"test:put-{owner}")
                        try:
                            await asyncio.shield(putting)
                        finally:  # a put that is under way is not cut short
                            await asyncio.wait([putting])
            except RunEnded:
                await self.patiently(buffer.give_back)
            finally:
                beating.cancel()

    async def _beat(self, buffer: ProducerBuffer) -> None:
        while True:
            await asyncio.sleep(self.config.slot_seconds / 5)
            await self.patiently(buffer.renew)

    async def _put(self, buffer: ProducerBuffer, slot: Slot) -> None:
        header, payload = made(slot, Version(self.incarnation, 0), self.tokens)
        try:
            result = await self.patiently(lambda: buffer.put(header, payload))
        except SlotLost:
            self.lost_slots += 1
            return
        self.duplicates += result is PutResult.DUPLICATE
        self.acknowledged.add((int(slot.seq), int(slot.attempt), slot.token))
        self.put_any.set()

    # trainer ------------------------------------------------------------------------------------------------------------------

    async def train(self, steps: int) -> None:
        """Up to step `steps`, a checkpoint each, then drain."""
        await self.train_on(steps)
        await self.patiently(lambda: self.ledger.drain(self.incarnation, "steps"), trainer=True)

    async def train_on(self, steps: int) -> None:
        buffer = TrainerBuffer(self.ledger, self.wakeups, self.incarnation)
        for step in range(len(self.trained) + 1, steps + 1):
            if self.enough.is_set():
                break
            seqs = await self.patiently(lambda step=step: self._take(buffer, step), trainer=True)
            self.trained[step] = seqs
            await self.patiently(lambda step=step: self.ledger.trained(self.incarnation, step, f"w{step}", {}), trainer=True)
            reference = CheckpointRef(step=step, incarnation=self.incarnation, digest=f"w{step}", path=f"checkpoint/step-{step:06d}-{self.incarnation}")
            self.checkpoints = (*self.checkpoints, reference)[-2:]
            await self.patiently(lambda reference=reference: self.ledger.checkpoint(self.incarnation, reference, keep=2), trainer=True)
            self.trained_any.set()

    async def train_until(self, steps: int) -> None:
        """Train up to `steps` with a producer that stops when they are, and leave the run open."""
        producing = asyncio.create_task(self.produce("p"), name="test:producer")
        await self.train_on(steps)
        producing.cancel()
        await asyncio.wait([producing])

    async def _take(self, buffer: TrainerBuffer, step: int) -> tuple[int, ...]:
        record = await self.ledger.open_step(self.incarnation, step)
        chunks: list[ChunkRecord] = []
        for index in range(-(-record.groups // record.chunk)):
            chunk, groups = await buffer.fetch(await buffer.lease(step, index))
            assert [header.seq for header, _ in groups] == [header.seq for header in chunk.headers]
            for header, group in groups:
                assert int(group.rollouts[0].tokens[0]) == header.seq, "a payload of another group"
            chunks.append(chunk)
        seqs = tuple(header.seq for chunk in chunks for header in chunk.headers)
        self.past[step] = PastStep(step=step, incarnation=self.incarnation, digest=f"w{step}", seqs=seqs, chunks=tuple(chunks))
        return tuple(map(int, seqs))

    async def reassert(self) -> None:
        """What a trainer does whose ledger has forgotten (rule R1). Engines say again that they are there, which may be forgotten too."""
        covered = self.checkpoints[0].step if len(self.checkpoints) > 1 else 0
        steps = [self.past[step] if step > covered else replace(self.past[step], chunks=()) for step in sorted(self.trained)]
        history = History(incarnations={self.incarnation: (0, 0, self.incarnation_id)}, checkpoints=self.checkpoints, steps=tuple(steps))
        await self.ledger.reassert(self.incarnation, self.incarnation_id, history)
        await self.serve()
        self.regressions += 1

    # both ---------------------------------------------------------------------------------------------------------------------

    async def patiently(self, call: Callable[[], Awaitable[T]], *, trainer: bool = False) -> T:
        async def noted() -> T:
            try:
                return await call()
            except RedisUnavailable as problem:
                self.outages.append(str(problem))
                self.outage_any.set()
                raise
            except LedgerRegressed:
                if trainer:
                    await self.reassert()
                raise RedisUnavailable("the ledger has gone back") from None

        return await through_outage(noted, deadline_s=self.patience_s)

    @staticmethod
    async def soon(event: asyncio.Event, running: asyncio.Task[None]) -> None:
        """Return at the next such event; a run that ends before is a failure, and is raised if it has one."""
        event.clear()
        waiting = asyncio.create_task(event.wait(), name="test:soon")
        await asyncio.wait([waiting, running], return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            waiting.cancel()
            await asyncio.wait([waiting])
            await running
            raise AssertionError("the run ended before")

    async def told_of_outage(self, running: asyncio.Task[None]) -> None:
        """Return once somebody of the run has been told that Redis is away."""
        await self.soon(self.outage_any, running)

    async def end(self, running: asyncio.Task[None], *, after: int = 2) -> None:
        """Some more steps, the end of the run, and what must be true then."""
        for _ in range(after):
            await self.soon(self.trained_any, running)
        self.enough.set()
        await running
        await self.check(len(self.trained))

    async def check(self, steps: int, *, most_expired: int = 0) -> None:
        """Nothing that was acknowledged is lost, nothing was trained twice, and the slots did not all expire."""
        status = await self.patiently(self.ledger.status)
        assert status.state is RunState.DRAINING
        assert status.trained == steps == len(self.trained)
        seqs = self.trained_once()
        left = {int(header.seq) for header in await self.patiently(lambda: self.ledger.ready(10_000))}
        lost = {seq for seq, _, _ in self.acknowledged} - seqs - left
        assert not lost, f"acknowledged, and neither trained nor ready: {sorted(lost)}"
        assert sum(status.releases.values()) <= most_expired, status.releases
        assert not status.dead

    def trained_once(self) -> set[int]:
        """All groups that were trained, each in one step."""
        seqs = Counter(seq for step in self.trained.values() for seq in step)
        assert all(count == 1 for count in seqs.values()), f"trained twice: {[seq for seq, count in seqs.items() if count > 1]}"
        return set(seqs)


def made(slot: Slot, version: Version, tokens: int) -> tuple[GroupHeader, bytes]:
    """A finished group: a rollout of so many tokens, the first of which is its `seq`."""
    ids = np.random.default_rng(slot.seq).integers(0, 1 << 20, tokens, dtype=np.int32)
    ids[0] = slot.seq
    mask = np.ones(tokens, dtype=np.uint8)
    span = Span(version=version, start=0, end=tokens)
    rollout = Rollout(tokens=ids, mask=mask, logprobs=np.zeros(tokens, dtype=np.float32), spans=(span,), reward=1.0)
    payload = encode_group(RolloutGroup(rollouts=(rollout,)))
    header = GroupHeader(
        seq=slot.seq,
        attempt=slot.attempt,
        token=slot.token,
        prompt_id=f"row-{slot.seq}",
        producer_id="producer",
        group_size=1,
        lengths=(tokens,),
        trainable={version: tokens},
        oldest=version,
        rewards=(1.0,),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )
    return header, payload
