"""A stand-in for the package `reasoning-gym`: as much of it as a run's data and rewards ask for, with entries of its form."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Sums:
    """Entry `index`: a question of which there are 23 different ones for a seed."""

    name: str
    seed: int

    def __getitem__(self, index: int) -> dict[str, Any]:
        left, right = (self.seed + 7 * index) % 23, self.seed % 97
        return {"question": f"{self.name}: {left} + {right} =", "answer": str(left + right), "metadata": {"difficulty": {"num_terms": 2}, "expression": "x"}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        assert entry["question"].startswith(self.name)
        assert entry["metadata"]["difficulty"] == {"num_terms": 2}
        return 1.0 if answer == entry["answer"] else 0.01


def staged() -> ModuleType:
    module = ModuleType("reasoning_gym")
    module.create_dataset = lambda name, *, seed, **_: Sums(name, seed)  # type: ignore[attr-defined]
    return module
