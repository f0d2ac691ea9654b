"""The mapping between Hugging Face names and megatron-core's, at any parallelism, and what of a model or a run is refused. No megatron-core here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.config import TrainerConfig
from consumer.megatron.architecture import Architecture, read_architecture
from consumer.megatron.config import MegatronConfig
from consumer.megatron.mapping import Cut, Parameter, buckets, unpack
from consumer.megatron.options import check_options
from protocol.errors import ConfigError

_REPOSITORY = Path(__file__).parents[3]
_MODEL = Architecture(
    layers=4,
    hidden=24,
    ffn=40,
    heads=8,
    groups=4,
    head_dim=6,
    vocab=32,
    positions=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_factor=None,
    qkv_bias=False,
    qk_norm=False,
    tied=False,
)
_KINDS = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


def _tensors(model: Architecture) -> dict[str, torch.Tensor]:
    """Of a whole model by Hugging Face name, as transformers shapes them, every number another."""
    q, kv = model.heads * model.head_dim, model.groups * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab, model.hidden), "model.norm.weight": (model.hidden,)}
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    for layer in range(model.layers):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}input_layernorm.weight": (model.hidden,), f"{name}post_attention_layernorm.weight": (model.hidden,)}
        shapes |= {f"{name}self_attn.{one}_proj.weight": (rows, model.hidden) for one, rows in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {f"{name}self_attn.o_proj.weight": (model.hidden, q), f"{name}mlp.down_proj.weight": (model.hidden, model.ffn)}
        shapes |= {f"{name}mlp.{one}_proj.weight": (model.ffn, model.hidden) for one in ("gate", "up")}
        if model.qkv_bias:
            shapes |= {f"{name}self_attn.{one}_proj.bias": (rows,) for one, rows in (("q", q), ("k", kv), ("v", kv))}
        if model.qk_norm:
            shapes |= {f"{name}self_attn.{one}_norm.weight": (model.head_dim,) for one in "qk"}
    total = 0.0
    found = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        found[name] = (torch.arange(count) + total).reshape(shape)
        total += count
    return found


def part(cut: Cut, one: Parameter, tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    """A rank's, of whole tensors."""
    places = [cut.slab(one, tuple(tensor.shape), rank) for tensor in tensors]
    return cut.joined(one, [tensor[tuple(slice(at, at + n) for at, n in zip(*place, strict=True))] for tensor, place in zip(tensors, places, strict=True)])


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", _KINDS)
def test_there_and_back_is_exact(kind: str, tied: bool, tp: int, pp: int):
    model = dataclasses.replace(_MODEL, tied=tied, **_KINDS[kind])
    tensors, cut = _tensors(model), Cut(model=model, tp=tp, pp=pp)
    back: dict[str, torch.Tensor] = {}
    for stage in range(pp):
        for one in cut.stage(stage).values():
            parts = [part(cut, one, [tensors[name] for name in one.names], rank) for rank in range(tp)]
            assert {tuple(part.shape) for part in parts} == {one.shape}
            for rank, own in enumerate(parts):
                for name, slab in cut.apart(one, [own]):  # what a rank writes of a checkpoint
                    start, size = cut.slab(one, tuple(tensors[name].shape), rank)
                    assert torch.equal(slab, tensors[name][tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))])
            if not one.copy:
                for name, tensor in cut.apart(one, parts):
                    assert name not in back
                    back[name] = tensor
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


def test_a_key_value_head_keeps_its_own_queries_together_and_a_rank_its_gates_before_its_ups():
    """Worked by hand: 2 key-value heads of 2 queries each, heads of 1 row."""
    model = dataclasses.replace(_MODEL, heads=4, groups=2, head_dim=1, hidden=1, ffn=4)
    cut = Cut(model=model, tp=2)
    stage = cut.stage(0)
    q, k, v = (torch.tensor(rows)[:, None] for rows in ([1, 2, 3, 4], [5, 6], [7, 8]))
    qkv = [part(cut, stage["decoder.layers.0.self_attention.linear_qkv.weight"], [q, k, v], rank)[:, 0].tolist() for rank in range(2)]
    assert qkv == [[1, 2, 5, 7], [3, 4, 6, 8]]
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    fc1 = [part(cut, stage["decoder.layers.0.mlp.linear_fc1.weight"], [gate, up], rank)[:, 0].tolist() for rank in range(2)]
    assert fc1 == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_only_the_last_of_several_stages_has_a_copy_of_tied_weights():
    cut = Cut(model=dataclasses.replace(_MODEL, tied=True), tp=2, pp=2)
    first, last = cut.stage(0), cut.stage(1)
    assert "output_layer.weight" not in first
    assert last["output_layer.weight"].copy
    assert last["output_layer.weight"].names == ("model.embed_tokens.weight",)
    assert "output_layer.weight" not in Cut(model=dataclasses.replace(_MODEL, tied=True)).stage(0)


