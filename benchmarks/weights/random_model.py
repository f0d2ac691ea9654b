"""Random Qwen3 models in bfloat16, made on the device in seconds, with a tokenizer of their own.

About 0.75 and 7 billion parameters for GPUs (`small`, `large`), 45 million for CPUs (`cpu`), and `tiny` for a trial.
Input and output embeddings are not tied, so every tensor is published under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "heads": (4, 2), "head_dim": 32},
    "cpu": {"vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "heads": (8, 4), "head_dim": 64},
    "small": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "heads": (16, 8), "head_dim": 128},
    "large": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 30, "heads": (32, 8), "head_dim": 128},
}
STD = 0.04
"""Of matrices: large enough that two random models disagree by nats on every token."""


def config(size: str) -> Qwen3Config:
    shape = dict(_SHAPES[size])
    heads, kv_heads = shape.pop("heads")
    return Qwen3Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fresh matrices; norms stay at one."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, STD, generator=generator)


def build(size: str, device: str, seed: int) -> Qwen3ForCausalLM:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config(size))
    finally:
        torch.set_default_dtype(torch.float32)
    randomise(model, seed)
    return model.eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges: enough for a server to start with."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|pad|>"]
    bpe.train_from_iterator(
        ["weights move while engines serve " * 20],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[1], pad_token=special[2])


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """As a model folder that servers start from."""
    model.save_pretrained(folder, max_shard_size="4GB")
    tokenizer().save_pretrained(folder)


def vocabulary(size: str) -> int:
    found = _SHAPES[size]["vocab_size"]
    return int(found)
