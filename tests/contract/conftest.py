"""The contract of engines: what the project asks of SGLang, checked word for word on the embedded engine and on the real one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from producer.engine.client import open_session

from .engine import Engine
from .served import ADAPTED, CONTEXT, GUARDED, PLAIN, RealServers, Setup, embedded

VOCABULARY = 320
"""A little more than the tokenizer has, as real models do."""
EOS = 2
Serve: TypeAlias = Callable[[], AbstractAsyncContextManager[Engine]]
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.15}
"""Nats by which one logprob may be off from a forward pass of transformers in float32."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test here that uses a real server waits for its start. `items` are those of all folders."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1200 if item.get_closest_marker("sglang") else 400))


def write_model(folder: Path, seed: int) -> Path:
    """A causal LM with a byte-level tokenizer, so that characters are cut; its logits are far from flat."""
    raw = Tokenizer(tokenizer_models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>", "<|start|>", "<|stop|>", "<|pad|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 4, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog 0123456789 what is 2+2? answer: 4 " * 20], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|stop|>", pad_token="<|pad|>", bos_token="<|start|>")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 3}
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, tie_word_embeddings=False, initializer_range=0.2, **shape, **ids)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Models:
    """Two models of one shape, as folders, and what each of them says itself."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = write_model(folder / "a", 1), write_model(folder / "b", 2)
        self._own = {path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (self.a, self.b)}
        self.tokenizer = Tokenizer.from_file(str(self.a / "tokenizer.json"))

    def logprobs(self, path: Path, prompt: list[int], output: list[int], *, temperature: float = 1.0) -> torch.Tensor:
        """[N, V] of every output position, by one forward pass."""
        with torch.no_grad():
            logits = self._own[path](input_ids=torch.tensor([prompt + output])).logits[0].float()
        return torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]

    def written(self, path: Path, prompt: list[int], output: list[int], *, temperature: float = 1.0) -> torch.Tensor:
        """[N]: of the tokens that were written."""
        return self.logprobs(path, prompt, output, temperature=temperature).gather(1, torch.tensor(output)[:, None])[:, 0]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="session")
def real(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServers]:
    servers = RealServers(models.a, tmp_path_factory.mktemp("sglang") / "sglang.log")
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _serve(kind: str, setup: Setup, request: pytest.FixtureRequest, models: Models) -> Serve:
    real: RealServers | None = request.getfixturevalue("real") if kind == "sglang" else None
    if real is not None:
        real.url(setup)  # here, not in the first test: what it holds open is nobody's leak

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[Engine]:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            url = real.url(setup) if real is not None else await stack.enter_async_context(embedded(models.a, setup))
            engine = Engine(session, url, setup)
            await engine.start_over(str(models.a))
            yield engine

    return serve


@pytest.fixture(scope="session")
def plain(kind: str, request: pytest.FixtureRequest, models: Models) -> Serve:
    return _serve(kind, PLAIN, request, models)


@pytest.fixture(scope="session")
def guarded(kind: str, request: pytest.FixtureRequest, models: Models) -> Serve:
    """Used by one file only, near the last: another setup is another start."""
    return _serve(kind, GUARDED, request, models)


@pytest.fixture(scope="session")
def adapted(kind: str, request: pytest.FixtureRequest, models: Models) -> Serve:
    """Used by one file only, the last."""
    return _serve(kind, ADAPTED, request, models)


@pytest_asyncio.fixture
async def engine(plain: Serve) -> AsyncIterator[Engine]:
    async with plain() as served:
        yield served


@pytest.fixture
def tolerance(engine: Engine) -> float:
    return TOLERANCE[engine.setup.dtype]
