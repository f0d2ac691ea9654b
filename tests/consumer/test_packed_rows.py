"""Packed rows against padded ones through the backend: the same logprobs, gradients and steps, for each architecture that is named as supported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import group_mean
from consumer.batch import ChunkBatch, collate
from consumer.config import TrainerConfig
from consumer.losses import LossConfig
from consumer.packed_attention import Sequences, attend, kernel_difference
from consumer.packing import PackedBatch, empty_packed_batch
from consumer.torch_backend import TorchBackend
from protocol.errors import ConfigError
from protocol.messages import GroupHeader
from tests.consumer.test_batch import random_group

Record = Callable[..., StepRecord]
VOCAB = 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=16)),
    "windowed": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=8)),
    "absolute": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
    "softcapped": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_SIZES, head_dim=16, layer_types=["full_attention"] * 2)),
    "recurrent": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)),
}
NAMED = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        if not (made / name).exists():
            torch.manual_seed(0)
            MODELS[name]().save_pretrained(made / name)
        return made / name

    return find


def backend_of(path: Path, packing: str, **settings: Any) -> TorchBackend:
    config = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 0, "packing": packing, "micro_batch_tokens": 48} | settings))
    return TorchBackend(path, config, loss=LossConfig(kl_coef=0.1, entropy_coef=0.01), temperature=0.7, seed=3)


@pytest.fixture
def batch(make_record: Record, header_of: Callable[..., GroupHeader]) -> ChunkBatch:
    """Ragged: responses of one token, rollouts of which nothing enters the loss, groups of one."""
    groups = [random_group(seq, header_of, size=(4, 1, 3)[seq % 3]) for seq in range(12)]
    return collate(make_record(step=6, bound=3), groups, group_mean, normaliser="rollout_mean")


def predicted(backend: TorchBackend, batch: ChunkBatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for part in backend._micro_batches(batch):
        assert isinstance(part, PackedBatch) is backend._packed
        with torch.no_grad():
            logprobs, entropies = backend._predicted(backend._model, part)
        fields = (part.targets, part.advantage, part.weight, part.behaviour, part.age)
        found += zip(*(field.tolist() for field in fields), logprobs.tolist(), entropies.tolist(), strict=True)
    return sorted(found)


@pytest.mark.parametrize("name", NAMED)
def test_packed_rows_train_as_padded_ones(folder: Callable[[str], Path], batch: ChunkBatch, name: str):
    padded, packed = backend_of(folder(name), "off"), backend_of(folder(name), "on")
    padded._share_prompts = False
    assert packed._packed
    found, expected = predicted(packed, batch), predicted(padded, batch)
    assert len(found) == batch.tokens > 48, "nothing is trimmed"
    np.testing.assert_allclose(found, expected, atol=2e-5)
    reports = []
    for backend in (padded, packed):
        backend.accumulate(batch)
        reports.append((backend, {key: p.grad.clone() for key, p in backend._parameters.items() if p.grad is not None}))
    (_, one), (_, other) = reports
    assert one.keys() == other.keys() == padded._parameters.keys()
    for key, gradient in one.items():
        torch.testing.assert_close(other[key], gradient, atol=2e-5 * float(gradient.abs().max()) + 1e-7, rtol=1e-4, msg=key)
    first, second = (backend.finish_step(1, batch.divisor) for backend in (padded, packed))
    assert (second.loss, second.grad_norm, second.entropy) == pytest.approx((first.loss, first.grad_norm, first.entropy), rel=1e-4)
    assert second.diagnostics == pytest.approx(dict(first.diagnostics), rel=1e-3, abs=1e-5)


def test_recomputed_layers_keep_rollouts_apart_too(folder: Callable[[str], Path], batch: ChunkBatch):
    plain, recomputing = (backend_of(folder("qwen3"), "on", activation_checkpointing=recompute) for recompute in (False, True))
    for backend in (plain, recomputing):
        backend.accumulate(batch)
    assert all(torch.equal(p.grad, recomputing._parameters[key].grad) for key, p in plain._parameters.items() if p.grad is not None)


@pytest.mark.parametrize(("name", "why"), [("windowed", "sliding_attention"), ("softcapped", "softcap"), ("recurrent", "")])
def test_a_model_that_packed_rows_would_change_is_refused_with_the_reason(folder: Callable[[str], Path], name: str, why: str, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match=rf"trainer\.packing on: .*{why}.*; set it to off"):
        backend_of(folder(name), "on")
    caplog.set_level(logging.INFO, "consumer.packed_rows")
    assert not backend_of(folder(name), "off")._packed
    assert not caplog.records


def test_padding_is_found_out_where_a_model_gives_other_logprobs(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    """An attention that sees the whole row, as one would that takes no notice of where rollouts begin."""

    def over_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, *, scale: float | None = None) -> torch.Tensor:
        return attend(query, key, value, Sequences(ends=sequences.ends, lengths=(sum(sequences.lengths),)), scale=scale)

    monkeypatch.setattr("consumer.packed_attention.attend", over_all)
    with pytest.raises(ConfigError, match=r"its predictions differ by \d"):
        backend_of(folder("qwen3"), "on")


def test_the_attention_is_causal_within_each_sequence_alone():
    rng = torch.Generator().manual_seed(0)
    lengths = (1, 5, 1, 9)
    query, key, value = (torch.randn((sum(lengths), heads, 8), generator=rng) for heads in (4, 2, 2))
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    seen = (owner[:, None] == owner) & torch.ones(16, 16).tril().bool()
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) * 0.3
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value.repeat_interleave(2, 1))
    ends = torch.tensor([0, 1, 6, 7, 16], dtype=torch.int32)
    torch.testing.assert_close(attend(query, key, value, Sequences(ends=ends, lengths=lengths), scale=0.3), expected)


def test_the_check_of_a_kernel_sees_no_difference_where_there_is_none():
    """On a CPU both ways are the same arithmetic, in bfloat16 and in float32."""
    assert 0 < kernel_difference(torch.device("cpu"), heads=4, kv_heads=2, size=16) < 0.02


def test_a_rank_without_rollouts_takes_part_with_an_empty_row(folder: Callable[[str], Path]):
    backend = backend_of(folder("qwen3"), "on")
    assert not backend._backward(empty_packed_batch()).sums.any()
    assert all(p.grad is not None and not p.grad.any() for p in backend._parameters.values())
