"""Rounds by seed: `python -m tests.faults.soak --rounds 300 --weight-rounds 40 --seed 1`. Whole runs under kill -9, then updates of weights.

Prints the seed of a round that failed, who was killed where, what is wrong, and the tail of its events; exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.nursery import nursery
from tests.faults.plans import Plan, loss_plan, random_plan
from tests.faults.rounds import Round, RoundFailed
from tests.faults.verdict import judge
from tests.faults.weight_soak import soak_weights

_LOSSES = 4
"""Of so many rounds one loses writes that Redis had acknowledged."""


def plan_of(seed: int) -> Plan:
    return loss_plan(seed) if seed % _LOSSES == 0 else random_plan(seed)


async def soak(seeds: Iterator[int], nest: Path, *, jobs: int) -> list[int]:
    """The seeds that failed."""
    failed: list[int] = []

    async def work() -> None:
        for seed in seeds:
            began, plan = time.monotonic(), plan_of(seed)
            with tempfile.TemporaryDirectory(prefix="rs-soak-") as folder:
                try:
                    async with Round(Path(folder) / "round", **plan.arguments(), nursery=nest) as round_:
                        await round_.run()
                        await judge(round_)
                except RoundFailed as problem:
                    failed.append(seed)
                    print(f"seed {seed} FAILED; again: python -m tests.faults.soak --rounds 1 --seed {seed}\n{problem}", flush=True)
                else:
                    deaths = sum(code != 0 for codes in round_.exits.values() for code in codes)
                    print(f"seed {seed}: {deaths} killed, {time.monotonic() - began:.1f} s: {round_}"[:220], flush=True)

    await asyncio.gather(*(work() for _ in range(jobs)))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="kill -9 of real processes, round after round.")
    parser.add_argument("--rounds", type=int, default=300, metavar="N")
    parser.add_argument("--weight-rounds", type=int, default=40, metavar="N", help="kills in the middle of updates of weights, after the others")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the first round; the next ones count on from it")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="rounds at the same time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rs-nest-") as folder, nursery(Path(folder)) as nest:
        failed = asyncio.run(soak(iter(range(options.seed, options.seed + options.rounds)), nest, jobs=options.jobs))
    stands = asyncio.run(soak_weights(options.weight_rounds, options.seed))
    print(f"{options.rounds} rounds, {len(failed)} failed{': ' if failed else ''}{', '.join(map(str, sorted(failed)))}")
    print(f"{options.weight_rounds} weight rounds, {len(stands)} stands failed{': ' if stands else ''}{', '.join(map(str, stands))}")
    return 1 if failed or stands else 0


if __name__ == "__main__":
    sys.exit(main())
