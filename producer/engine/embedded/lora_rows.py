"""LoRA in a batch: each row of a forward pass by its own adapter, or by none.

    y[rows of an adapter] += scaling * (x[rows] A^T) B^T

Source: LoRA (arXiv 2106.09685) 4.1, unmerged, so that one batch may hold several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch users know
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from protocol.errors import ManifestError
from weightsync.lora import ADAPTER_FILE, ADAPTER_SETTINGS, PEFT_PREFIX

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """What adapters an engine takes; SGLang's flags."""

    max_rank: int
    targets: tuple[str, ...]
    """The last names of modules."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """Never changes once it is read."""

    name: str
    path: str
    scaling: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A [r, in] and B [out, r] by name of the module, in the model's type."""


class LoraRows:
    """The adapters of the rows of the forward pass that comes next. Used by the thread that decodes."""

    def __init__(self, model: nn.Module, targets: Sequence[str]) -> None:
        linear = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._names: dict[nn.Module, str] = {module: name for module, name in linear.items() if name.rpartition(".")[2] in targets}
        self._groups: list[tuple[Adapter, Tensor | None]] = []

    def names(self) -> Mapping[nn.Module, str]:
        """Of the modules that may have an adapter."""
        return self._names

    def take(self, adapters: Sequence[Adapter | None]) -> None:
        """Row i goes by `adapters[i]`."""
        distinct = {adapter for adapter in adapters if adapter is not None}
        if len(distinct) == 1 and None not in adapters:
            self._groups = [(distinct.pop(), None)]
            return
        self._groups = [(one, torch.tensor([row for row, adapter in enumerate(adapters) if adapter is one])) for one in distinct]

    def plus(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Shapes: x [B, T, in], y [B, T, out], what the module itself made of it."""
        for adapter, rows in self._groups:
            if (pair := adapter.pairs.get(name)) is None:
                continue
            part = x if rows is None else x[rows]
            change = F.linear(F.linear(part, pair[0]), pair[1]) * adapter.scaling
            y = y + change if rows is None else y.index_add(0, rows, change)
        return y

    def hook(self) -> None:
        """Have the modules themselves add it, for a forward pass that is the model's own."""
        for module, name in self._names.items():
            module.register_forward_hook(lambda _, inputs, output, name=name: self.plus(name, inputs[0], output))


def read_adapter(name: str, path: str, rows: LoraRows, limits: LoraLimits, dtype: torch.dtype) -> Adapter:
    """The adapter in folder `path`. Blocks. Raises: `ManifestError` with what is wrong, in SGLang's words where it has some."""
    try:
        settings: dict[str, Any] = orjson.loads((Path(path) / ADAPTER_SETTINGS).read_bytes())
        rank, targets = int(settings["r"]), list(settings["target_modules"])
        scaling = float(settings["lora_alpha"]) / rank
    except OSError as problem:
        raise ManifestError(str(problem)) from problem
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as problem:
        raise ManifestError(f"{path}/{ADAPTER_SETTINGS}: no settings of an adapter ({type(problem).__name__}: {problem})") from problem
    if settings.get("use_dora"):
        raise ManifestError(f"Failed to load {name} because LoRA serving currently doesn't support DoRA adapters")
    if rank > limits.max_rank or not set(targets) <= set(limits.targets):
        raise ManifestError(
            f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool configuration. Please ensure that the LoRA adapter's rank "
            "is within the configured `--max-lora-rank` and that the target modules are included in `--lora-target-modules`."
        )
    tensors = _tensors(Path(path) / ADAPTER_FILE)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module, own in rows.names().items():
        a, b = (tensors.pop(f"{PEFT_PREFIX}{own}{end}", None) for end in (_A, _B))
        if a is None or b is None:
            if (a is None) != (b is None) or own.rpartition(".")[2] in targets:
                raise ManifestError(f"{path}: {own} has not both matrices")
            continue
        out_features, in_features = module.weight.shape  # type: ignore[misc]
        if (tuple(a.shape), tuple(b.shape)) != ((rank, in_features), (out_features, rank)):
            raise ManifestError(
                f"{path}: {own} has matrices {list(a.shape)} and {list(b.shape)}, the model takes [{rank}, {in_features}], [{out_features}, {rank}]"
            )
        pairs[own] = (a.to(dtype), b.to(dtype))
    if tensors:
        raise ManifestError(f"{path}: tensor {min(tensors)} is not of this model")
    return Adapter(name=name, path=path, scaling=scaling, pairs=pairs)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as problem:
        raise ManifestError(f"{file}: cannot be read ({problem})") from problem
