"""Tensors to publish made whole, a bucket at a time: no more than a bucket is held beside the shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20


class Derived(Mapping[str, Tensor]):
    """Tensors of which others are made, by the same names, of the same shapes and types; `whole` gives those, and has each made once."""

    @abstractmethod
    def made(self, name: str) -> Tensor:
        """What `name` is to be, whole. Every process of the mesh asks for it."""


def whole(tensors: Mapping[str, Tensor], *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[dict[str, Tensor]]:
    """All of `tensors`, in their order, in buckets of at most `bucket_bytes` or of one that is larger. A DTensor comes gathered, any other as it is; of
    `Derived` comes what is made of them.

    Every process of the mesh must go through it to its end, with the same names in the same order; what is not sharded talks to nobody.
    """
    for names in _buckets(tensors, bucket_bytes):
        yield {name: tensors.made(name) if isinstance(tensors, Derived) else gathered(tensors[name]) for name in names}


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """A DTensor whole, any other as it is, without gradient. Every process of its mesh calls it."""
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
