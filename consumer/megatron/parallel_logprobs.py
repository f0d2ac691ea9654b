"""Logprobs of sampled tokens and the entropy, from logits whose vocabulary is cut over tensor-parallel ranks. Two small all-reduces; nothing is gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def parallel_logprobs(logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """`log softmax(logits)[target]` and the entropy in nats, each [N] float32 and the same on every rank of `group`; both carry the gradient.

    Shapes: logits [N, V / ranks] float32, of rank i the vocabulary from i V / ranks on, left as they are; target [N] int64 in the whole vocabulary.
    Source: the entropy's gradient is that of `H = log Z - sum p l`, so `dH/dl = -p (log p + H)`.
    """
    found: tuple[Tensor, Tensor] = _ParallelLogprobs.apply(logits, target, group)  # type: ignore[no-untyped-call, unused-ignore]
    return found


class _ParallelLogprobs(torch.autograd.Function):
    """Every rank gets the whole gradient of what all ranks computed alike, so the backward pass talks to nobody."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        count, width = logits.shape
        greatest = logits.max(-1).values if count else logits.new_zeros(0)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - greatest[:, None]
        weights = shifted.exp()
        local = target - dist.get_rank(group) * width
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        chosen = shifted.gather(1, local[:, None])[:, 0].masked_fill(~mine, 0.0)
        sums = torch.stack([weights.sum(-1), _mean_terms(weights, shifted), chosen])
        dist.all_reduce(sums, group=group)
        log_z = sums[0].log()
        logprob, entropy = sums[2] - log_z, log_z - sums[1] / sums[0]
        ctx.save_for_backward(shifted.sub_(log_z[:, None]), local, mine, entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logprobs, local, mine, entropy = ctx.saved_tensors
        of_logprob, of_entropy = grads
        probs = logprobs.exp()
        # p log p is 0 where p is: a logit of -inf passes no gradient.
        inside = torch.where(probs > 0, logprobs + entropy[:, None], 0.0)
        gradient = -probs * (of_logprob[:, None] + of_entropy[:, None] * inside)
        gradient.scatter_add_(1, local[:, None], torch.where(mine, of_logprob, 0.0)[:, None])
        return gradient, None, None


def _mean_terms(weights: Tensor, shifted: Tensor) -> Tensor:
    """[N]: sum of `e^s s`, with 0 where `e^s` is."""
    return torch.where(weights > 0, weights * shifted, 0.0).sum(-1)
