"""A dense GPT of megatron-core with a layer specification of our own: torch's RMSNorm, and attention over packed sequences. No Transformer Engine, no apex.

A packed input is one row [1, T] of sequences end to end; `packed` tells megatron-core where they lie, and each gets the positions it would have alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional

from consumer.megatron.architecture import Architecture
from consumer.megatron.config import MegatronConfig
from consumer.megatron.grid import Grid
from consumer.packed_attention import Sequences, attend


def make_model(architecture: Architecture, layout: MegatronConfig, grid: Grid, dtype: torch.dtype) -> Any:
    """The stage of this rank, on the current device, its weights not filled yet."""
    config = _config(architecture, layout, dtype)
    layers = [_layer(architecture)] * (architecture.layers // layout.pp)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        vocab_size=architecture.vocab,
        max_sequence_length=architecture.positions,
        pre_process=grid.pp_rank == 0,
        post_process=grid.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        rope_scaling=architecture.rope_factor is not None,
        rope_scaling_factor=architecture.rope_factor or 1.0,
    )


def packed(lengths: Sequence[int], device: torch.device) -> Any:
    """Where sequences of these lengths lie that follow each other."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    there = ends.to(device, non_blocking=True)
    # megatron-core's rotary positions read the padded ones, once a layer, as Python numbers: these stay in host memory.
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=there,
        cu_seqlens_kv=there,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


class Norm(nn.RMSNorm):
    """RMSNorm under any parallelism: under sequence parallelism each rank has the gradient of its part of the sequence, which megatron-core then adds up."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(nn.Module):
    """Causal attention within each packed sequence: torch's variable-length kernel on a GPU in half precision, SDPA a sequence at a time elsewhere."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: object) -> None:
        super().__init__()
        assert config.context_parallel_size == 1
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: object,
    ) -> Tensor:
        """Shapes: query [T, heads, d], key and value [T, key-value heads, d]; result [T, heads d]."""
        assert attention_mask is None
        assert attention_bias is None
        lengths = tuple(packed_seq_params.cu_seqlens_q_padded.diff().tolist())
        return attend(query, key, value, Sequences(ends=packed_seq_params.cu_seqlens_q, lengths=lengths), scale=self._scale).flatten(1)


def _layer(architecture: Architecture) -> ModuleSpec:
    qk_norm = Norm if architecture.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=PackedAttention, linear_proj=RowParallelLinear, q_layernorm=qk_norm, k_layernorm=qk_norm
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _config(architecture: Architecture, layout: MegatronConfig, dtype: torch.dtype) -> Any:
    """Without dropout: the ratio compares the model with an engine that has none. No fusion that needs apex or Transformer Engine."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if layout.recompute == "full" else {}
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.ffn,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.groups,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=architecture.norm_eps,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sp,
        variable_seq_lengths=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - of no meaning in a dense model, but the default refuses sequences of all lengths
        **recompute,
    )
