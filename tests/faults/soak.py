"""`python -m tests.faults.soak --rounds 300`: kill rounds by seed until one goes wrong; it is printed with its seed, its kills and the last events."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.nursery import nursery
from tests.faults.plans import Plan, loss_plan, random_plan
from tests.faults.rounds import Round, RoundFailed
from tests.faults.verdict import judge

_TELL_EVERY = 25
_LOSS_EVERY = 4
"""Every fourth round Redis loses writes it had acknowledged."""


def plan_of(seed: int) -> Plan:
    return loss_plan(seed) if seed % _LOSS_EVERY == 0 else random_plan(seed)


async def soak(rounds: int, first: int, at_once: int) -> str | None:
    """What went wrong first, if anything did."""
    seeds, began = iter(range(first, first + rounds)), time.monotonic()
    done, failed = itertools.count(1), asyncio.get_running_loop().create_future()

    async def worker(nest: Path) -> None:
        for seed in seeds:
            if failed.done():
                return
            with tempfile.TemporaryDirectory(prefix="rs-") as folder:
                async with Round(Path(folder) / "r", nursery=nest, **plan_of(seed).arguments()) as one:
                    try:
                        await one.run()
                        await judge(one)
                    except RoundFailed as problem:
                        if not failed.done():
                            failed.set_result(f"seed {seed}: {problem}\nagain: python -m tests.faults.soak --rounds 1 --first {seed}")
                        return
            if (count := next(done)) % _TELL_EVERY == 0 or count == rounds:
                print(f"{count} of {rounds} rounds, {time.monotonic() - began:.0f} s: nothing lost, nothing twice", flush=True)

    with tempfile.TemporaryDirectory(prefix="rs-n") as folder, nursery(Path(folder)) as nest:
        await asyncio.gather(*(worker(nest) for _ in range(at_once)))
    return failed.result() if failed.done() else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first round")
    parser.add_argument("--at-once", type=int, default=2)
    given = parser.parse_args()
    problem = asyncio.run(soak(given.rounds, given.first, given.at_once))
    if problem is not None:
        print(problem)
    return problem is not None


if __name__ == "__main__":
    sys.exit(main())
