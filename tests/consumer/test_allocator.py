from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_allocator_that_keeps_what_is_freed_takes_no_new_pages_for_the_next_chunk() -> None:
    """In processes of their own: the setting is for life."""
    code = """
import resource, sys
from consumer.allocator import keep_freed_memory

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
