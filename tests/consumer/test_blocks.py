from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import numpy as np
import torch

from consumer.blocks import Blocks

ROOT = Path(__file__).parents[2]


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_is_handed_out_again_once_no_array_lies_in_it() -> None:
    blocks = Blocks()
    first = blocks.take(1000)
    place, view = address(first), first[8:80].view(np.int64)[2:]
    del first
    assert address(blocks.take(1000)) != place, "a view of a slice still lies in it"
    tensor = torch.from_numpy(view)
    del view
    assert address(blocks.take(1000)) != place, "a tensor still lies in it"
    del tensor
    assert place in {address(one) for one in [blocks.take(1000), blocks.take(1000), blocks.take(1000)]}


def test_what_lies_in_a_block_is_never_written_by_the_next_taker() -> None:
    blocks, rng = Blocks(), np.random.default_rng(0)
    held: list[tuple[int, np.ndarray]] = []
    for number in range(200):
        room = blocks.take(int(rng.integers(0, 3 << 20)))
        room[:] = number % 251
        held.append((number % 251, room[len(room) // 2 :]))
        if len(held) > 3:
            del held[int(rng.integers(len(held)))]
        assert all((part == value).all() for value, part in held)


def test_a_block_that_is_too_small_makes_room_for_one_that_fits() -> None:
    blocks = Blocks()
    small = blocks.take(10)
    del small
    large = blocks.take(5 << 20)
    assert large.shape == (5 << 20,)
    place = address(large)
    del large
    assert address(blocks.take(4 << 20)) == place


def test_another_thread_may_let_go() -> None:
    blocks, passed = Blocks(), Queue[np.ndarray]()
    passed.put(blocks.take(100))
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(address(passed.get())))
    thread.start()
    thread.join()
    assert address(blocks.take(100)) == seen[0]


def test_an_allocator_that_keeps_what_is_freed_takes_no_new_pages_for_the_next_chunk() -> None:
    """In processes of their own: the setting is for life."""
    code = """
import resource, sys
from consumer.blocks import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def chunk():
    return [b"x" * ((1 << 20) + i) for i in range(32)]

chunk()
before = faults()
chunk()
chunk()
print(faults() - before)
"""
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True, cwd=ROOT).stdout) for how in ("keep", "give back")
    )
    assert kept < 100
    assert given_back > 1000
