"""What of a Hugging Face configuration megatron-core must know, and what is refused because it would be computed differently. No megatron-core here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from consumer.megatron.config import MegatronConfig
from protocol.errors import ConfigError

DENSE = ("llama", "qwen2", "qwen3")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""megatron-core has these built in; only the factor may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder with rotary positions, RMSNorm and a gated SiLU."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    vocab: int
    positions: int
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Of Llama 3's frequency scaling; None: none."""
    qkv_bias: bool
    qk_norm: bool
    tied: bool

    def check_layout(self, layout: MegatronConfig) -> None:
        """Raises: `ConfigError` where the model cannot be cut as `layout` says."""
        for what, size in (("attention heads", self.heads), ("key-value heads", self.groups), ("MLP columns", self.ffn), ("vocabulary entries", self.vocab)):
            if size % layout.tp:
                raise ConfigError(f"megatron.tp {layout.tp}: the model's {size} {what} cannot be shared evenly; choose a divisor of {size}")
        if self.layers % layout.pp:
            raise ConfigError(f"megatron.pp {layout.pp}: the model's {self.layers} layers cannot be cut evenly; choose a divisor of {self.layers}")


def read_architecture(folder: Path) -> Architecture:
    """Raises: `ConfigError` for what this backend would compute otherwise than transformers does, or not at all."""
    try:
        found: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # transformers raises whatever the configuration's code raises
        raise ConfigError(f"model.path {folder}: config.json cannot be used ({type(problem).__name__}: {str(problem)[:300]})") from problem
    if reason := _refusal(found):
        raise ConfigError(f"model.path {folder}: trainer.backend megatron {reason}; use another model, or trainer.backend torch")
    rope = dict(found.rope_parameters or {})
    return Architecture(
        layers=found.num_hidden_layers,
        hidden=found.hidden_size,
        ffn=found.intermediate_size,
        heads=found.num_attention_heads,
        groups=found.num_key_value_heads,
        head_dim=getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads,
        vocab=found.vocab_size,
        positions=found.max_position_embeddings,
        norm_eps=found.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_factor=float(rope["factor"]) if rope.get("rope_type") == "llama3" else None,
        qkv_bias=found.model_type == "qwen2",
        qk_norm=found.model_type == "qwen3",
        tied=bool(found.tie_word_embeddings),
    )


def _refusal(found: Any) -> str:
    """Why not, as the end of a sentence; empty: nothing speaks against it."""
    kind, rope = found.model_type, dict(getattr(found, "rope_parameters", None) or {})
    scaling = rope.get("rope_type", "default")
    reasons = {
        f"does not support mixtures of experts ({kind}), nor expert parallelism": "moe" in kind or any(getattr(found, name, None) for name in _EXPERTS),
        f"supports {', '.join(DENSE)}, not {kind}": kind not in DENSE,
        "does not support biases of projections other than Qwen2's": getattr(found, "attention_bias", False) or getattr(found, "mlp_bias", False),
        f"supports the activation silu, not {getattr(found, 'hidden_act', '')}": getattr(found, "hidden_act", "") != "silu",
        "does not support sliding-window attention": "sliding_attention" in (getattr(found, "layer_types", None) or ()),
        f"supports rotary positions as trained or scaled as in Llama 3, not rope_type {scaling}": scaling not in {"default", "llama3"},
        "does not support rotary positions of a part of a head": float(rope.get("partial_rotary_factor", 1.0)) != 1.0,
        f"supports Llama 3's rope scaling with {_LLAMA3_ROPE} only": scaling == "llama3" and any(rope.get(key) != value for key, value in _LLAMA3_ROPE.items()),
    }
    return next((reason for reason, refused in reasons.items() if refused), "")
