"""New weights: everything is there and checked before the first parameter is touched; and what the parameters are now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from protocol.errors import ManifestError

FLOATS = MappingProxyType({"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16})
"""Types that weights may come in, by torch's names; each is converted to the model's."""
_FILE_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Weights in memory that fit the model. Parameters that are not among them stay as they are."""

    tensors: Mapping[str, Tensor]
    path: str = ""
    """The folder they are from; empty: they came through a process group."""

    @property
    def source(self) -> str:
        return "disk" if self.path else "distributed"


def targets(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters by name, and the other names that tied ones go by (`lm_head.weight` of a model with tied embeddings)."""
    wanted = dict(model.named_parameters())
    return wanted, {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name not in wanted}


def stage(path: str, model: nn.Module) -> Staged:
    """Read the weights in folder `path`. Blocking; runs beside generation.

    A tied name (`lm_head.weight` of a model with tied embeddings) may be absent; if present it is checked and not used. Floats of another width are converted.

    Raises: `ManifestError` naming the tensor or file; the model is untouched.
    """
    wanted, tied = targets(model)
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ManifestError(f"{path}: no safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    target = wanted.get(name, tied.get(name))
                    if target is None:
                        raise ManifestError(f"{file}: tensor {name} is not of this model")
                    if name in tensors:
                        raise ManifestError(f"{file}: tensor {name} is in two files")
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    if shape != tuple(target.shape):
                        raise ManifestError(f"{file}: tensor {name} has shape {list(shape)}, the model {list(target.shape)}")
                    if dtype not in _FILE_FLOATS:
                        raise ManifestError(f"{file}: tensor {name} has dtype {dtype}, expected one of {sorted(_FILE_FLOATS)}")
                    if name in wanted:
                        tensors[name] = opened.get_tensor(name).to(target.dtype, copy=True)
        except (SafetensorError, OSError) as problem:
            raise ManifestError(f"{file}: cannot be read ({problem})") from problem
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise ManifestError(f"{path}: tensor {missing[0]} is missing" + (f", and {len(missing) - 1} more" if missing[1:] else ""))
    return Staged(path=path, tensors=tensors)


@torch.no_grad()
def apply(model: nn.Module, staged: Staged) -> None:
    """Copy the staged weights into the parameters. Between two decode steps, by the thread that decodes."""
    for name, parameter in model.named_parameters():
        if name in staged.tensors:
            parameter.copy_(staged.tensors[name])


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, str]:
    """xxh3-64, hex, of the bytes of each parameter, in the type that the engine computes with. Nothing may be applied meanwhile."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        raw = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
        found[name] = xxhash.xxh3_64_hexdigest(raw.numpy().data)
    return found
