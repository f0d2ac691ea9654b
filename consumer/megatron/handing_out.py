"""Tensors that ranks hold parts of, made whole by Hugging Face name on rank 0, a bucket at a time: no more than a bucket is held beside the parts.

tensor-parallel ranks of the stage ── all-gather ──► its first rank ── send ──► rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.megatron.grid import Grid
from consumer.megatron.mapping import Cut, Parameter, buckets, unpack

BUCKET_BYTES = 256 << 20

Lay = Callable[[str, Tensor], None]
"""Writes this rank's part of a parameter of its stage, by megatron-core's name, into a place of zeros."""


@torch.no_grad()
def whole(grid: Grid, cut: Cut, dtype: torch.dtype, lay: Lay, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """On rank 0 every tensor once, in buckets; on any other rank nothing, yet every rank must go through it to its end."""
    for stage in range(cut.pp):
        parameters = cut.stage(stage)
        mine = stage == grid.pp_rank and grid.dp_rank == 0
        if not (mine or grid.leads):
            continue
        for names in buckets(parameters, dtype.itemsize, bucket_bytes, cut.tp):
            chosen = [parameters[name] for name in names]
            parts = _own(grid, names, chosen, dtype, lay) if mine else None
            if grid.tp_rank:
                continue
            if stage:
                parts = _sent(grid, parts, chosen, dtype, stage)
            if grid.leads:
                assert parts is not None
                yield _apart(cut, chosen, parts)


def _own(grid: Grid, names: list[str], chosen: list[Parameter], dtype: torch.dtype, lay: Lay) -> Tensor:
    """[tp, n]: the parts of a bucket of this stage, end to end; only this rank's own where it hands out nothing."""
    flat = torch.zeros(_size(chosen), dtype=dtype, device=grid.device)
    for name, place in zip(names, unpack(flat, [one.shape for one in chosen]), strict=True):
        lay(name, place)
    if grid.tp == 1:
        return flat[None]
    parts = flat.new_empty(grid.tp, flat.numel())
    dist.all_gather(list(parts.unbind()), flat, group=grid.tp_group)
    return parts


def _sent(grid: Grid, parts: Tensor | None, chosen: list[Parameter], dtype: torch.dtype, stage: int) -> Tensor | None:
    """From a later stage to the first."""
    if parts is not None:
        dist.send(parts, dist.get_global_rank(grid.pp_group, 0), group=grid.pp_group)
        return None
    parts = torch.empty(grid.tp, _size(chosen), dtype=dtype, device=grid.device)
    dist.recv(parts, dist.get_global_rank(grid.pp_group, stage), group=grid.pp_group)
    return parts


def _apart(cut: Cut, chosen: list[Parameter], parts: Tensor) -> dict[str, Tensor]:
    shapes = [one.shape for one in chosen]
    by_rank = [unpack(part, shapes) for part in parts]
    return {name: tensor for one, each in zip(chosen, zip(*by_rank, strict=True), strict=True) for name, tensor in cut.apart(one, list(each))}


def _size(chosen: list[Parameter]) -> int:
    return sum(torch.Size(one.shape).numel() for one in chosen)
