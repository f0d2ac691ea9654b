"""The demo's starting model: a Qwen3 of 75 thousand parameters after a short supervised warm start.

    python -m deploy.demo.warm_start FOLDER --seed N

writes config.json, generation_config.json, model.safetensors (float32) and the tokenizer. Held-out problems are never seen.
Without it most samples earn nothing, and reinforcement learning has nothing to prefer. It is kept short on purpose: after 16 steps the sampled reward is about
0.09 and a greedy answer is right in about a third of the cases (measured, four seeds); a hundred steps would leave nothing to learn.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo import task, tokenizer

if TYPE_CHECKING:
    from torch import Tensor

STEPS = 16
BATCH = 64
LEARNING_RATE = 3e-3


def warm_start(folder: Path, seed: int, *, steps: int = STEPS) -> float:
    """Make, train and save the model; the last supervised loss in nats per token. The same for the same seed."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    order = random.Random(f"warm start:{seed}")
    train = task.problems(seed).train
    encode = tokenizer.build()
    loss = torch.zeros(())
    for _ in range(steps):
        loss = _supervised_loss(model, [_sequence(encode, problem) for problem in order.choices(train, k=BATCH)])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return float(loss.detach())


def new_model() -> Any:
    """A Qwen3 for the demo's alphabet with random weights; seeded by torch's generator."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    special: dict[str, Any] = {"pad_token_id": tokenizer.PAD, "bos_token_id": tokenizer.BOS, "eos_token_id": tokenizer.EOS}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer.SPECIAL) + len(tokenizer.ALPHABET),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            dtype="float32",
            **special,
        )
    )
    model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call, unused-ignore]
    return model


def _sequence(encode: Any, problem: str) -> list[int]:
    return [*encode.encode(task.prompt(problem) + task.answer(problem)).ids, tokenizer.EOS]


def _supervised_loss(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Mean cross entropy over the answer and its end token. Shapes: sequences [B, T], all equally long."""
    import torch
    from torch.nn import functional

    ids = torch.tensor(sequences)
    answer = task.DIGITS + 1
    logits = model(input_ids=ids[:, :-1]).logits[:, -answer:]
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, -answer:].reshape(-1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="warm_start", description="Make the demo's starting model.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    loss = warm_start(options.folder, options.seed)
    sys.stdout.write(f"warm start: {STEPS} steps of {BATCH} problems, loss {loss:.2f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
