from __future__ import annotations

import asyncio

import pytest

from producer import outage
from producer.outage import through_outage
from protocol.errors import LedgerRegressed, RedisUnavailable


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pause that was made; none takes time."""
    made: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        made.append(seconds)
        await real(0)

    monkeypatch.setattr(outage.asyncio, "sleep", sleep)
    return made


def answers(*given: Exception | str):
    left = list(given)

    async def call() -> str:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return call


async def test_a_redis_that_is_away_is_asked_again_after_a_pause(pauses: list[float]) -> None:
    assert await through_outage(answers(RedisUnavailable("away"), RedisUnavailable("away"), "here"), deadline_s=60) == "here"
    assert len(pauses) == 2


async def test_a_loss_that_is_told_once_costs_no_pause(pauses: list[float]) -> None:
    assert await through_outage(answers(LedgerRegressed("lost"), "here"), deadline_s=60) == "here"
    assert pauses == []


async def test_a_loss_that_stays_is_not_asked_about_without_a_pause(pauses: list[float]) -> None:
    assert await through_outage(answers(LedgerRegressed("lost"), LedgerRegressed("lost"), LedgerRegressed("lost"), "mended"), deadline_s=60) == "mended"
    assert len(pauses) == 2


@pytest.mark.parametrize("problem", [RedisUnavailable("away"), LedgerRegressed("lost")])
async def test_past_the_deadline_the_problem_is_the_caller_s(problem: Exception, pauses: list[float]) -> None:
    with pytest.raises(type(problem)):
        await through_outage(answers(problem), deadline_s=0)
