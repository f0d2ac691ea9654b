from __future__ import annotations

import os
import sys
import threading

import pytest

from consumer.worker import Worker
from protocol.priority import give_way

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


async def test_a_trainer_on_the_cpu_lets_its_loop_run_first_and_one_on_a_gpu_is_as_urgent_as_it() -> None:
    before = _nice()
    async with Worker(on_cpu=True) as on_cpu, Worker() as on_gpu:
        assert await on_cpu.call(_nice) > before
        assert await on_gpu.call(_nice) == before
    assert _nice() == before


def test_a_thread_that_gives_way_already_gives_way_no_less() -> None:
    found: list[int] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        give_way()
        found.append(_nice())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [15]
