"""Several ranks of one test, each a process of its own."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker
from collections.abc import Callable
from typing import Any

multiprocessing.resource_tracker.ensure_running()  # it keeps a pipe open as long as this process lives


def answers_of(member: Callable[..., None], *arguments: Any, ranks: int = 2, timeout_s: float) -> dict[int, Any]:
    """What each rank put: `member(rank, *arguments, answers)` runs in each and puts `(rank, found)`.

    Raises: `queue.Empty` at the time limit. No rank outlives this, and none that waits to be heard keeps this process from its end.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    members = [context.Process(target=member, args=(rank, *arguments, answers), daemon=True) for rank in range(ranks)]
    for one in members:
        one.start()
    try:
        found = dict(answers.get(timeout=timeout_s) for _ in members)
        for one in members:
            one.join(60)
    finally:
        for one in members:
            one.kill()
            one.join()
            one.close()
        answers.close()
        answers.join_thread()
    return found