def test_another_models_tensor_is_refused():
    cut = Cut(model=_MODEL)
    one = cut.stage(0)["decoder.layers.0.self_attention.linear_proj.weight"]
    with pytest.raises(ValueError, match=r"o_proj\.weight: shape \[\[24, 42\]\] does not fit"):
        part(cut, one, [torch.zeros(24, 42)], 0)


def test_a_bucket_holds_no_more_than_it_may_and_nothing_is_left_out():
    parameters = Cut(model=_MODEL, tp=2).stage(0)
    found = list(buckets(parameters, 4, 20_000, 2))
    assert [name for names in found for name in names] == list(parameters)
    sizes = [sum(8 * torch.Size(parameters[name].shape).numel() for name in names) for names in found]
    assert len(found) > 3
    assert all(size <= 20_000 or len(names) == 1 for size, names in zip(sizes, found, strict=True))
    views = unpack(torch.arange(11), [(2, 3), (5,)])
    assert [view.tolist() for view in views] == [[[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9, 10]]


# -- what is refused -------------------------------------------------------------------------------------------------------------------------------

_LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
_YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
_OTHER_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 2.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_moe"}, "does not support mixtures of experts (qwen3_moe), nor expert parallelism"),
        ({"model_type": "mixtral"}, "does not support mixtures of experts (mixtral)"),
        ({"model_type": "gemma2"}, "supports llama, qwen2, qwen3, not gemma2"),
        (_LLAMA | {"attention_bias": True}, "biases of projections"),
        (_LLAMA | {"mlp_bias": True}, "biases of projections"),
        (_LLAMA | {"hidden_act": "gelu"}, "the activation silu, not gelu"),
        (_LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window attention"),
        (_LLAMA | {"rope_parameters": _YARN}, "not rope_type yarn"),
        (_LLAMA | {"rope_parameters": _OTHER_LLAMA3, "max_position_embeddings": 16384}, "Llama 3's rope scaling with"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(tmp_path: Path, config: dict[str, Any], words: str):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as problem:
        read_architecture(tmp_path)
    assert str(problem.value).startswith(f"model.path {tmp_path}: trainer.backend megatron ")
    assert words in str(problem.value)
    assert str(problem.value).endswith("use another model, or trainer.backend torch")


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"tp": 3}, "8 attention heads"), ({"tp": 8}, "4 key-value heads"), ({"pp": 3}, "4 layers cannot be cut evenly"), ({"tp": 4, "pp": 4}, "")],
)
def test_what_cannot_be_cut_evenly_is_refused(layout: dict[str, int], words: str):
    if not words:
        _MODEL.check_layout(MegatronConfig(**layout))
        return
    with pytest.raises(ConfigError, match=words):
        _MODEL.check_layout(MegatronConfig(**layout))


def test_vocabularies_are_not_padded():
    with pytest.raises(ConfigError, match="33 vocabulary entries"):
        dataclasses.replace(_MODEL, vocab=33).check_layout(MegatronConfig(tp=2))


@pytest.mark.parametrize(
    ("options", "shared", "words"),
    [
        ({"head_float32": True}, False, "trainer.head_float32"),
        ({"activation_checkpointing": True}, False, 'megatron.recompute = "full"'),
        ({"cpu_offload": True}, False, "trainer.cpu_offload"),
        ({}, True, "placement.layout colocated"),
    ],
)
def test_an_option_that_only_other_backends_know_is_refused(options: dict[str, Any], shared: bool, words: str):
    with pytest.raises(ConfigError, match=words):
        check_options(TrainerConfig(backend="megatron", **options), shared=shared)
    check_options(TrainerConfig(backend="megatron"), shared=False)


def test_the_layout_is_filled_by_its_ranks():
    assert MegatronConfig(tp=2, pp=2).data_parallel(8) == 2
    with pytest.raises(ValueError, match=r"6 ranks with megatron\.tp 2 and megatron\.pp 2: use a multiple of 4 ranks"):
        MegatronConfig(tp=2, pp=2).data_parallel(6)
    with pytest.raises(ValueError, match="sp with tp 1"):
        MegatronConfig(sp=True)


def test_the_section_is_read_without_torch_or_megatron_core():
    code = "import sys, consumer.megatron.config, consumer.megatron.options; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, text=True, check=True).stdout == "[]\n"
