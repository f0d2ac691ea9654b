"""Between tensors by Hugging Face names and the parameters of a megatron-core GPT, both ways, exactly, at any tensor and pipeline parallelism.

    Hugging Face                              megatron-core, a rank's part
    q_proj, k_proj, v_proj  [.., h]       ◄─► linear_qkv   a key-value head after the other: its q heads, its k, its v
    gate_proj, up_proj      [f, h]        ◄─► linear_fc1   the rank's gate rows, then its up rows
    o_proj, down_proj       [h, ..]       ◄─► linear_proj, linear_fc2, by columns
    embed_tokens, lm_head   [vocab, h]    ◄─► by rows; where tied weights are cut into stages, the last stage has a copy of the embedding

The *whole* of a parameter is the parts of all tensor-parallel ranks one after the other along `Parameter.axis`; without an axis every rank has it all. A stage
counts its layers from 0. Nothing here knows megatron-core: moments of an optimizer map as the weights do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from consumer.megatron.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a stage."""

    names: tuple[str, ...]
    """What it is made of, by Hugging Face name."""
    shape: tuple[int, ...]
    """Of a rank's part."""
    axis: int | None = None
    """Tensor-parallel ranks hold equal parts along it; None: each holds all of it."""
    kind: Literal["plain", "qkv", "gate_up"] = "plain"
    copy: bool = False
    """An earlier stage has it too, and that one is handed out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model cut over tensor-parallel ranks and stages, evenly (see `Architecture.check_layout`)."""

    model: Architecture
    tp: int = 1
    pp: int = 1

    def stage(self, stage: int) -> dict[str, Parameter]:
        """The parameters of a stage by megatron-core's name, in its order of naming."""
        model, tp, count = self.model, self.tp, self.model.layers // self.pp
        first, last = stage == 0, stage == self.pp - 1
        rows = (model.vocab // tp, model.hidden)
        found: dict[str, Parameter] = {}
        if first:
            found["embedding.word_embeddings.weight"] = Parameter(names=(EMBEDDING,), shape=rows, axis=0)
        for here in range(count):
            layer = f"model.layers.{stage * count + here}."
            found |= {f"decoder.layers.{here}.{name}": one for name, one in self._layer(layer).items()}
        if last:
            found["decoder.final_layernorm.weight"] = Parameter(names=("model.norm.weight",), shape=(model.hidden,))
            if not model.tied:
                found["output_layer.weight"] = Parameter(names=("lm_head.weight",), shape=rows, axis=0)
            elif not first:
                found["output_layer.weight"] = Parameter(names=(EMBEDDING,), shape=rows, axis=0, copy=True)
        return found

    @property
    def layer_parameters(self) -> int:
        """Numbers in all layers, the embedding and the head left out."""
        return self.tp * self.model.layers * sum(_numel(one.shape) for one in self._layer("").values())

    def _layer(self, layer: str) -> dict[str, Parameter]:
        model, tp = self.model, self.tp
        q_rows, kv_rows = model.heads * model.head_dim, model.groups * model.head_dim
        qkv = tuple(f"{layer}self_attn.{one}_proj." for one in "qkv")
        found = {
            "input_layernorm.weight": Parameter(names=(f"{layer}input_layernorm.weight",), shape=(model.hidden,)),
            "self_attention.linear_proj.weight": Parameter(names=(f"{layer}self_attn.o_proj.weight",), shape=(model.hidden, q_rows // tp), axis=1),
            "self_attention.linear_qkv.weight": Parameter(
                names=tuple(f"{one}weight" for one in qkv), shape=((q_rows + 2 * kv_rows) // tp, model.hidden), axis=0, kind="qkv"
            ),
        }
        if model.qkv_bias:
            found["self_attention.linear_qkv.bias"] = Parameter(
                names=tuple(f"{one}bias" for one in qkv), shape=((q_rows + 2 * kv_rows) // tp,), axis=0, kind="qkv"
            )
        if model.qk_norm:
            for one in "qk":
                found[f"self_attention.{one}_layernorm.weight"] = Parameter(names=(f"{layer}self_attn.{one}_norm.weight",), shape=(model.head_dim,))
        found["pre_mlp_layernorm.weight"] = Parameter(names=(f"{layer}post_attention_layernorm.weight",), shape=(model.hidden,))
        gate_up = (f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight")
        found["mlp.linear_fc1.weight"] = Parameter(names=gate_up, shape=(2 * model.ffn // tp, model.hidden), axis=0, kind="gate_up")
        found["mlp.linear_fc2.weight"] = Parameter(names=(f"{layer}mlp.down_proj.weight",), shape=(model.hidden, model.ffn // tp), axis=1)
        return found

    # -- one parameter -----------------------------------------------------------------------------------------------------------------------

    def slab(self, one: Parameter, shape: tuple[int, ...], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where what the rank needs of a tensor of this shape begins, and its shape. Raises: `ValueError` for a tensor of another model."""
        start, size = [0] * len(shape), list(shape)
        if one.axis is not None:
            if one.axis >= len(shape) or shape[one.axis] % self.tp:
                raise ValueError(f"{', '.join(one.names)}: shape {list(shape)} does not fit config.json")
            size[one.axis] //= self.tp
            start[one.axis] = rank * size[one.axis]
        return tuple(start), tuple(size)

    def joined(self, one: Parameter, slabs: list[Tensor]) -> Tensor:
        """A rank's part from its slab of each tensor, in the order of its names; the reverse of `apart` of that part alone. May share their memory.

        Raises: `ValueError` when the shapes are not those of this model.
        """
        if one.kind == "qkv":
            groups = self.model.groups // self.tp
            if any(slab.shape[0] % groups for slab in slabs):
                raise ValueError(f"{', '.join(one.names)}: shape {[list(slab.shape) for slab in slabs]} does not fit config.json")
            found = torch.cat([slab.reshape(groups, -1, *slab.shape[1:]) for slab in slabs], 1).flatten(0, 1)
        else:
            found = torch.cat(slabs) if len(slabs) > 1 else slabs[0]
        if tuple(found.shape) != one.shape:
            raise ValueError(f"{', '.join(one.names)}: shape {[list(slab.shape) for slab in slabs]} does not fit config.json")
        return found

    def apart(self, one: Parameter, parts: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a parameter is made of, by name, from the parts of all ranks in order. May share their memory."""
        if one.kind == "qkv":
            groups = self.model.groups // self.tp
            each = self.model.heads // self.model.groups
            whole = torch.cat([part.reshape(groups, (each + 2) * self.model.head_dim, *part.shape[1:]) for part in parts])
            sizes = [each * self.model.head_dim, self.model.head_dim, self.model.head_dim]
            for name, tensor in zip(one.names, torch.split(whole, sizes, 1), strict=True):
                yield name, tensor.flatten(0, 1)
        elif one.kind == "gate_up":
            for at, name in enumerate(one.names):
                yield name, torch.cat([part.chunk(2)[at] for part in parts])
        else:
            yield one.names[0], parts[0] if one.axis is None or len(parts) == 1 else torch.cat(parts, one.axis)


def buckets(parameters: Mapping[str, Parameter], item_bytes: int, bucket_bytes: int, tp: int) -> Iterator[list[str]]:
    """The parameters to hand out, in order, so many at a time that their wholes take `bucket_bytes` at most, or one that takes more."""
    names: list[str] = []
    size = 0
    for name, one in parameters.items():
        if one.copy:
            continue
        nbytes = _numel(one.shape) * item_bytes * tp
        if names and size + nbytes > bucket_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


def unpack(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Views of a bucket that was laid end to end."""
    ends = list(itertools.accumulate((_numel(shape) for shape in shapes), initial=0))
    return [flat[start:end].view(shape) for shape, start, end in zip(shapes, ends[:-1], ends[1:], strict=True)]


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
