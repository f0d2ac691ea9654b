"""`consumer.token_logprobs` as Triton kernels: each logit is read once forward; backward it is read, and its gradient written, once.

Imports Triton, which comes with torch for GPUs and compiles at the first call. Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from consumer.token_logprobs import Kept

_BLOCK = 4096


def forward(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `token_logprobs.forward_blocks`; at least one row."""
    logits = logits.contiguous()
    count, width = logits.shape
    logprob, entropy, peak, log_z = torch.empty((4, count), dtype=torch.float32, device=logits.device).unbind()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call, unused-ignore]
        _forward[(count,)](logits, targets, logprob, entropy, peak, log_z, width, scale, BLOCK=_BLOCK, num_warps=8)
    return logprob, entropy, peak, log_z


def backward(logits: Tensor, kept: Kept, of_logprob: Tensor, of_entropy: Tensor | None) -> Tensor:
    """As `token_logprobs.backward_blocks`; at least one row."""
    logits = logits.contiguous()
    count, width = logits.shape
    found = torch.empty_like(logits)
    given = of_logprob.contiguous() if of_entropy is None else of_entropy.contiguous()
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call, unused-ignore]
        _backward[(count, triton.cdiv(width, _BLOCK))](
            logits,
            kept.targets,
            kept.entropy,
            kept.peak,
            kept.log_z,
            of_logprob.contiguous(),
            given,
            found,
            width,
            kept.scale,
            WITH_ENTROPY=of_entropy is not None,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return found


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward(logits, targets, logprob, entropy, peak, log_z, width, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803, PLR0917
    """One row a program. `total` is the sum of e^(x - most), `mean` that of e^(x - most) (x - most); both are moved along when `most` grows."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * width
    most = -float("inf")
    total = 0.0
    mean = 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(start + columns, mask=columns < width, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(most, tl.max(x, 0))
        step = tl.where(total > 0, most - higher, 0.0)
        decay = tl.exp(step)
        off = tl.where(x > -float("inf"), x - higher, -float("inf"))
        weight = tl.exp(off)
        mean = decay * (mean + total * step) + tl.sum(tl.where(weight > 0, weight * off, 0.0), 0)
        total = decay * total + tl.sum(weight, 0)
        most = higher
    rest = tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.load(start + target).to(tl.float32) * scale
    tl.store(logprob + row, chosen - most - rest)
    tl.store(entropy + row, rest - mean / total)
    tl.store(peak + row, most)
    tl.store(log_z + row, rest)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward(  # type: ignore[no-untyped-def] # noqa: ANN202, PLR0917
    logits,  # noqa: ANN001
    targets,  # noqa: ANN001
    entropy,  # noqa: ANN001
    peak,  # noqa: ANN001
    log_z,  # noqa: ANN001
    of_logprob,  # noqa: ANN001
    of_entropy,  # noqa: ANN001
    found,  # noqa: ANN001
    width,  # noqa: ANN001
    scale,  # noqa: ANN001
    WITH_ENTROPY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block of a row a program."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = row.to(tl.int64) * width
    x = tl.load(logits + start + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale
    log_p = x - tl.load(peak + row) - tl.load(log_z + row)
    p = tl.exp(log_p)
    upstream = tl.load(of_logprob + row)
    gradient = -p * upstream
    if WITH_ENTROPY:
        gradient -= tl.load(of_entropy + row) * tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
    gradient += tl.where(columns == tl.load(targets + row), upstream, 0.0)
    tl.store(found + start + columns, (gradient * scale).to(found.dtype.element_ty), mask=inside)
