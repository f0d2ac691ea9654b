"""Which version wrote which token, checked against what each version's model says itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .conftest import Models

FAR = 0.3
"""Nats by which, of two models with nothing in common, the logprobs of a token differ on the whole."""


def logged(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def split(answer: dict[str, Any], before: str, after: str) -> int:
    """Where the span of `after` begins; the two cover the response."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == [before, after], answer["meta_info"] | {"output_token_logprobs": None}
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], len(answer["output_ids"]))
    assert answer["meta_info"]["weight_version"] == after
    return int(spans[1]["start"])


def check_in_place(answer: dict[str, Any], at: int, models: Models, prompt: list[int], *, lag: int, tolerance: float) -> None:
    """The old model wrote all before `at`, and nothing from `at + lag` on. What the new one wrote rests on keys and values of the old, so it is neither's."""
    old = (logged(answer) - models.written(models.a, prompt, answer["output_ids"])).abs()
    assert old[:at].max() <= tolerance
    assert len(old) >= at + lag + 10
    assert old[at + lag :].mean() > FAR


def check_recomputed(answer: dict[str, Any], at: int, models: Models, prompt: list[int], *, tolerance: float) -> None:
    """The old model wrote all before `at`, and the new one, which read that anew, all from there on."""
    new: Path = models.b
    before, after = (logged(answer) - models.written(path, prompt, answer["output_ids"]) for path in (models.a, new))
    assert before[:at].abs().max() <= tolerance
    assert after[at:].abs().max() <= 2 * tolerance
    assert before[at:].abs().mean() > FAR
