"""Work on large buffers in a few threads: numpy, xxhash, zstd and file calls let go of the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
THREADS = max(1, min(8, len(os.sched_getaffinity(0))))
"""More than eight gain nothing on one machine's memory, and a trainer needs its cores."""


def spread(work: Callable[[Item], Result], items: Iterable[Item], *, threads: int = THREADS) -> Sequence[Result]:
    """`work` of every item, in the order of items. After a failure nothing new is begun; what runs is waited for, then the first failure in order is raised."""
    todo = list(items)
    if threads <= 1 or len(todo) <= 1:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), thread_name_prefix="weights") as pool:
        futures = [pool.submit(work, item) for item in todo]
        if any(future.exception() for future in wait(futures, return_when=FIRST_EXCEPTION).done):
            pool.shutdown(cancel_futures=True)
            raise next(problem for future in futures if not future.cancelled() and (problem := future.exception()) is not None)
        return [future.result() for future in futures]
