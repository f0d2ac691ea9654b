"""An adapter added to the weights it belongs to: by the trainer for a version, and in files for a model that needs no adapter.

Source: LoRA (arXiv 2106.09685) 4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash
from torch import Tensor

from consumer.backend import Base, OtherModel
from consumer.shards import LazyTensors
from consumer.tensor_bytes import copy_in, view_bytes
from weightsync.cast import FLOATS, SPELLED
from weightsync.lora import PEFT_PREFIX
from weightsync.snapshot import TensorBytes

_PIECE = 1 << 24
_TYPES = MappingProxyType({spelled: getattr(torch, name) for name, spelled in SPELLED.items()})


@torch.no_grad()
def added(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling * B A in the type of W, added in float32.

    Shapes: `weight` [out, in], `a` [rank, in], `b` [out, rank].
    """
    change = b.float() @ a.float()
    return change.mul_(scaling).add_(weight).to(weight.dtype)


class MergedFiles(LazyTensors):
    """The weights of a model's files with a checkpoint's adapter added, by Hugging Face name and in the type they were trained under, each made when it is
    asked for: what a merged version has, but for the rounding of the product where a GPU made that.
    """

    def __init__(self, weights: Mapping[str, TensorBytes], adapter: Mapping[str, TensorBytes], base: Base) -> None:
        """Raises: `OtherModel` for an adapter of a layer that `weights` do not have."""
        self._weights, self._adapter, self._base = weights, adapter, base
        pairs = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in adapter}
        if odd := sorted(pair for pair in pairs if f"{pair}.weight" not in weights):
            raise OtherModel(f"the adapter has {odd[0]}, and the weights in {base.path} have no such layer")
        self._pairs = frozenset(pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights[name].shape

    def dtype(self, name: str) -> str:
        found = self._weights[name].dtype
        return SPELLED[self._base.dtype] if found in FLOATS else found

    def __getitem__(self, name: str) -> TensorBytes:
        weight, pair = self._weights[name], name.removesuffix(".weight")
        if weight.dtype not in FLOATS:
            return weight
        found = copy_in(weight).to(_TYPES[self.dtype(name)])
        if pair in self._pairs and pair != name:
            a, b = (copy_in(self._adapter[f"{PEFT_PREFIX}{pair}.lora_{side}.weight"]) for side in "AB")
            found = added(found, a, b, self._base.scaling)
        return view_bytes(found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def base_in(folder: Path, base: Base) -> Base:
    """`base` where it lies now. Raises: `OtherModel` where `folder` has other weights; `OSError`."""
    if (found := files_digest(folder)) != base.digest:
        raise OtherModel(f"its adapter is of the weights {base.digest} that were in {base.path}, and model.path {folder} has {found}: correct model.path")
    return dataclasses.replace(base, path=str(folder))


def files_digest(folder: Path) -> str:
    """xxh3-128, hex, over the names and bytes of a folder's safetensors files. Reads them all."""
    total = xxhash.xxh3_128()
    for path in sorted(folder.glob("*.safetensors")):
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                total.update(piece)
    return total.hexdigest()
