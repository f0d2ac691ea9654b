"""Causal attention within each sequence of a packed row: by the GPU's variable-length kernel that comes with torch, elsewhere a sequence at a time.

transformers models get it by name (`ATTENTION`, once `register` was called) and pass `Sequences` on to every layer as the keyword `sequences`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

ATTENTION = "rollstream_packed"
"""What transformers knows it by."""
HALF = (torch.bfloat16, torch.float16)
"""What the kernel computes in."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Where the R sequences of a row [T] lie."""

    ends: Tensor
    """[R + 1] int32, on the device: sequence i is [ends[i], ends[i + 1])."""
    lengths: tuple[int, ...]
    """[R], in host memory: nobody has to wait for the device to know them"""


def sequences_at(cu_seqlens: NDArray[np.int32], device: torch.device) -> Sequences:
    return Sequences(ends=torch.from_numpy(cu_seqlens).to(device, non_blocking=True), lengths=tuple(np.diff(cu_seqlens).tolist()))


def attend(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, *, scale: float | None = None) -> Tensor:
    """Shapes: query [T, heads, d], key and value [T, key-value heads, d], of which each serves as many heads; result as query."""
    if query.is_cuda and query.dtype in HALF:
        longest = max(sequences.lengths)
        found: Tensor = _kernel()(query, key, value, sequences.ends, sequences.ends, longest, longest, scale=scale, window_size=(-1, 0))
        return found
    pieces = zip(*(torch.split(tensor.transpose(0, 1)[None], list(sequences.lengths), 2) for tensor in (query, key, value)), strict=True)
    each = [functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True) for q, k, v in pieces]
    return torch.cat(each, 2)[0].transpose(0, 1)


@functools.cache
def _kernel() -> Any:
    """Every release's kernel takes fewer key-value heads; some want to be told so. A window of (-1, 0) is what they call causal."""
    from torch.nn.attention.varlen import varlen_attn

    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else varlen_attn


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _for_transformers)


def _for_transformers(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sequences: Sequences | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Shapes: query [1, heads, T, d], key and value [1, key-value heads, T, d]; result [1, T, heads, d].

    Raises: `NotImplementedError` for what it does not compute: nothing is passed over.
    """
    asked = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "attention_mask": attention_mask}
    if odd := [name for name, given in asked.items() if given is not None]:
        raise NotImplementedError(f"{type(module).__name__} attends with {', '.join(odd)}")
    if sequences is None:
        raise NotImplementedError(f"{type(module).__name__} is not told where sequences begin: its model keeps keywords to itself")
    if dropout or len(query) != 1 or not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} attends with dropout, over several rows, or to what follows")
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else query.dtype
    query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    return attend(query, key, value, sequences, scale=scaling)[None], None


@torch.no_grad()
def kernel_difference(device: torch.device, *, heads: int, kv_heads: int, size: int) -> float:
    """How far the kernel's result and gradients are from those computed a sequence at a time in float32, on random bfloat16 numbers of deviation 1."""
    lengths = np.array([0, *itertools.accumulate((5, 1, 130, 64))], dtype=np.int32)
    rng = torch.Generator().manual_seed(0)
    shapes = ((lengths[-1], heads, size), (lengths[-1], kv_heads, size), (lengths[-1], kv_heads, size), (lengths[-1], heads, size))
    *inputs, upstream = (torch.randn(shape, generator=rng).to(device, torch.bfloat16) for shape in shapes)
    sequences = sequences_at(lengths, device)
    found: list[list[Tensor]] = []
    for dtype in (torch.bfloat16, torch.float32):
        with torch.enable_grad():
            leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
            result = attend(leaves[0], leaves[1], leaves[2], sequences)
            result.backward(upstream.to(dtype))  # type: ignore[no-untyped-call, unused-ignore]
        found.append([result.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)])
    return max(float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True))
