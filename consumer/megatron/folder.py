"""Tensors of a Hugging Face model folder by name, read one at a time: a rank that needs a part of a model does not hold all of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from consumer.parts import Shape, cut
from consumer.tensor_bytes import copy_in
from protocol.errors import ConfigError
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import TensorBytes

Where: TypeAlias = Callable[[Shape], tuple[Shape, Shape]]
"""Of a tensor's shape: where the part that is wanted begins, and the part's shape."""
Slab: TypeAlias = Callable[[str, Where], Tensor]
"""Reads a part of a tensor by its name."""


class Folder:
    """Open between `open_folder` and its end."""

    def __init__(self, path: Path, tensors: dict[str, TensorBytes]) -> None:
        self._path, self._tensors = path, tensors

    def slab(self, name: str, where: Where) -> Tensor:
        """A copy. Raises: `ConfigError` for a name that no file has."""
        found = self._tensors.get(name)
        if found is None:
            raise ConfigError(f"model.path {self._path}: its files have no tensor {name}, which config.json asks for; save the model again")
        return copy_in(cut(found, *where(found.shape)))


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[Folder]:
    with contextlib.ExitStack() as files:
        tensors: dict[str, TensorBytes] = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors |= files.enter_context(open_tensors(file))
        yield Folder(path, tensors)
