"""The order of prompts: which row a `seq` asks for, as a pure function of the seed.

Epoch e visits every row once, in the order of a keyed hash of the row numbers; `seq` falls into epoch `seq // rows`. Nothing is stored and nothing is
coordinated: every producer, on every machine and in every version of NumPy, computes the same row.

>>> order = PromptOrder(rows=4, seed=7)
>>> sorted(order.row(seq) for seq in range(4, 8))
[0, 1, 2, 3]
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class PromptOrder:
    """`row(seq)` for a data set of `rows` rows.

    Invariant: over `seq` in [e * rows, (e + 1) * rows) every row comes exactly once.
    """

    def __init__(self, *, rows: int, seed: int) -> None:
        if rows < 1:
            raise ValueError(f"a data set of {rows} rows has no order")
        self._rows = rows
        self._seed = seed
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def row(self, seq: int) -> int:
        epoch, place = divmod(seq, self._rows)
        return int(self._epoch(epoch)[place])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        start = _mix(_mix(self._seed & _MASK) ^ epoch)
        with np.errstate(over="ignore"):
            keys = _mix_array(np.uint64(start) + np.arange(1, self._rows + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        return np.argsort(keys, kind="stable")


def _mix(x: int) -> int:
    """SplitMix64's finaliser. Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
