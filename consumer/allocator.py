"""The C allocator of a trainer: pages that are new to the process cost several times what writing to them does, and glibc gives what payloads lay in back to
the system as soon as a step is over.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt`."""
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Have the C allocator of this process keep up to a gigabyte of what is freed, instead of giving payloads back after each step and taking new pages for
    the next. False where the allocator is not glibc's; nothing changes then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
