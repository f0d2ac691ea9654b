"""Any sequence of calls gives the same answers on Redis as on the pure ledger."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from collections.abc import Awaitable, Iterable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from buffer.config import BufferConfig
from buffer.contract import Attachment, Blocked, CheckpointRef, ChunkRecord, Granted, History, PastStep, Slot
from protocol.connection import connect
from protocol.errors import RollstreamError
from protocol.keys import Keys
from protocol.messages import Attempt, BlobRef, Reason, Seq, SlotToken
from protocol.versions import Version

from .conftest import IDENTITY, PureHarness, RedisHarness, reference, settings

pytestmark = pytest.mark.redis
GUARDS = ("mask", "drop", "correct")
EVENTS = (
    ["reserve", "put", "put", "train"] * 4
    + ["serve", "serve", "release", "time", "attach", "checkpoint", "checkpoint", "read", "again"]
    + ["spill", "letters", "aside", "follow", "sweep", "copy", "lose", "reassert", "reassert"]
)


class Pair:
    """The same call to both; slot tokens differ, so slots are kept in pairs."""

    def __init__(self, pure: PureHarness, on_redis: RedisHarness, draw: random.Random) -> None:
        self.both = (pure, on_redis)
        self.random = draw
        self.slots: list[tuple[Slot, Slot]] = []
        self.incarnation = 0
        self.trained = 0
        self.checkpoints: list[CheckpointRef] = []
        self.kept: tuple[CheckpointRef, ...] = ()
        self.steps: tuple[dict[int, PastStep], dict[int, PastStep]] = ({}, {})
        """What the trainer remembers, on each side."""
        self.attachments: list[object] = []
        self.copies: list[object] = []
        self.lost = False
        self.mended = 0
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

    async def event(self, name: str) -> None:
        await getattr(self, f"_{name}")()
        await self.same("status", *(one.ledger.status() for one in self.both))
        if len(self.calls) % 8 == 0:
            await self.check()

    async def check(self) -> None:
        for one in self.both:
            assert not (wrong := await one.violations()), (wrong, self.calls[-25:])

    async def _reserve(self) -> None:
        n = self.random.randint(1, 4)
        served = self._version() if self.random.random() < 0.1 else None
        answers = await self.same("reserve", *(one.ask(n, max_bytes=100, served=served) for one in self.both))
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
        versions = [self._version, self._version, lambda: Version(self.incarnation, self.trained)]
        written = {self.random.choice(versions)(): self.random.randint(1, 9) for _ in range(self.random.randint(1, 3))}
        size = [30, 50, 50, 50, 101][(pair[0].seq + pair[0].attempt) % 5]  # what a slot's owner puts again is the same
        await self.same(f"put {pair[0].seq} {written}", *(self._put_one(one, slot, written, size) for one, slot in zip(self.both, pair, strict=True)))

    async def _put_one(self, harness: PureHarness | RedisHarness, slot: Slot, written: dict[Version, int], size: int) -> object:
        blobs = {"x": BlobRef(name="x", dtype="<i4", shape=(1,), bytes=4, digest="0")} if slot.seq % 3 == 0 else {}
        return dataclasses.replace(await harness.put(slot, written, size, blobs), token=SlotToken(""))

    def _version(self) -> Version:
        return Version(
            self.random.randint(1, max(1, self.incarnation)), self.random.randint(max(0, self.trained - 3), self.trained + (self.random.random() < 0.03))
        )

    async def _release(self) -> None:
        if self.slots:
            pair = self.random.choice(self.slots)
            reason = self.random.choice([Reason.FAILED, Reason.FILTERED, Reason.GIVEN_BACK])
            calls = (one.ledger.release(s.seq, s.token, reason, why=f"of {s.seq}") for one, s in zip(self.both, pair, strict=True))
            await self.same(f"release {pair[0].seq} {reason}", *calls)

    async def _spill(self) -> None:
        answers = await self.same("spillable", *(one.ledger.spillable(2) for one in self.both))
        assert isinstance(answers, list)
        step = answers[0][0] if answers[0] and self.random.random() < 0.8 else self.random.randint(1, self.trained + 2)
        await self.same(f"spilled {step}", *(one.ledger.spilled(self.incarnation, step) for one in self.both))

    async def _letters(self) -> None:
        answers = await self.same("letters", *(one.ledger.dead_letters(Seq(-1), 5) for one in self.both))
        assert isinstance(answers, list)
        if answers[0] and self.random.random() < 0.7:
            seqs = [self.random.choice(answers[0]).seq, Seq(self.random.randint(0, 50))]
            await self.same(f"requeue {seqs}", *(one.ledger.requeue(seqs) for one in self.both))

    async def _aside(self) -> None:
        answers = await self.same("ready", *(one.ledger.ready(3) for one in self.both))
        assert isinstance(answers, list)
        if answers[0] and self.random.random() < 0.3:
            chosen = [[(headers[-1].seq, headers[-1].token)] * 2 for headers in answers]
            lost = self.random.random() < 0.3
            calls = (one.ledger.set_aside(self.incarnation, groups, lost=lost) for one, groups in zip(self.both, chosen, strict=True))
            await self.same("set aside", *calls)

    async def _follow(self) -> None:
        step = self.random.randint(1, self.trained + 2)
        await self.same(f"follow {step}", *(one.ledger.follow(f"r{step % 2}", step, ttl_s=60) for one in self.both))
        await self.same(f"end of {step}", *(one.ledger.trained_step(step) for one in self.both))

    async def _sweep(self) -> None:
        seconds = self.random.choice([5, 100])
        for one in self.both:
            await one.pass_time(seconds)
            await one.ledger.sweep()
        deleted: list[list[tuple[int, int]]] = [[], []]
        for one, names in zip(self.both, deleted, strict=True):

            async def delete(seq: Seq, attempt: Attempt, _token: SlotToken, names: list[tuple[int, int]] = names) -> None:
                names.append((seq, attempt))

            await one.ledger.sweep(delete)
        assert sorted(deleted[0]) == sorted(deleted[1]), self.calls[-25:]

    async def _train(self) -> None:
        step = self.trained + 1
        incarnation = self.incarnation - (self.random.random() < 0.05)
        await self.same(f"open {step}", *(one.ledger.open_step(incarnation, step) for one in self.both))
        taken: tuple[list[ChunkRecord], list[ChunkRecord]] = ([], [])
        for chunk in range(2):
            answers = await self.same(f"lease {step} {chunk}", *(one.ledger.lease(incarnation, step, chunk) for one in self.both))
            assert isinstance(answers, list)
            if not isinstance(answers[0], ChunkRecord):
                return
            if self.random.random() < 0.1 and answers[0].headers:
                at = self.random.randrange(len(answers[0].headers))
                seq = answers[0].headers[at].seq
                if self.both[0].local.pure.state.groups[seq].charged:  # else it is in the spill, and that loses it
                    for one, answer in zip(self.both, answers, strict=True):
                        await one.lose_payload(answer.headers[at])
                answers = await self.same(f"payload_lost {seq}", *(one.ledger.payload_lost(incarnation, step, chunk, seq) for one in self.both))
                assert isinstance(answers, list)
                if isinstance(answers[0], Blocked):
                    return
            for chunks, answer in zip(taken, answers, strict=True):
                chunks.append(answer)
        digest = f"w{step}" if self.random.random() < 0.8 else f"other{self.incarnation}"
        answers = await self.same(f"trained {step} {digest}", *(one.ledger.trained(incarnation, step, digest, {}) for one in self.both))
        assert isinstance(answers, list)
        if not isinstance(answers[0], type):
            self.trained = step
            for memory, chunks in zip(self.steps, taken, strict=True):
                seqs = tuple(header.seq for one in chunks for header in one.headers)
                memory[step] = PastStep(step=step, incarnation=incarnation, digest=digest, seqs=seqs, chunks=tuple(chunks))

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
        if (self.random.random() < 0.7 and self.incarnation) or self.lost:
            return
        checkpoint = self.random.choice([*self.checkpoints[-2:], None])
        after = checkpoint.step if checkpoint is not None else 0
        freed = [seq for step, past in sorted(self.steps[0].items()) if step > after for seq in past.seqs]
        abandon = self.random.choice([None, None, (), freed])
        above = self.random.choice([0, 0, self.incarnation + 2])
        calls = (one.ledger.attach(checkpoint, trainer_id="t", abandon=abandon, above=above) for one in self.both)
        answers = await self.same(f"attach {checkpoint} {abandon} {above}", *calls)
        assert isinstance(answers, list)
        if not isinstance(answers[0], type):
            self.incarnation, self.trained = answers[0].incarnation, answers[0].resume_step
            self.attachments = answers
            self.kept = tuple(one for one in self.kept if one.step <= self.trained)
            for memory in self.steps:
                for step in [step for step in memory if step > self.trained]:
                    del memory[step]

    async def _copy(self) -> None:
        self.copies.append([await one.copy() for one in self.both])

    async def _lose(self) -> None:
        if self.copies and self.attachments and self.random.random() < 0.5:
            copies = self.copies[-1]
            assert isinstance(copies, list)
            for one, copy in zip(self.both, copies, strict=True):
                await one.ledger.sweep()  # payloads that nobody needs are gone at once in the pure one only
                await one.go_back(copy)
            self.calls.append("lose")
            self.lost = True

    async def _reassert(self) -> None:
        """By what the trainer remembers; also where nothing was lost."""
        if not self.attachments or not (self.lost or self.random.random() < 0.2):
            return
        covered = self.kept[0].step if len(self.kept) > 1 else 0
        for one in self.both:
            await one.ledger.sweep()
        calls = []
        for one, memory, attachment in zip(self.both, self.steps, self.attachments, strict=True):
            assert isinstance(attachment, Attachment)
            forks = {n: (*fork, "") for n, fork in attachment.lineage.forks.items()}
            steps = [dataclasses.replace(past, chunks=()) if step <= covered else past for step, past in sorted(memory.items())]
            history = History(incarnations=forks, checkpoints=self.kept, steps=tuple(steps))
            calls.append(one.ledger.reassert(self.incarnation, attachment.incarnation_id, history))
        await self.same("reassert", *calls)
        for one in self.both:
            assert not (wrong := await one.violations()), (wrong, self.calls[-25:])
        self.trained = max(self.steps[0], default=0)
        status = await self.both[0].ledger.status()
        assert status.trained == self.trained
        self.lost, self.copies, self.mended = False, [], self.mended + bool(self.lost and self.steps[0])

    async def _checkpoint(self) -> None:
        made = reference(self.trained, self.incarnation)
        answers = await self.same(f"checkpoint {made.step}", *(one.ledger.checkpoint(self.incarnation, made, keep=2) for one in self.both))
        assert isinstance(answers, list)
        if not isinstance(answers[0], type):
            self.kept = answers[0]
        self.checkpoints.append(made)

    async def _read(self) -> None:
        await self.same("chunks", *(one.ledger.chunks(1, 100) for one in self.both))
        await self.same("record", *(one.ledger.step_record(self.trained) for one in self.both))


_RANDOM = {"incarnation_id": "", "at": 0.0, "token": SlotToken(""), "payload_digest": "", "sequence": 0}
"""What is random, or of the time. The number counts on Redis that a put which finds no payload is tried again."""


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
        return dataclasses.replace(answer, **{name: value for name, value in _RANDOM.items() if hasattr(answer, name)})
    return answer


def live(redis_url: str, config: BufferConfig, events: Iterable[str], draw: random.Random, *, cluster: bool) -> Pair:
    """Both ledgers through the same events."""

    async def life() -> Pair:
        client = connect(redis_url)
        pair = Pair(PureHarness(), RedisHarness(client, Keys(f"t-{uuid.uuid4().hex[:12]}"), cluster=cluster), draw)
        try:
            await pair.same("create", *(one.ledger.create(IDENTITY, config) for one in pair.both))
            await pair._attach()
            for name in events:
                await pair.event(name)
            await pair.check()
        finally:
            await pair.both[1].ledger.delete_run()  # type: ignore[attr-defined]
            await client.aclose()
        return pair

    return asyncio.run(life())


@pytest.mark.parametrize("seed", range(8))
def test_a_long_life_gives_the_same_answers(seed: int, redis_url: str) -> None:
    config = settings(
        groups_per_step=3, selection=["oldest", "freshest", "fifo"][seed // 2 % 3], pipeline_depth=[1.0, 0.0, 1.5][seed % 3],
        max_staleness=seed % 3, staleness_guard=GUARDS[seed % 4 % 3],
        slot_seconds=6000.0, max_attempts=2, byte_budget=1500, retention=seed % 2 * 3,
        retention_bytes=seed % 3 * 150, retention_seconds=seed % 4 * 20.0, spill="spill" * (seed // 2 % 2), blobs="blobs" * (seed % 2),
    )  # fmt: skip
    draw = random.Random(seed)
    pair = live(redis_url, config, (draw.choice(EVENTS) for _ in range(160)), draw, cluster=seed % 5 == 4)
    assert pair.trained or pair.incarnation > 1


CONFIGS = st.builds(
    settings,
    groups_per_step=st.integers(1, 4),
    chunk_groups=st.just(1),
    pipeline_depth=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    max_staleness=st.integers(0, 3),
    staleness_guard=st.sampled_from(GUARDS),
    selection=st.sampled_from(["oldest", "freshest", "fifo"]),
    slot_seconds=st.just(6000.0),
    max_attempts=st.integers(1, 3),
    byte_budget=st.sampled_from([600, 1500, 100_000]),
    retention=st.integers(0, 3),
    retention_bytes=st.sampled_from([0, 150]),
    spill=st.sampled_from(["", "spill"]),
    blobs=st.sampled_from(["", "blobs"]),
)


@given(config=CONFIGS, events=st.lists(st.sampled_from(EVENTS), min_size=5, max_size=40), draw=st.randoms(use_true_random=False), cluster=st.booleans())
@hypothesis_settings(max_examples=40)
def test_any_sequence_of_calls_gives_the_same_answers(redis_url: str, config: BufferConfig, events: list[str], draw: random.Random, cluster: bool) -> None:
    live(redis_url, config, events, draw, cluster=cluster)
