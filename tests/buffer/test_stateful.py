"""Any sequence of calls gives the same answers on Redis as on the pure ledger."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections.abc import Awaitable

import pytest

from buffer.contract import Blocked, CheckpointRef, ChunkRecord, Granted, Slot
from protocol.connection import connect
from protocol.errors import RollstreamError
from protocol.keys import Keys
from protocol.messages import Reason, SlotToken
from protocol.versions import Version

from .conftest import IDENTITY, PureHarness, RedisHarness, reference, settings

pytestmark = pytest.mark.redis
GUARDS = ("mask", "drop", "correct")


class Pair:
    """The same call to both; slot tokens differ, so slots are kept in pairs."""

    def __init__(self, pure: PureHarness, on_redis: RedisHarness, seed: int) -> None:
        self.both = (pure, on_redis)
        self.random = random.Random(seed)
        self.slots: list[tuple[Slot, Slot]] = []
        self.incarnation = 0
        self.trained = 0
        self.checkpoints: list[CheckpointRef] = []
        self.calls: list[str] = []

    async def same(self, name: str, *calls: Awaitable[object]) -> object:
        answers = []
        for call in calls:
            try:
                answers.append(await call)
            except RollstreamError as problem:
                answers.append(type(problem))
        self.calls.append(f"{name}: {answers[0]!s:.100}")
        assert _plain(answers[0]) == _plain(answers[1]), "\n".join([*self.calls[-25:], f"redis: {answers[1]}"])
        return answers

    async def event(self) -> None:
        dice = self.random.choice(
            ["reserve", "reserve", "put", "put", "put", "release", "train", "train", "serve", "time", "attach", "checkpoint", "read", "again"]
        )
        await getattr(self, f"_{dice}")()
        await self.same("status", *(one.ledger.status() for one in self.both))
        if len(self.calls) % 8 == 0:
            for one in self.both:
                assert not (wrong := await one.violations()), (wrong, self.calls[-25:])

    async def _reserve(self) -> None:
        n = self.random.randint(1, 4)
        answers = await self.same("reserve", *(one.ask(n, max_bytes=100) for one in self.both))
        assert isinstance(answers, list)
        if isinstance(answers[0], Granted):
            self.slots += zip(answers[0].slots, answers[1].slots, strict=True)

    async def _again(self) -> None:
        for one in self.both:
            one.requests -= one.requests > 0
        await self._reserve()

    async def _put(self) -> None:
        if not self.slots:
            return
        pair = self.slots.pop(self.random.randrange(len(self.slots))) if self.random.random() < 0.8 else self.random.choice(self.slots)
        written = {self._version(): self.random.randint(1, 9) for _ in range(self.random.randint(1, 3))}
        size = self.random.choice([30, 50, 50, 50, 101])
        await self.same(f"put {pair[0].seq} {written}", *(self._put_one(one, slot, written, size) for one, slot in zip(self.both, pair, strict=True)))

    async def _put_one(self, harness: PureHarness | RedisHarness, slot: Slot, written: dict[Version, int], size: int) -> object:
        return dataclasses.replace(await harness.put(slot, written, size), token=SlotToken(""))

    def _version(self) -> Version:
        return Version(
            self.random.randint(1, max(1, self.incarnation)), self.random.randint(max(0, self.trained - 3), self.trained + (self.random.random() < 0.03))
        )

    async def _release(self) -> None:
        if self.slots:
            pair = self.random.choice(self.slots)
            reason = self.random.choice([Reason.FAILED, Reason.FILTERED, Reason.GIVEN_BACK])
            await self.same(f"release {pair[0].seq} {reason}", *(one.ledger.release(s.seq, s.token, reason) for one, s in zip(self.both, pair, strict=True)))

    async def _train(self) -> None:
        step = self.trained + 1
        incarnation = self.incarnation - (self.random.random() < 0.05)
        await self.same(f"open {step}", *(one.ledger.open_step(incarnation, step) for one in self.both))
        for chunk in range(2):
            answers = await self.same(f"lease {step} {chunk}", *(one.ledger.lease(incarnation, step, chunk) for one in self.both))
            assert isinstance(answers, list)
            if not isinstance(answers[0], ChunkRecord):
                return
            if self.random.random() < 0.1 and answers[0].headers:
                at = self.random.randrange(len(answers[0].headers))
                for one, answer in zip(self.both, answers, strict=True):
                    await one.lose_payload(answer.headers[at])
                seq = answers[0].headers[at].seq
                answers = await self.same(f"payload_lost {seq}", *(one.ledger.payload_lost(incarnation, step, chunk, seq) for one in self.both))
                assert isinstance(answers, list)
                if isinstance(answers[0], Blocked):
                    return
        digest = f"w{step}" if self.random.random() < 0.8 else f"other{self.incarnation}"
        answers = await self.same(f"trained {step} {digest}", *(one.ledger.trained(incarnation, step, digest, {}) for one in self.both))
        assert isinstance(answers, list)
        if not isinstance(answers[0], type):
            self.trained = step

    async def _serve(self) -> None:
        versions = [Version(self.incarnation, self.trained)] * (self.random.random() < 0.8) + [self._version() for _ in range(2)]
        for one in self.both:
            await one.serve(*versions)

    async def _time(self) -> None:
        seconds = self.random.choice([1900, 3700, 6100])
        for one in self.both:
            await one.advance(seconds)
        named = self.random.sample(self.slots, min(2, len(self.slots)))
        await self.same("renew", *(one.ledger.renew("p1", [(p[i].seq, p[i].token) for p in named]) for i, one in enumerate(self.both)))

    async def _attach(self) -> None:
        if self.random.random() < 0.6 and self.incarnation:
            return
        checkpoint = self.random.choice([*self.checkpoints[-2:], None])
        answers = await self.same(f"attach {checkpoint}", *(one.ledger.attach(checkpoint, trainer_id="t") for one in self.both))
        assert isinstance(answers, list)
        if not isinstance(answers[0], type):
            self.incarnation, self.trained = answers[0].incarnation, answers[0].resume_step

    async def _checkpoint(self) -> None:
        made = reference(self.trained, self.incarnation)
        await self.same(f"checkpoint {made.step}", *(one.ledger.checkpoint(self.incarnation, made, keep=2) for one in self.both))
        self.checkpoints.append(made)

    async def _read(self) -> None:
        await self.same("chunks", *(one.ledger.chunks(1, 100) for one in self.both))
        await self.same("record", *(one.ledger.step_record(self.trained) for one in self.both))


def _plain(answer: object) -> object:
    """An answer without what is random in it."""
    if isinstance(answer, Granted):
        return [dataclasses.replace(slot, token=SlotToken("")) for slot in answer.slots]
    if isinstance(answer, ChunkRecord):
        headers = tuple(dataclasses.replace(header, token=SlotToken(""), payload_digest="") for header in answer.headers)
        return dataclasses.replace(answer, headers=headers)
    if isinstance(answer, tuple):
        return [_plain(one) for one in answer]
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        if hasattr(answer, "incarnation_id"):
            return dataclasses.replace(answer, incarnation_id="")
        if hasattr(answer, "payload_digest"):
            return dataclasses.replace(answer, payload_digest="")
    return answer


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_calls_gives_the_same_answers(seed: int, redis_url: str) -> None:
    async def life() -> None:
        client = connect(redis_url)
        keys = Keys(f"t-{uuid.uuid4().hex[:12]}")
        pair = Pair(PureHarness(), RedisHarness(client, keys), seed)
        config = settings(
            groups_per_step=3, pipeline_depth=[1.0, 0.0, 1.5][seed % 3], max_staleness=seed % 3, staleness_guard=GUARDS[seed % 4 % 3],
            slot_seconds=6000.0, max_attempts=2, byte_budget=1500, retention=seed % 2,
        )  # fmt: skip
        try:
            await pair.same("create", *(one.ledger.create(IDENTITY, config) for one in pair.both))
            await pair._attach()
            for _ in range(120):
                await pair.event()
            assert pair.trained or pair.incarnation > 1
        finally:
            await pair.both[1].ledger.delete_run()  # type: ignore[attr-defined]
            await client.aclose()

    asyncio.run(life())
