"""What [trainer] changes about a transformers model's arithmetic and memory, without changing the model's code."""

from __future__ import annotations

import functools
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from protocol.errors import ConfigError


def placed(model: Any, device: torch.device) -> Any:
    """`model`, loaded from files, on `device`, without dropout; all its parameters want gradients."""
    model.requires_grad_(True)
    model.eval()
    model.to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # memory of torch's own alignment: results must not depend on where a file was mapped
    return model


def float32_head(model: Any) -> None:
    """The last projection runs in float32, also under autocast. Source: "ScaleRL" (arXiv 2510.13786): trainer and engine agree better.

    Raises: `ConfigError` for a model whose head is no linear layer.
    """
    head: Any = model.get_output_embeddings()
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        raise ConfigError(f"trainer.head_float32: {type(model).__name__} has no linear layer as its head; set it to false")

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

    head.forward = forward


def recompute_activations(model: Any) -> None:
    """Each layer keeps its input alone for the backward pass, which computes the rest again: about a third more arithmetic, the same gradient bit by bit.

    The model's own switch works in training mode only, which brings dropout with it. Raises: `ConfigError` for a model that has no such layers.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer  # seconds to import, and only this needs it

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"trainer.activation_checkpointing: {type(model).__name__} has no layers that transformers knows how to recompute; set it to false")
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def free_bytes(device: torch.device) -> int:
    """Memory that a tensor on `device` may still take."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + kept
