"""Memory for the arrays of chunks, used again: pages that are new to the process cost several times what writing to them does, and an allocator gives memory
of this size back to the system as soon as a step is over.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

import numpy as np
from numpy.typing import NDArray

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt`."""
_KEPT_BYTES = 1 << 30
_ROUND = 1 << 20
"""Sizes are rounded up to a multiple, so that chunks of about equal size fit each other's blocks."""


def keep_freed_memory() -> bool:
    """Have the C allocator of this process keep up to a gigabyte of what is freed, instead of giving payloads back after each chunk and taking new pages for
    the next. False where the allocator is not glibc's; nothing changes then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


class Blocks:
    """Blocks of memory that outlive the arrays in them.

    Invariant: no array lies in a block that is handed out, whichever thread let go of it; all blocks together are never more than were in use at one time, of
    the largest size asked for.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """[size], of no particular content. Its block is free again when this array, and all arrays made of it by slicing and `view`, are gone."""
        with self._lock:
            block = self._free.pop() if self._free else None
        if block is None or len(block) < size:
            block = mmap.mmap(-1, max(_ROUND, -(-size // _ROUND) * _ROUND))
        whole = np.frombuffer(block, dtype=np.uint8)
        weakref.finalize(whole, self._free.append, block).atexit = False
        return whole[:size]
