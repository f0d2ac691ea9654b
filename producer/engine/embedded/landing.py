"""Memory for bytes whose sender may have said the wrong number of them.

gloo aborts the whole process when more arrives than was posted for (`op.preamble.length <= op.nbytes`, not an exception), and says nothing when less does.
So every window is posted up to the end of an address range that is far larger than any bucket; pages that nothing arrives in are never backed by memory. How
much came is read from marks:

    │ run 0 ……………… 0xff │ guard │ run 1 ……………… 0xff │ guard │ … address space without memory … │

A run's last byte is 0xff before the data come. A float that ends so is not finite, or is beyond 1e38, in each type that is accepted: if the mark is still
there, bytes are missing or the weights are worthless. The guard behind a run is random: if it changed, more came than was said.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.errors import ManifestError

_RESERVES = (1 << 37, 1 << 34, 1 << 31)
"""Bytes of address space to try; a machine that accounts for all of it may refuse the larger ones. Staged buckets hold theirs until they are applied."""
_MARGIN = 1 << 30
_ALIGN = 64
_GUARD = 16
_NORESERVE = {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)


class Landing:
    """Runs of bytes of the given sizes, each with its marks.

    Raises: `ManifestError`, from `check` too: a run is not what came.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._starts: list[int] = []
        end = 0
        for size in sizes:
            self._starts.append(end)
            end += -(-(size + _GUARD) // _ALIGN) * _ALIGN
        self._memory = torch.frombuffer(_reserved(end), dtype=torch.uint8)
        self._guards = [torch.frombuffer(bytearray(os.urandom(_GUARD)), dtype=torch.uint8) for _ in sizes]
        for start, size, guard in zip(self._starts, sizes, self._guards, strict=True):
            self._memory[start + size : start + size + _GUARD] = guard
            if size:
                self._memory[start + size - 1] = 0xFF

    def windows(self) -> list[Tensor]:
        """Where to receive each run: from its first byte to the end of all. What overruns one is seen in the marks of the next."""
        return [self._memory[start:] for start in self._starts]

    def run(self, at: int) -> Tensor:
        """Shapes: [size] of bytes."""
        return self._memory[self._starts[at] : self._starts[at] + self._sizes[at]]

    def check(self) -> None:
        for at, (size, guard) in enumerate(zip(self._sizes, self._guards, strict=True)):
            run, behind = self.run(at), self._memory[self._starts[at] + size : self._starts[at] + size + _GUARD]
            if not torch.equal(behind, guard):
                raise ManifestError(f"more than the {size} bytes came that names, dtypes and shapes say: the sender's are others")
            if size and int(run[-1]) == 0xFF:
                raise ManifestError(f"fewer than the {size} bytes came that names, dtypes and shapes say, or the last value is not finite")


def _reserved(needed: int) -> mmap.mmap:
    for size in (*(size for size in _RESERVES if size >= 2 * needed), needed + _MARGIN):
        try:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError:
            continue
    raise ManifestError(f"there is no address space for a bucket of {needed} bytes: send smaller ones")
