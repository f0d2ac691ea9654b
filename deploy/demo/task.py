"""The demo's task: sort four digits. Prompts, the reward, and the data files.

>>> prompt("3142"), answer("3142")
('>3142=', '1234')
>>> [(reward.value, reward.exact) for reward in (score("1234", "1234"), score("1243", "1234"), score("", "1234"))]
[(1.0, True), (0.25, False), (0.0, False)]

This module is imported by producers (the reward) and knows no torch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import orjson

from deploy.demo.tokenizer import SPECIAL
from producer.rewards import Reward, RewardSample

DIGITS = 4
PROBLEMS = 10**DIGITS
HELD_OUT_ROWS = 256
MAX_NEW_TOKENS = DIGITS + 2
"""The answer, the end token, and one more: an answer may be too long."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Problems as strings of digits. Invariant: the two parts share none, and together are all there are."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def problems(seed: int) -> Problems:
    """The split for a seed; always the same for the same seed."""
    drawn = random.Random(f"demo:{seed}").sample(range(PROBLEMS), PROBLEMS)
    texts = tuple(f"{number:0{DIGITS}d}" for number in drawn)
    return Problems(train=texts[HELD_OUT_ROWS:], held_out=texts[:HELD_OUT_ROWS])


def prompt(problem: str) -> str:
    return f">{problem}="


def answer(problem: str) -> str:
    return "".join(sorted(problem))


def score(response: str, expected: str) -> Reward:
    """Half for the share of positions that match, half for an exact answer."""
    matches = sum(given == wanted for given, wanted in zip(response, expected, strict=False))
    exact = response == expected
    return Reward(0.5 * matches / max(len(response), len(expected)) + 0.5 * exact, exact)


async def reward(sample: RewardSample) -> Reward:
    """The demo's `reward.function`. An answer that never ends, or has other special tokens than its end, earns nothing."""
    specials = sum(int(token) < len(SPECIAL) for token in sample.response_ids)
    if sample.finish_reason != "stop" or specials > 1:
        return Reward(0.0, exact=False)
    return score(sample.response, str(sample.label))


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write `train.jsonl` and `heldout.jsonl` into `folder` and return their paths."""
    split = problems(seed)
    paths = (folder / "train.jsonl", folder / "heldout.jsonl")
    for path, texts in zip(paths, (split.train, split.held_out), strict=True):
        path.write_bytes(b"".join(orjson.dumps({"prompt": prompt(text), "label": answer(text)}) + b"\n" for text in texts))
    return paths
