"""What this rank writes of a checkpoint: its tensor-parallel part of each parameter of its stage, taken apart by Hugging Face name. Nothing is gathered, but
pieces of a distributed optimizer over data-parallel ranks, a bucket at a time; of these, each writes every n-th parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.megatron.grid import Grid
from consumer.megatron.handing_out import BUCKET_BYTES, Lay
from consumer.megatron.mapping import Cut, Parameter, buckets, unpack
from consumer.parts import Place


@torch.no_grad()
def own_parts(grid: Grid, cut: Cut, lay: Lay, *, sharded: bool, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Place, Tensor]]:
    """Float32 tensors and where they belong; all ranks together have everything once. Every rank must go through it to its end. A tensor is overwritten soon.

    `sharded`: data-parallel ranks lay pieces that do not overlap; they come together bit by bit.
    """
    parameters = cut.stage(grid.pp_rank)
    turn = itertools.count()
    for names in buckets(parameters, torch.float32.itemsize, bucket_bytes, 1):
        chosen = [parameters[name] for name in names]
        flat = torch.zeros(sum(torch.Size(one.shape).numel() for one in chosen), dtype=torch.float32, device=grid.device)
        parts = unpack(flat, [one.shape for one in chosen])
        for name, part in zip(names, parts, strict=True):
            lay(name, part)
        if sharded and grid.dp > 1:
            dist.all_reduce(flat.view(torch.int32), group=grid.dp_group)  # one rank has bits, the others zeros: sums of integers keep them as they are
        for one, part in zip(chosen, parts, strict=True):
            if next(turn) % grid.dp == grid.dp_rank and not (one.axis is None and grid.tp_rank):
                for name, tensor in cut.apart(one, [part]):
                    yield name, _place(one, tensor, grid), tensor


def _place(one: Parameter, tensor: Tensor, grid: Grid) -> Place:
    start, whole = [0] * tensor.ndim, list(tensor.shape)
    if one.axis is not None:
        start[one.axis] = grid.tp_rank * tensor.shape[one.axis]
        whole[one.axis] *= grid.tp
    return Place(start=tuple(start), whole=tuple(whole))
