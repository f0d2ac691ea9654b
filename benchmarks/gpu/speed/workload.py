"""What is trained on: random Qwen3 models, rollouts of ragged length, and how many operations they cost."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buffer.contract import StepRecord
from consumer.advantages import group_std
from consumer.batch import ChunkBatch, collate
from protocol.messages import Attempt, GroupHeader, Rollout, RolloutGroup, Seq, SlotToken, Span
from protocol.versions import Fork, Lineage, Version

PEAK_FLOPS = 989e12
"""A second, of an H200 in dense bfloat16."""
SHAPES: dict[str, dict[str, Any]] = {
    # Those of Qwen3-1.7B.
    "1b": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
HEAD_SIZE = {"1b": 128, "tiny": 16}
_FIRST = Version(1, 0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a step."""

    model: str
    micro_batch: int
    groups: int
    group_size: int
    prompt: tuple[int, int]
    """Fewest and most tokens."""
    response: tuple[int, int]
    rounds: int
    warm_up: int


SIZES = {
    "1b": Sizes(model="1b", micro_batch=8192, groups=4, group_size=8, prompt=(100, 400), response=(200, 1600), rounds=5, warm_up=2),
    "tiny": Sizes(model="tiny", micro_batch=256, groups=3, group_size=4, prompt=(4, 12), response=(1, 60), rounds=2, warm_up=1),
}


def tell(row: str, **figures: Any) -> None:
    """A result, for whoever started this process."""
    sys.stdout.write(json.dumps({"row": row, **figures}) + "\n")
    sys.stdout.flush()


def model_folder(size: str) -> Path:
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))
    return root / f"speed-{os.getuid()}" / f"qwen3-{size}"


def save_model(size: str, device: str) -> int:
    """Random weights, embeddings tied, in bfloat16; once on a machine. Its parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from benchmarks.weights.random_model import tokenizer

    folder = model_folder(size)
    config = Qwen3Config(**SHAPES[size], head_dim=HEAD_SIZE[size], tie_word_embeddings=True, max_position_embeddings=4096)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta" if folder.exists() else device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        model.save_pretrained(new, max_shard_size="4GB")
        tokenizer().save_pretrained(new)
        new.rename(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def group_of(seq: int, sizes: Sizes, *, version: Version = _FIRST) -> RolloutGroup:
    """A function of `seq`. Behaviour logprobs are about those of a model that knows nothing."""
    rng = np.random.default_rng(seq)
    vocabulary = int(SHAPES[sizes.model]["vocab_size"])
    prompt = rng.integers(0, vocabulary, rng.integers(*sizes.prompt, endpoint=True))
    rollouts = []
    for _ in range(sizes.group_size):
        response = rng.integers(0, vocabulary, rng.integers(*sizes.response, endpoint=True))
        tokens = np.concatenate([prompt, response]).astype(np.int32)
        mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
        logprobs = np.where(mask, -np.log(vocabulary) + rng.normal(0, 0.3, len(tokens)), 0).astype(np.float32)
        span = Span(version=version, start=len(prompt), end=len(tokens))
        rollouts.append(Rollout(tokens=tokens, mask=mask, logprobs=logprobs, spans=(span,), reward=float(rng.random())))
    return RolloutGroup(rollouts=tuple(rollouts))


def header_of(group: RolloutGroup, *, seq: int, attempt: int = 1, token: str = "t", payload_bytes: int = 0, payload_digest: str = "") -> GroupHeader:
    sampled = tuple(int(rollout.mask.sum()) for rollout in group.rollouts)
    version = group.rollouts[0].spans[0].version
    return GroupHeader(
        seq=Seq(seq),
        attempt=Attempt(attempt),
        token=SlotToken(token),
        prompt_id=str(seq),
        producer_id="speed",
        group_size=len(group.rollouts),
        lengths=tuple(len(rollout.tokens) for rollout in group.rollouts),
        sampled=sampled,
        trainable={version: sum(sampled)},
        oldest=version,
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        payload_bytes=payload_bytes,
        payload_digest=payload_digest,
    )


def chunk_of(seqs: Sequence[int], sizes: Sizes) -> ChunkBatch:
    record = StepRecord(step=1, incarnation=1, groups=len(seqs), chunk=len(seqs), guard="mask", cutoff=-8, lineage=Lineage({1: Fork(0, 0)}, head=1))
    groups = [group_of(seq, sizes) for seq in seqs]
    return collate(record, [(header_of(group, seq=seq), group) for seq, group in zip(seqs, groups, strict=True)], group_std)


def operations(size: str, lengths: Sequence[int], targets: int) -> float:
    """Of a forward and backward of sequences of these lengths, with logits for `targets` tokens: what the model asks for, recomputing left out.

    2 for each parameter and token in a forward, 4 * width for each layer and pair of a query and a key it sees, n (n + 1) / 2 of n tokens; backward twice that.
    The embedding is looked up, not multiplied; the head counts where its logits are asked for.
    """
    shape = SHAPES[size]
    hidden, layers, head = shape["hidden_size"], shape["num_hidden_layers"], HEAD_SIZE[size]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * shape["intermediate_size"]
    dense = 2 * layers * layer * sum(lengths) + 2 * hidden * shape["vocab_size"] * targets
    attention = 4 * queries * layers * sum(n * (n + 1) // 2 for n in lengths)
    return 3.0 * (dense + attention)


def main(_: str, size: str, device: str) -> None:
    """Row `model`: the folder that all other rows read."""
    tell("model", parameters=save_model(size, device), shape=SHAPES[size])
