"""Who runs first where there are more threads than cores."""

from __future__ import annotations

import os
import sys
import threading

_NICE = 5
"""Enough that whoever answers runs at once. Not more: the interpreter's lock, which it needs as well, may be held by the thread that gives way."""


def give_way() -> None:
    """This thread computes on the CPU, and from now on lets those run first that answer others, in this process and in others; so do the threads it starts.

    On a machine whose cores are all busy an engine takes a version later the longer its loop waits for a core. Without effect where a thread has no priority
    of its own (systems other than Linux).
    """
    if sys.platform == "linux":
        identity = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, identity, max(_NICE, os.getpriority(os.PRIO_PROCESS, identity)))
