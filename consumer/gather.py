"""Sharded parameters made whole, a bucket at a time: no more than a bucket is held beside the shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20


def whole(tensors: Mapping[str, Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """All of `tensors`, in their order, in buckets of at most `bucket_bytes` or of one that is larger. A DTensor comes gathered, any other as it is.

    Every process of the mesh must go through it to its end, with the same names in the same order; what is not sharded talks to nobody.
    """
    for names in _buckets(tensors, bucket_bytes):
        yield {name: _gathered(tensors[name]) for name in names}


@torch.no_grad()
def _gathered(tensor: Tensor) -> Tensor:
    if type(tensor) in {Tensor, torch.nn.Parameter}:
        return tensor.detach()
    from torch.distributed.tensor import DTensor  # not every build of torch has it, and it takes a while

    found: Tensor = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def _buckets(tensors: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()  # of the whole, also for a DTensor
        if names and size + nbytes > bucket_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names
