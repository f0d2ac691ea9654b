"""What the processes of these tests share: tiny models, rollouts that one of them sampled, and the jobs that are run on both."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from buffer.contract import StepRecord
from consumer.advantages import group_std
from consumer.batch import ChunkBatch, collate
from consumer.losses.config import LossConfig
from protocol.groups import TEACHER_LOGPROBS
from protocol.messages import RolloutGroup
from protocol.versions import Fork, Lineage
from tests.consumer.conftest import Sampler

STEPS, CHUNKS, GROUPS = 3, 2, 3
"""Of a recording: each chunk has so many groups."""
VOCAB = 32
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
_LONG = {"max_position_embeddings": 16384}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**(_SIZES | _LONG), tie_word_embeddings=True, rope_parameters=_LLAMA3)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, tie_word_embeddings=False)),
    "qwen2-tied": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False)),
    "qwen3-tied": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True)),
}
RECORDED = ("llama", "qwen2-tied", "qwen3-tied")
LOSSES = {
    "ppo_clip": LossConfig(),
    "all": LossConfig(kind="trust_region", kl_coef=0.05, entropy_coef=0.01, normaliser="rollout_mean", lr_by_ess=True),
    "distillation": LossConfig(kind="distillation", normaliser="rollout_mean", ratio_cap=1.1),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something that all ranks of one process group do with one model; what rank 0 found lies in `<name>.pt`."""

    name: str
    model: str
    ranks: int
    what: str = "look"
    """look: the weights as they come back, and logits. train: a recording, step by step."""
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    loss: str = "ppo_clip"


def save_models(folder: Path) -> None:
    """With weights of which none is 0 or 1, so that a bias or a norm in the wrong place is seen."""
    for seed, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model.save_pretrained(folder / name)


def save_recording(folder: Path, model: str) -> None:
    """Groups that the model itself sampled, an engine that computes a little differently, and a teacher that differs more."""
    sampler, rng = Sampler(folder / model), np.random.default_rng(7)
    groups = [sampler.headed(seq, max_new=5 + seq % 4) for seq in range(STEPS * CHUNKS * GROUPS)]
    noisy = [(header, _with_noise(group, rng)) for header, group in groups]
    (folder / f"{model}.groups").write_bytes(pickle.dumps(noisy))


def _with_noise(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    rollouts = []
    for one in group.rollouts:
        noise = rng.normal(0, 0.1, len(one.logprobs)).astype(np.float32)
        rollouts.append(dataclasses.replace(one, logprobs=np.where(one.mask > 0, np.minimum(one.logprobs + noise, 0), one.logprobs).astype(np.float32)))
    logprobs = np.concatenate([one.logprobs for one in group.rollouts])
    scores = np.minimum(logprobs + rng.normal(-0.5, 0.7, len(logprobs)), 0).astype(np.float32)
    return RolloutGroup(rollouts=tuple(rollouts), extras={TEACHER_LOGPROBS: scores})


def recorded_steps(folder: Path, model: str, loss: LossConfig, share: tuple[int, int]) -> list[tuple[list[ChunkBatch], float]]:
    """Of every step the chunks, as this share of the ranks has them, and the divisor of all shares."""
    groups = pickle.loads((folder / f"{model}.groups").read_bytes())
    rank, ranks = share
    steps = []
    for step in range(1, STEPS + 1):
        record = StepRecord(
            step=step, incarnation=1, groups=CHUNKS * GROUPS, chunk=GROUPS, guard="mask", cutoff=step - 9, lineage=Lineage({1: Fork(0, 0)}, head=1)
        )
        mine, divisor = [], 0.0
        for chunk in range(CHUNKS):
            start = ((step - 1) * CHUNKS + chunk) * GROUPS
            chosen = groups[start : start + GROUPS]
            divisor += collate(record, chosen, group_std, normaliser=loss.normaliser).divisor
            mine.append(collate(record, chosen[rank::ranks], group_std, normaliser=loss.normaliser))
        steps.append((mine, divisor))
    return steps


def rows() -> list[list[int]]:
    """Three sequences of token ids, of different lengths, one long enough for scaled rotary positions to show."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, length).tolist() for length in (5, 61, 12)]


def sampled_logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, V] logits of all sizes, some of them -inf; [N] targets; [2, N] gradients of their logprobs and entropies."""
    rng = torch.Generator().manual_seed(5)
    logits = torch.randn(9, VOCAB, generator=rng) * torch.tensor([0.0, 0.1, 1, 3, 10, 30, 100, 1, 1])[:, None]
    logits[7] += 1e4
    logits[8, ::2] = -torch.inf
    return logits, torch.tensor([0, 31, 15, 16, 5, 30, 17, 3, 1]), torch.randn(2, 9, generator=rng)
