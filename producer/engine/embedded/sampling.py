"""Sampling one token for every row, vectorised: rows that ask for more than the plain softmax cost only when there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from producer.engine.embedded.request import SamplingParams


class Rows:
    """The sampling of the rows of a batch, prepared once each time its members change."""

    def __init__(self, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> None:
        special = [i for i, p in enumerate(params) if not p.plain]
        self.greedy = _index([i for i in special if params[i].greedy])
        drawn = [i for i in special if not params[i].greedy]
        self.seeded = [(i, generator) for i in drawn if (generator := generators[i]) is not None]
        scaled = [i for i in special if params[i].temperature not in (0.0, 1.0)]
        self.temperature: Tensor | None = None
        if scaled:
            self.temperature = torch.ones(len(params), 1)
            self.temperature[_index(scaled), 0] = torch.tensor([params[i].temperature for i in scaled])
        cut = [i for i in drawn if params[i].top_k != -1 or params[i].top_p < 1]
        self.cut = _index(cut)
        self.top_k = torch.tensor([params[i].top_k if params[i].top_k != -1 else 1 << 30 for i in cut])
        self.top_p = torch.tensor([params[i].top_p for i in cut])


@dataclass(slots=True)
class Sampled:
    """Shapes: tokens [n], chosen [n] (logprob of the token), logprobs [n, V]."""

    tokens: Tensor
    chosen: Tensor
    logprobs: Tensor


def sample(logits: Tensor, rows: Rows, generator: torch.Generator) -> Sampled:
    """One token a row. Logprobs are the log-softmax after temperature and before top-k and top-p, as SGLang's are; a greedy row's are at temperature 1 when its
    temperature is 0.

    A token is drawn as the maximum of logprob plus Gumbel noise, which is the softmax distribution.
    """
    logprobs = torch.log_softmax(logits if rows.temperature is None else logits / rows.temperature, dim=-1)
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    for row, own in rows.seeded:
        noise[row].exponential_(generator=own)
    if len(rows.greedy):
        noise[rows.greedy] = 1.0
    candidates = logprobs
    if len(rows.cut):
        candidates = logprobs.clone()
        candidates[rows.cut] = _cut(logprobs[rows.cut], rows.top_k, rows.top_p)
    tokens = (candidates - noise.log_()).argmax(dim=-1)
    return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _cut(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Only the `top_k` likeliest tokens of each row, and of those the fewest whose probability reaches `top_p`; the rest are -inf."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    probability = ordered.exp()
    before = probability.cumsum(dim=-1) - probability
    outside = (torch.arange(logprobs.shape[1])[None] >= top_k[:, None]) | (before > top_p[:, None])
    outside[:, 0] = False
    return torch.empty_like(logprobs).scatter_(1, order, ordered.masked_fill(outside, float("-inf")))


def _index(rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.long)
