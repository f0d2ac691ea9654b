from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from buffer.group_commit import GroupCommit


class Server:
    """Answers a batch once it is let through; keeps what it was sent."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.open = asyncio.Event()
        self.under_way = self.most_under_way = 0

    async def send(self, items: Sequence[int]) -> Sequence[int | Exception]:
        self.batches.append(list(items))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.open.wait()
        finally:
            self.under_way -= 1
        if any(item < 0 for item in items):
            raise ConnectionError("gone")
        return [ValueError(str(item)) if item % 10 == 9 else item * 2 for item in items]

    def commit(self, *, most_size: int = 1000, most_items: int = 100, at_once: int = 1) -> GroupCommit[int, int]:
        return GroupCommit(self.send, size=abs, most_size=most_size, most_items=most_items, at_once=at_once, away=(ConnectionError,))


async def settle() -> None:
    """Everything that can go on without the server has done so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_comes_meanwhile_goes_together_in_order() -> None:
    server = Server()
    commit = server.commit()
    first = asyncio.create_task(commit(1))
    await settle()
    rest = [asyncio.create_task(commit(item)) for item in (2, 3, 4)]
    await settle()
    assert server.batches == [[1]]
    server.open.set()
    assert await asyncio.gather(first, *rest) == [2, 4, 6, 8]
    assert server.batches == [[1], [2, 3, 4]]


async def test_a_lone_call_waits_for_nobody() -> None:
    server = Server()
    server.open.set()
    commit = server.commit()
    assert [await commit(1), await commit(2)] == [2, 4]
    assert server.batches == [[1], [2]]


async def test_batches_keep_to_size_items_and_number_under_way() -> None:
    server = Server()
    commit = server.commit(most_size=100, most_items=3, at_once=2)
    calls = [asyncio.create_task(commit(item)) for item in (60, 60, 500, 10, 10, 10, 10)]
    await settle()
    server.open.set()
    await asyncio.gather(*calls)
    assert server.batches == [[60], [60], [500], [10, 10, 10], [10]]
    assert server.most_under_way == 2


async def test_an_item_s_own_error_is_raised_for_it_alone_and_a_failed_send_for_all() -> None:
    server = Server()
    server.open.set()
    commit = server.commit()
    results = await asyncio.gather(*(commit(item) for item in (8, 9, 10)), return_exceptions=True)
    assert results[0::2] == [16, 20]
    assert isinstance(results[1], ValueError)
    lost = await asyncio.gather(*(commit(item) for item in (1, -1)), return_exceptions=True)
    assert [type(problem) for problem in lost] == [ConnectionError, ConnectionError]
    assert await commit(3) == 6


async def test_what_waited_while_the_server_was_away_is_not_made_to_wait_again() -> None:
    server = Server()
    commit = server.commit(most_items=1)
    first = asyncio.create_task(commit(3))
    await settle()
    second, third = (asyncio.create_task(commit(item)) for item in (-1, 4))
    await settle()
    server.open.set()
    assert await first == 6
    results = await asyncio.gather(second, third, return_exceptions=True)
    assert [type(problem) for problem in results] == [ConnectionError, ConnectionError]
    assert server.batches == [[3], [-1]]
    assert await commit(5) == 10


async def test_a_caller_that_is_cancelled_takes_nothing_from_the_others() -> None:
    server = Server()
    commit = server.commit()
    first, second, third = (asyncio.create_task(commit(item)) for item in (1, 2, 3))
    await settle()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    server.open.set()
    assert await asyncio.gather(first, third) == [2, 6]
