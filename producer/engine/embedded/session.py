"""An update that comes in buckets: what is said to come is held against the model before anything is received, and nothing is served before all of it is there.

no session ── begin ──► OPEN ── buckets: staged ──► a bucket that names a version: staged tensors are handed over, together
                          │                         end: handed over if they are the whole model, else dropped
                          └── a bucket fails, or other weights are loaded: SPOILT, takes nothing more until it is ended
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from producer.engine.embedded.landing import Landing
from producer.engine.embedded.weights import FLOATS, targets
from protocol.errors import ManifestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """The tensors one call announces, in the order in which they travel."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: bool
    """One run of bytes for all, instead of one for each."""

    def landing(self) -> Landing:
        return Landing([sum(self._sizes())] if self.flat else self._sizes())

    def tensors(self, landing: Landing) -> dict[str, Tensor]:
        """Views of what has landed. Raises: `ManifestError` when other bytes came than were announced."""
        landing.check()
        runs = torch.split(landing.run(0), self._sizes()) if self.flat else [landing.run(at) for at in range(len(self.names))]
        return {name: run.view(dtype).view(shape) for name, dtype, shape, run in zip(self.names, self.dtypes, self.shapes, runs, strict=True)}

    def _sizes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]


def announced(model: nn.Module, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], *, flat: bool) -> Parcel:
    """What will come, checked against `model`. Raises: `ManifestError` naming the tensor; then nothing must be received."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ManifestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: expected as many of each")
    if flat and not names:
        raise ManifestError("Cannot create empty tensor bucket")
    wanted, tied = targets(model)
    offset, kinds = 0, []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        target, kind = wanted.get(name, tied.get(name)), FLOATS.get(dtype)
        if target is None:
            raise ManifestError(f"tensor {name} is not of this model")
        if tuple(shape) != tuple(target.shape):
            raise ManifestError(f"tensor {name} has shape {list(shape)}, the model {list(target.shape)}")
        if kind is None:
            raise ManifestError(f"tensor {name} has dtype {dtype}, expected one of {sorted(FLOATS)}")
        if flat and offset % kind.itemsize:
            raise ManifestError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {kind}")
        offset += math.prod(shape) * kind.itemsize
        kinds.append(kind)
    if len(set(names)) < len(names):
        raise ManifestError(f"tensor {next(name for name in names if names.count(name) > 1)} is twice in a bucket")
    return Parcel(names=tuple(names), dtypes=tuple(kinds), shapes=tuple(tuple(shape) for shape in shapes), flat=flat)


class Session:
    """The tensors that have come so far, in the model's types."""

    def __init__(self) -> None:
        self._staged: dict[str, Tensor] = {}
        self.broken = ""
        """Why it takes nothing more; empty while it does."""

    def stage(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Keep them; a name that came before is replaced. Tied names are checked already, and not used."""
        wanted, _ = targets(model)
        self._staged |= {name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items() if name in wanted}

    def spoil(self, reason: str) -> None:
        self._staged.clear()
        self.broken = self.broken or reason

    def take(self) -> dict[str, Tensor]:
        """What is staged; it belongs to the caller from here."""
        taken, self._staged = self._staged, {}
        return taken

    def missing(self, model: nn.Module) -> tuple[int, int]:
        """(parameters that are not staged, all of them)"""
        wanted, _ = targets(model)
        return len(wanted) - len(self._staged), len(wanted)

    @property
    def empty(self) -> bool:
        return not self._staged
