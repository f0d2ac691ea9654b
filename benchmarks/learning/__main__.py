"""`python -m benchmarks.learning`: losses against each other at forced staleness, on the demo's task, through the whole service.

Every run is `rollstream up` with its own Redis, embedded engine, weight channel and trainer, on the CPU. Its result is written as it ends; what is there is not
run again, so a stopped comparison goes on where it was. `--report` makes table and plot of what there is. Runs from a checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

import orjson

from benchmarks.learning.cell import LOSSES, Cell
from benchmarks.learning.run import prepare, run
from protocol.errors import RollstreamError

T = TypeVar("T")


class Comparison:
    """Runs the cells that have no result yet, `jobs` at a time."""

    def __init__(self, cells: Sequence[Cell], options: argparse.Namespace) -> None:
        self._options = options
        self._out = Path(options.out).absolute()
        self._work = Path(options.work).absolute() if options.work else self._out / "work"
        self._left = deque(cell for cell in cells if not self._file(cell).exists())
        self._there = len(cells) - len(self._left)
        self.failed: list[str] = []

    def _file(self, cell: Cell) -> Path:
        return self._out / f"{cell.name}.json"

    async def finish(self) -> None:
        """Whoever is told to stop (SIGTERM, Ctrl-C) ends the runs under way; they begin anew next time."""
        ours = asyncio.current_task()
        assert ours is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ours.cancel)
        for folder in (self._out, self._work):
            folder.mkdir(parents=True, exist_ok=True)
        print(f"{len(self._left)} runs to do, {self._there} are there", flush=True)
        for seed in sorted({cell.seed for cell in self._left}):
            await asyncio.to_thread(prepare, self._work, seed)
        async with asyncio.TaskGroup() as group:
            for number in range(self._options.jobs):
                group.create_task(self._work_off(), name=f"job-{number}")

    async def _work_off(self) -> None:
        while self._left:
            cell, began = self._left.popleft(), time.monotonic()
            try:
                result = await run(cell, steps=self._options.steps, work=self._work, minutes=self._options.minutes)
            except (RollstreamError, OSError) as problem:
                self.failed.append(cell.name)
                print(f"{cell.name} failed: {problem}", file=sys.stderr, flush=True)
                continue
            result["job_seconds"] = time.monotonic() - began
            making = self._file(cell).with_suffix(".making")
            making.write_bytes(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
            making.rename(self._file(cell))
            collapsed = ", collapsed" if result["collapsed"] else ""
            print(f"{cell.name}: reward {result['final']:.2f}, age {result['age_mean']:.2f}{collapsed}, {result['job_seconds']:.0f} s", flush=True)


def listed(kind: Callable[[str], T], allowed: Sequence[T] | None = None) -> Callable[[str], list[T]]:
    """A parser of comma-separated words."""

    def parse(words: str) -> list[T]:
        found = [kind(word) for word in words.split(",")]
        if odd := [one for one in found if allowed is not None and one not in allowed]:
            raise argparse.ArgumentTypeError(f"{odd[0]}: expected some of {', '.join(map(str, allowed or ()))}")
        return found

    return parse


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=listed(str, list(LOSSES)), default=list(LOSSES), help=f"some of {','.join(LOSSES)} (default: all)")
    parser.add_argument("--staleness", type=listed(int), default=[0, 2, 8], help="in steps (default: 0,2,8)")
    parser.add_argument("--seeds", type=listed(int), default=[0, 1, 2], help="(default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of a run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each of five processes that take one and a half cores (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="a run that takes longer has failed (default: %(default)s)")
    parser.add_argument("--out", default="runs/learning", help="folder of the results (default: %(default)s)")
    parser.add_argument("--work", default="", help="folder for models, logs and runs under way (default: work in the folder of the results)")
    parser.add_argument("--report", metavar="STEM", help="run nothing; write STEM.md and STEM.svg from the results that are there")
    options = parser.parse_args(words)
    if options.report:
        from benchmarks.learning.report import write

        print(write(Path(options.out), Path(options.report)))
        return 0
    cells = [Cell(loss=loss, staleness=staleness, seed=seed) for seed, staleness, loss in product(options.seeds, options.staleness, options.losses)]
    comparison = Comparison(cells, options)
    try:
        asyncio.run(comparison.finish())
    except asyncio.CancelledError:
        return 1
    if comparison.failed:
        print(f"failed, and to be run again by the same command: {', '.join(comparison.failed)}", file=sys.stderr)
    return int(bool(comparison.failed))


if __name__ == "__main__":
    sys.exit(main())
