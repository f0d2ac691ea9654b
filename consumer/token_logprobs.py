"""Logprobs of sampled tokens and the entropy, from logits in whatever precision they come: one array of the logits' size for the gradient, no other copy.

A softmax in float32 over a vocabulary of 150,000 takes 5 GB for 8,192 tokens, and autograd keeps several of them. Here the passes between are made block by
block, or, on a GPU with Triton, in one kernel forward and one backward (`consumer.logprob_kernels`).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_BLOCK_BYTES = 64 << 20
"""Of float32 at a time: few enough to stay in a GPU's cache, enough to keep it busy."""
_AGREES = 1e-3


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """`log softmax(logits / temperature)[target]` and the entropy in nats, each [N] in float32 (float64 for such logits); both carry the gradient, once.

    Shapes: logits [N, V] in any floating dtype, left as they are; targets [N] int64. A logit of -inf is a token that cannot be sampled: it passes no gradient.
    Source: the entropy's gradient is that of `H = log Z - sum p l`, so `dH/dl = -p (log p + H)`.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(logits, targets, 1.0 / temperature)  # type: ignore[no-untyped-call, unused-ignore]
    return found


class Kept(NamedTuple):
    """What the backward pass is told beside the logits."""

    targets: Tensor
    scale: float
    entropy: Tensor
    """[N]"""
    peak: Tensor
    """[N] greatest scaled logit"""
    log_z: Tensor
    """[N] log of what all of them sum up to above it"""


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kernels = _kernels(logits.device) if logits.is_cuda and len(logits) else None
        logprob, entropy, peak, log_z = (forward_blocks if kernels is None else kernels.forward)(logits, targets, scale)
        ctx.save_for_backward(logits, targets, entropy, peak, log_z)
        ctx.scale, ctx.kernels = scale, kernels
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        of_logprob, of_entropy = grads
        if of_logprob is None and of_entropy is None:
            return None, None, None
        logits, targets, entropy, peak, log_z = ctx.saved_tensors
        of_logprob = torch.zeros_like(entropy) if of_logprob is None else of_logprob
        call = backward_blocks if ctx.kernels is None else ctx.kernels.backward
        return call(logits, Kept(targets, ctx.scale, entropy, peak, log_z), of_logprob, of_entropy), None, None


def forward_blocks(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[N] each: logprob, entropy, peak, log_z."""
    logprob, entropy, peak, log_z = torch.empty((4, len(logits)), dtype=_wide(logits), device=logits.device).unbind()
    for rows in _blocks(logits):
        scaled = _scaled(logits[rows], scale)
        peak[rows] = scaled.amax(-1)
        scaled -= peak[rows, None]
        log_z[rows] = scaled.exp().sum(-1).log()
        scaled -= log_z[rows, None]
        logprob[rows] = scaled.gather(1, targets[rows, None])[:, 0]
        entropy[rows] = torch.special.entr(scaled.exp_()).sum(-1)
    return logprob, entropy, peak, log_z


def backward_blocks(logits: Tensor, kept: Kept, of_logprob: Tensor, of_entropy: Tensor | None) -> Tensor:
    """[N, V] in the dtype of the logits."""
    targets, scale, entropy, peak, log_z = kept
    found = torch.empty_like(logits)
    for rows in _blocks(logits):
        log_p = _scaled(logits[rows], scale)
        log_p -= peak[rows, None]
        log_p -= log_z[rows, None]
        p = log_p.exp()
        gradient = of_logprob[rows, None].expand_as(p)
        if of_entropy is not None:
            # p log p is 0 where p is.
            gradient = gradient + of_entropy[rows, None] * torch.where(p > 0, log_p + entropy[rows, None], 0.0)
        gradient = p.mul_(gradient).neg_()
        gradient.scatter_add_(1, targets[rows, None], of_logprob[rows, None])
        found[rows] = gradient.mul_(scale)
    return found


def _scaled(logits: Tensor, scale: float) -> Tensor:
    """A copy, in float32 at least."""
    copied = logits.to(_wide(logits), copy=True)
    return copied if scale == 1 else copied.mul_(scale)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _blocks(logits: Tensor) -> list[slice]:
    size = max(1, _BLOCK_BYTES // (4 * logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


@cache
def _kernels(device: torch.device) -> Any:
    """What computes the same on this GPU, if it can be compiled here and gives the same."""
    try:
        import consumer.logprob_kernels as kernels  # triton

        off = _difference(kernels, device)
    except Exception as problem:  # noqa: BLE001 - whatever a compiler raises
        _LOG.info("logprobs are computed without Triton kernels: %s: %s", type(problem).__name__, str(problem)[:300])
        return None
    if not off < _AGREES:
        _LOG.info("logprobs are computed without Triton kernels: theirs are off by %.3g", off)
        return None
    return kernels


def _difference(kernels: Any, device: torch.device) -> float:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn((5, 10_001), generator=rng).mul_(4)
    logits[1, ::2] = -torch.inf
    logits[2] += 100
    targets, upstream = torch.tensor([0, 1, 4096, 10_000, 77]), torch.randn((2, 5), generator=rng).to(device)
    logits, targets = logits.to(device), targets.to(device)
    greatest = 0.0
    for each in (None, upstream[1]):
        found = []
        for forward, backward in ((forward_blocks, backward_blocks), (kernels.forward, kernels.backward)):
            logprob, entropy, peak, log_z = forward(logits, targets, 0.8)
            found.append((logprob, entropy, backward(logits, Kept(targets, 0.8, entropy, peak, log_z), upstream[0], each)))
        greatest = max(greatest, *(float((one - other).abs().max()) for one, other in zip(*found, strict=True)))
    return greatest
