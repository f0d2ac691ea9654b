"""Tiny models made on the spot, and an engine that serves one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
import pytest_asyncio
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from producer.engine.embedded.model import SlotModel, load
from producer.engine.embedded.server import EmbeddedEngine

from .hosting import run  # noqa: F401 - a fixture

CONTEXT = 512
EOS = 2
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
}
StartEngine: TypeAlias = Callable[..., AbstractAsyncContextManager[EmbeddedEngine]]


def write_model(folder: Path, *, seed: int, family: str = "qwen3", **overrides: Any) -> Path:
    """A causal LM of hidden size 32 with a character tokenizer. Its weights are large, so that its logits are far from flat."""
    characters = {"<pad>": 0, "<bos>": 1, "<eos>": EOS, "<unk>": 3} | {c: i for i, c in enumerate("0123456789+-*=>, ", 4)}
    raw = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    config_class, model_class, extra = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": len(characters),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model_class(config_class(**(settings | extra | overrides))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def full_logprobs(model: torch.nn.Module, ids: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """[T, V]: what the model itself gives for the token after each position, in one forward pass."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float() / temperature, dim=-1)


def written_logprobs(model: torch.nn.Module, prompt: list[int], output: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """[N]: the logprob of each output token by one forward pass."""
    rows = full_logprobs(model, prompt + output, temperature=temperature)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output)[:, None])[:, 0]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "a", seed=1)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "b", seed=2)


@pytest.fixture
def served(model_a: Path) -> SlotModel:
    return load(str(model_a), slots=8)


@pytest.fixture
def start_engine(model_a: Path) -> StartEngine:
    """`async with start_engine(slots=4) as engine`; the model is `model_a` unless told otherwise."""

    @contextlib.asynccontextmanager
    async def start(*, path: Path = model_a, slots: int = 8, **options: Any) -> AsyncIterator[EmbeddedEngine]:
        async with EmbeddedEngine(load(str(path), slots=slots), **({"weight_version": "1:0", "seed": 1} | options)) as engine:
            yield engine

    return start


@pytest_asyncio.fixture
async def engine(start_engine: StartEngine) -> AsyncIterator[EmbeddedEngine]:
    async with start_engine() as running:
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened
