"""Cleanup ends before its caller does, and the caller's cancellation is never lost."""

from __future__ import annotations

import asyncio

import pytest

from protocol.errors import TransportFailed
from weightsync.finish import finish


async def _cancelled_in(work: asyncio.Event, gate: asyncio.Event, task: asyncio.Task[None], *, times: int) -> None:
    await work.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("problem", [None, TransportFailed("cut"), ZeroDivisionError()])
async def test_a_cancelled_caller_waits_for_it_and_is_cancelled_then_however_it_ends(times: int, problem: Exception | None):
    begun, gate, ended = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        begun.set()
        await gate.wait()
        ended.append(True)
        if problem is not None:
            raise problem

    await _cancelled_in(begun, gate, asyncio.create_task(finish(work(), limit_s=60)), times=times)
    assert ended == [True]


async def test_what_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture):
    work = asyncio.create_task(asyncio.Event().wait(), name="test:for-ever")
    await finish(work, limit_s=0.01)  # type: ignore[arg-type]
    assert work.cancelled()
    assert "test:for-ever was not done within 0.0 s" in caplog.text


async def test_a_failure_of_ours_is_told_and_a_bug_is_raised(caplog: pytest.LogCaptureFixture):
    async def fail(problem: Exception) -> None:
        raise problem

    await finish(fail(TransportFailed("the line broke")), limit_s=60)
    assert "the line broke" in caplog.text
    with pytest.raises(ZeroDivisionError):
        await finish(fail(ZeroDivisionError()), limit_s=60)


async def test_the_deadline_of_a_caller_is_still_its_deadline():
    done, over = [], asyncio.Event()

    async def work() -> None:
        await over.wait()
        done.append(True)

    async def cut_short() -> None:
        async with asyncio.timeout(0.01):
            asyncio.get_running_loop().call_later(0.05, over.set)
            await finish(work(), limit_s=60)

    with pytest.raises(TimeoutError):
        await cut_short()
    assert done == [True]
