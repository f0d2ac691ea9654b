"""`python -m benchmarks.weights.engine MODEL PORT NONCE [PACE_S [SLOW]]`: the embedded engine alone in a process, until it is ended.

PACE_S: one decode step in so many seconds, a clock that leaves the cores of a small machine idle between steps; so a step's time is the engine's own and not
what the other engines leave of the cores. SLOW: loading weights takes so many times as long.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from producer.engine.embedded.model import load
from producer.engine.embedded.server import EmbeddedEngine

_SLOTS, _LENGTH = 16, 512


async def main() -> None:
    path, port, boot_nonce = sys.argv[1:4]
    pace_s, slow = (*(float(one) for one in sys.argv[4:6]), 0.0, 1.0)[:2]
    torch.set_num_threads(1)
    model = await asyncio.to_thread(load, path, slots=_SLOTS, max_length=_LENGTH, dtype="bfloat16")
    async with EmbeddedEngine(model, weight_version=f"boot:{boot_nonce}", port=int(port), pace_s=pace_s, apply_delay_factor=slow) as engine:
        await engine.failed()


if __name__ == "__main__":
    asyncio.run(main())
