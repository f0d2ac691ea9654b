"""Nobody waits for the slowest: four engines under load, one of them twenty times slower to update than the others."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pytest

from producer.engine.client import EngineClient, Sampling
from protocol.errors import EngineUnavailable, SampleFailed
from protocol.messages import EngineId
from protocol.versions import Version
from protocol.wakeups import Topic
from tests.faults.weight_stand import Stand
from tests.producer.engine.conftest import write_model

pytestmark = [pytest.mark.redis, pytest.mark.faults]
SLOW, OTHERS = "engine-3", ("engine-0", "engine-1", "engine-2")
FACTOR, SLOWER = 12.0, 20
VERSIONS = 12
"""Published in each of the two windows that are compared."""
_TOKENS = 12
_ANSWER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer, and what was known around it."""

    engine_id: EngineId
    acked: Version
    """Of its engine when it was asked."""
    wrote: tuple[Version, ...]
    newest: Version
    """When it was answered."""


@dataclass(slots=True)
class Window:
    samples: list[Sample] = field(default_factory=list)
    applied: Counter[str] = field(default_factory=Counter)
    """Versions that each engine acked."""
    apply_s: dict[str, list[float]] = field(default_factory=dict)

    def answers(self) -> Counter[str]:
        return Counter(str(sample.engine_id) for sample in self.samples)


async def ask_for_ever(stand: Stand, role: str, window: Window) -> None:
    """One request after the other, so that the engine is never idle for long."""
    client, sampling = EngineClient(stand.session), Sampling(max_new_tokens=_TOKENS, ignore_eos=True)
    while True:
        engine = next((one for one in await stand.registry.routable() if one.engine_id == stand.engine_id(role)), None)
        if engine is None or engine.version is None:
            await asyncio.sleep(0.02)
            continue
        with contextlib.suppress(EngineUnavailable, SampleFailed):
            answer = await client.generate(engine.url, [1, 7, 9], sampling=sampling, rid=uuid.uuid4().hex, deadline_s=_ANSWER_S)
            wrote = tuple(span.version for span in answer.spans)
            window.samples.append(Sample(engine_id=engine.engine_id, acked=engine.version, wrote=wrote, newest=await stand.newest()))


@contextlib.asynccontextmanager
async def loaded(stand: Stand, window: Window) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(ask_for_ever(stand, role, window), name=f"load:{role}") for role in (*OTHERS, SLOW) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def measure(stand: Stand) -> Window:
    """From one version to one at least `VERSIONS` later, before which the slow one has taken one of them too, and everybody has answered."""
    window = Window()
    async with loaded(stand, window):
        first = await stand.newest()
        slow = stand.engine_id(SLOW)
        while len(window.answers()) < 1 + len(OTHERS) or not any(
            one.engine_id == slow and one.version is not None and one.version > first for one in await stand.registry.engines()
        ):
            await stand.waker.wait(Topic.WEIGHTS, since=stand.waker.mark(Topic.WEIGHTS), timeout_s=0.2)
        end = max(first.n + VERSIONS, (await stand.newest()).n + 1)
        while (last := await stand.newest()).n < end:
            await stand.waker.wait(Topic.WEIGHTS, since=stand.waker.mark(Topic.WEIGHTS), timeout_s=0.2)
    events = await stand.events()
    places = {event.fields["version"]: index for index, event in enumerate(events) if event.op == "published"}
    for event in events[places[str(first)] : places[str(last)]]:
        if event.op == "applied":
            window.applied[str(event.fields["engine_id"])] += 1
            window.apply_s.setdefault(str(event.fields["engine_id"]), []).append(float(event.fields["apply_s"]))
    return window


@pytest.mark.timeout(1800)
async def test_the_others_keep_up_with_the_publisher_as_they_do_without_a_slow_one(tmp_path: Path, weight_nest: Path):
    """Each has a pause of its own (max_paused 4): how many may pause is a setting, and the only thing that the others could wait for."""
    changes = {"engine": {"slots": 4, "pace_s": 0.01, "apply_delay_factor": FACTOR}, "weights": {"max_paused": 4, "apply_deadline_s": 600.0}}
    async with Stand(tmp_path / "stand", write_model(tmp_path / "model", seed=1), "store", weight_nest, engines=4, changes=changes, paced_by=OTHERS) as stand:
        alike = await measure(stand)
        await stand.kill(SLOW)
        await stand.start(SLOW, sets=[f"engine.apply_delay_factor={FACTOR * SLOWER}"])
        await stand.converge()
        before = len(await stand.events())
        slowed = await measure(stand)
        unfit = [event for event in (await stand.events())[before:] if event.op == "unfit"]
    others, slow = [stand.engine_id(role) for role in OTHERS], stand.engine_id(SLOW)
    assert unfit == []
    for engine_id in others:
        assert min(alike.applied[engine_id], slowed.applied[engine_id]) >= VERSIONS - 1, (alike.applied, slowed.applied)
        assert slowed.answers()[engine_id] > 0, "it goes on generating"
    assert slowed.applied[slow] < min(slowed.applied[engine_id] for engine_id in others), "while it took one version, the others took several"
    assert median(slowed.apply_s[slow]) > 4 * max(median(slowed.apply_s[engine_id]) for engine_id in others), "or it was not slow"
    assert slowed.answers()[slow] > 0, "it serves too, an older version"
    for sample in (*alike.samples, *slowed.samples):
        assert sample.wrote[0] >= sample.acked, "no answer begins with an older version than its engine had acked"
        assert list(sample.wrote) == sorted(sample.wrote)
        assert sample.wrote[-1] <= sample.newest
