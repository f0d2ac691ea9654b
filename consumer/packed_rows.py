"""Whether a model trains on packed rows (`consumer.packing`), found out by trying: no architecture is trusted to keep the rollouts of a row apart."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from consumer.config import TrainerConfig
from consumer.packed_attention import ATTENTION, kernel_difference, register, sequences_at
from consumer.packing import PackedBatch, attention_cost
from protocol.errors import ConfigError

_LOG = logging.getLogger(__name__)
_LENGTHS = (7, 1, 12, 4)
_TOLERANCE = 1e-3
"""Nats, or units of a value, in float32. Another order of sums makes up less than 1e-4; a rollout that sees another one, a tenth and more."""
_KERNEL_TOLERANCE = 0.02
"""Relative; bfloat16 rounds by 0.004."""


def use_packed_rows(model: Any, config: TrainerConfig, device: torch.device) -> bool:
    """Whether `model`, which lies whole and in float32 anywhere, is to get packed rows on `device`; if so, it takes nothing else from now on.

    Raises: `ConfigError` where `trainer.packing` is on, and the model gives other logprobs for packed rows.
    """
    if config.packing == "off" or (config.packing == "auto" and (device.type != "cuda" or config.dtype != "bfloat16")):
        return False
    before = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    why = _why_not(model, config, device)
    if not why:
        return True
    if model.config._attn_implementation != before:  # noqa: SLF001
        model.set_attn_implementation(before)
    if config.packing == "on":
        raise ConfigError(f"trainer.packing on: {type(model).__name__} does not train on packed rows ({why}); set it to off")
    _LOG.info("rows are padded, not packed: %s", why)
    return False


def packed_inputs(part: PackedBatch, device: torch.device) -> dict[str, Any]:
    """For a model that uses packed rows: its logits are [1, N, V], those that predict the N tokens of the loss."""
    arrays = {"input_ids": part.input_ids, "position_ids": part.position_ids, "logits_to_keep": part.logit_index}
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()} | {
        "attention_mask": None,
        "sequences": sequences_at(part.cu_seqlens, device),
        "use_cache": False,
    }


def quadratic_cost(model: Any) -> float:
    """`consumer.packing.attention_cost` of this model."""
    settings = model.config.get_text_config()
    tied = settings.tie_word_embeddings and model.get_output_embeddings() is not None
    embedding = 0 if tied else model.get_input_embeddings().weight.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters()) - embedding
    heads, size, _ = _heads(settings)
    return attention_cost(parameters=parameters, layers=settings.num_hidden_layers, width=heads * size)


def _why_not(model: Any, config: TrainerConfig, device: torch.device) -> str:
    """Empty: it uses packed rows."""
    settings = model.config.get_text_config()
    kinds = set(getattr(settings, "layer_types", None) or ())
    if not kinds and getattr(settings, "sliding_window", None) is not None and getattr(settings, "use_sliding_window", True):
        kinds = {"sliding_attention"}  # a window longer than what is tried would not show
    if odd := sorted(kinds - {"full_attention"}):
        return f"it attends by {', '.join(odd)}"
    try:
        difference = _difference(model)
        if model.config._attn_implementation != ATTENTION:  # noqa: SLF001
            return "its attention cannot be replaced"
        if not difference < _TOLERANCE:
            return f"its predictions differ by {difference:.3g}"
        if device.type == "cuda" and config.dtype == "bfloat16":
            heads, size, kv_heads = _heads(settings)
            off = kernel_difference(device, heads=heads, kv_heads=kv_heads, size=size)
            if not off < _KERNEL_TOLERANCE:
                return f"the attention kernel of torch {torch.__version__} is off by {off:.3g}"
    except Exception as problem:  # noqa: BLE001 - models, kernels and transformers raise whatever they like
        return f"{type(problem).__name__}: {str(problem)[:300]}"
    return ""


@torch.no_grad()
def _difference(model: Any) -> float:
    """The greatest, of all logprobs or values, between rollouts in rows of their own and packed into one. Afterwards the model takes packed rows."""
    settings, place = model.config.get_text_config(), next(model.parameters()).device
    rng = np.random.default_rng(0)
    rollouts = [rng.integers(0, settings.vocab_size, length) for length in _LENGTHS]
    ids = [torch.from_numpy(one)[None].to(place) for one in rollouts]
    alone = [model(input_ids=one, logits_to_keep=torch.arange(one.shape[1], device=place), use_cache=False).logits[0] for one in ids]
    register()
    model.set_attn_implementation(ATTENTION)
    nothing, none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    row = PackedBatch(
        input_ids=np.concatenate(rollouts)[None],
        position_ids=np.concatenate([np.arange(length) for length in _LENGTHS])[None],
        cu_seqlens=np.array([0, *itertools.accumulate(_LENGTHS)], dtype=np.int32),
        max_seqlen=max(_LENGTHS),
        logit_index=np.arange(sum(_LENGTHS)),
        targets=nothing,
        behaviour=none,
        advantage=none,
        weight=none,
        rollout=nothing,
        age=nothing,
    )
    together: Tensor = model(**packed_inputs(row, place)).logits[0]
    return float((_told(torch.cat(alone)) - _told(together)).abs().max())


def _told(logits: Tensor) -> Tensor:
    """Logprobs; of a model of values, whose logits are one number a token, these."""
    return logits.float() if logits.shape[-1] == 1 else logits.float().log_softmax(-1)


def _heads(settings: Any) -> tuple[int, int, int]:
    """Heads, their size, key-value heads."""
    heads = int(settings.num_attention_heads)
    size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    return heads, int(size), int(getattr(settings, "num_key_value_heads", None) or heads)
