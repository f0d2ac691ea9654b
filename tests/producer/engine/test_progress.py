"""Engines that do not get on, and those that only seem not to."""

from __future__ import annotations

import asyncio
import dataclasses
import doctest
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.engine import progress as module
from producer.engine.progress import Look, Progress, Quiet, Stall
from protocol.messages import EngineState, EngineStatus
from protocol.versions import Version

URL = "http://a"


def test_the_examples_in_the_docstring_run() -> None:
    assert doctest.testmod(module).failed == 0


def test_one_that_answers_nothing_is_silent_at_once() -> None:
    assert Quiet(progress_s=30.0, moved_at=0.0).looked(Look.NOTHING, 30.0) is Stall.SILENT


def test_a_pause_that_ends_just_before_the_look_is_no_fault() -> None:
    quiet = Quiet(progress_s=30.0, moved_at=0.0)
    assert quiet.looked(Look.PAUSED, 30.0) is None
    assert quiet.due_at == 60.0
    assert quiet.looked(Look.READY, 60.0) is None
    quiet.moved(61.0)
    assert quiet.due_at == 91.0
    assert quiet.looked(Look.READY, 91.0) is None
    assert quiet.looked(Look.PAUSED, 106.0) is None
    assert quiet.looked(Look.READY, 136.0) is None
    assert quiet.looked(Look.READY, 151.0) is Stall.WEDGED


@pytest.mark.parametrize("change", [{"sees_tokens": False}, {"updating": True}])
def test_nobody_is_wedged_of_whom_no_token_can_be_expected(change: dict[str, bool]) -> None:
    quiet = Quiet(progress_s=30.0, moved_at=0.0, **change)
    assert [quiet.looked(Look.READY, quiet.due_at) for _ in range(5)] == [None] * 5
    assert quiet.looked(Look.NOTHING, 200.0) is Stall.SILENT


def test_who_does_not_say_is_believed() -> None:
    quiet = Quiet(progress_s=30.0, moved_at=0.0)
    assert [quiet.looked(Look.UNTOLD, quiet.due_at) for _ in range(5)] == [None] * 5


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.sampled_from([*Look, None])), max_size=40))
def test_whoever_moved_or_was_paused_lately_is_not_given_up(events: list[tuple[float, Look | None]]) -> None:
    quiet, now, excused = Quiet(progress_s=10.0, moved_at=0.0), 0.0, 0.0
    for passes, event in events:
        now += passes
        if event is None:
            quiet.moved(now)
            excused = now
        elif now >= quiet.due_at:
            verdict = quiet.looked(event, now)
            assert verdict is None or now - excused >= 10.0
            if verdict is not None:
                return
            if event is not Look.READY:
                excused = now


class Stage:
    """One engine whose looks a test writes, and requests that wait for it."""

    def __init__(self, looks: Iterator[Look], progress_s: float = 0.02) -> None:
        self.looked: list[str] = []
        self.told = asyncio.Event()
        self._looks = looks
        self.progress = Progress(self._look, progress_s=progress_s, sees_tokens=True)

    async def _look(self, url: str, _: float) -> Look:
        self.looked.append(url)
        self.told.set()
        return next(self._looks)

    async def request(self, url: str = URL) -> Stall | None:
        """How a request ended that waits for ever."""
        held = None
        try:
            async with asyncio.timeout(60) as scope:
                with self.progress.request(url, scope) as held:
                    await asyncio.Event().wait()
        except TimeoutError:
            assert held is not None
        return held.stall if held is not None else None


@asynccontextmanager
async def watching(stage: Stage) -> AsyncIterator[None]:
    task = asyncio.create_task(stage.progress.watch(), name="watch")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_all_requests_of_a_silent_engine_end_and_those_of_others_go_on() -> None:
    looks = {URL: Look.NOTHING, "http://b": Look.PAUSED}
    stage = Stage(iter(()))

    async def look(url: str, _: float) -> Look:
        stage.looked.append(url)
        if url == "http://b":
            stage.told.set()
        return looks[url]

    stage.progress._look = look
    async with watching(stage):
        other = asyncio.create_task(stage.request("http://b"), name="other")
        assert await asyncio.gather(*(stage.request() for _ in range(3))) == [Stall.SILENT] * 3
        await stage.told.wait()
        assert not other.done()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
    assert stage.progress._engines == {}


async def test_a_wedged_engine_is_looked_at_twice() -> None:
    stage = Stage(iter([Look.READY, Look.READY]))
    async with watching(stage):
        assert await stage.request() is Stall.WEDGED
    assert len(stage.looked) == 2


async def test_tokens_in_the_registry_are_progress_and_updates_are_excused() -> None:
    stage = Stage(iter([Look.READY] * 100))
    status = EngineStatus(engine_id="a", boot_nonce="boot:1", url=URL, kind="sglang", state=EngineState.ROUTABLE, version=Version(1, 0))
    async with asyncio.timeout(60) as scope:
        with stage.progress.request(URL, scope):
            quiet = stage.progress._engines[URL].quiet
            quiet.looked(Look.READY, quiet.due_at)
            stage.progress.heard([status])
            first = quiet.moved_at
            assert quiet.due_at == first + quiet.progress_s
            stage.progress.heard([status])
            assert quiet.moved_at == first, "nothing was generated since"
            stage.progress.heard([dataclasses.replace(status, target=Version(1, 1))])
            assert quiet.updating
            stage.progress.heard([dataclasses.replace(status, target=Version(1, 0), generated_tokens=5)])
            assert not quiet.updating
            assert quiet.moved_at > first
