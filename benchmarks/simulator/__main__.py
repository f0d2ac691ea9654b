"""`python -m benchmarks.simulator --seeds 20000`: run seeds until one fails; print it, cut down to what it takes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain

from benchmarks.simulator.scenario import ALL_RULES, describe
from benchmarks.simulator.shrink import readable, shrink
from benchmarks.simulator.world import Outcome, simulate

_BLOCK = 50
_TELL_S = 10.0


def main() -> int:
    """0: every invariant held in every run. 1: a run failed."""
    given = _arguments()
    without = frozenset(given.without)
    began = told = time.monotonic()
    runs = events = steps = 0
    for outcome in _outcomes(range(given.start, given.start + given.seeds), without, given.jobs):
        runs, events, steps = runs + 1, events + outcome.events, steps + outcome.steps
        if outcome.problem is not None:
            print(f"\nseed {outcome.seed} fails: {outcome.problem}\ncutting it down …", flush=True)
            print("\n".join(readable(shrink(outcome, without=without))))
            print(f"scenario: {describe(outcome.seed)}")
            print(f"again: python -m benchmarks.simulator --seeds 1 --start {outcome.seed}{''.join(f' --without {rule}' for rule in sorted(without))}")
            return 1
        if time.monotonic() - told >= _TELL_S or runs == given.seeds:
            told = time.monotonic()
            print(f"{runs} of {given.seeds} runs, {events} events, {steps} steps, {told - began:.0f} s: nothing broke", flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="How many runs.")
    parser.add_argument("--start", type=int, default=0, help="The first seed.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes.")
    parser.add_argument("--without", action="append", default=[], choices=sorted(ALL_RULES), metavar="RULE", help="Leave a rule out, to see it missed.")
    return parser.parse_args()


def _outcomes(seeds: range, without: frozenset[str], jobs: int) -> Iterator[Outcome]:
    """In order of the seeds."""
    if jobs <= 1:
        yield from (simulate(seed, without=without) for seed in seeds)
        return
    blocks = [seeds[start : start + _BLOCK] for start in range(0, len(seeds), _BLOCK)]
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_block, block, without) for block in blocks]
        try:
            yield from chain.from_iterable(one.result() for one in waiting)
        finally:
            pool.shutdown(cancel_futures=True)


def _block(seeds: range, without: frozenset[str]) -> list[Outcome]:
    return [simulate(seed, without=without) for seed in seeds]


if __name__ == "__main__":
    sys.exit(main())
