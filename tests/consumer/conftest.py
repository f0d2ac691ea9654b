"""A tiny random Qwen3 with its tokenizer, groups sampled by the model itself with true logprobs, and a producer that lives in the test."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from buffer.client import ProducerBuffer
from buffer.contract import StepRecord
from buffer.redis_ledger import RedisLedger
from consumer.config import TrainerConfig
from consumer.losses import LossConfig
from consumer.torch_backend import TorchBackend
from protocol.codec import digest, encode_group
from protocol.connection import Client
from protocol.errors import RunEnded, RunMissing
from protocol.keys import Keys
from protocol.messages import Attempt, EngineId, EngineState, EngineStatus, GroupHeader, Rollout, RolloutGroup, Seq, SlotToken, Span
from protocol.versions import Fork, Lineage, Version
from protocol.wakeups import Topic, wakeups
from weightsync.channel import Channel
from weightsync.registry import Registry

VOCAB = ["<pad>", "<bos>", "<eos>", *"0123456789>=+-"]
EOS = 2
FIRST = Version(1, 0)
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """A backend flushes denormal numbers in the thread that makes it; other tests want theirs."""
    yield
    torch.set_flush_denormal(False)


def save_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=1,
        initializer_range=0.3,
    )
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def untied_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "untied", tied=False)


@pytest.fixture(scope="session")
def sampler(model_path: Path) -> Sampler:
    return Sampler(model_path)


@pytest.fixture
def make_backend(model_path: Path) -> Callable[..., TorchBackend]:
    def make(path: Path | None = None, *, temperature: float = 1.0, loss: Mapping[str, Any] | None = None, **settings: Any) -> TorchBackend:
        config = TrainerConfig(**({"lr": 1e-2, "warmup_steps": 2} | settings))
        return TorchBackend(path or model_path, config, loss=LossConfig(**(loss or {})), temperature=temperature, seed=3)

    return make


@pytest.fixture
def make_record() -> Callable[..., StepRecord]:
    def make(step: int = 1, *, groups: int = 4, chunk: int = 2, bound: int = 8, guard: str = "mask") -> StepRecord:
        return StepRecord(step=step, incarnation=1, groups=groups, chunk=chunk, guard=guard, cutoff=step - 1 - bound, lineage=Lineage({1: Fork(0, 0)}, head=1))

    return make


class Sampler:
    """Samples from the model in `path`; everything is a function of `seq`, so two runs see the same groups."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._groups: dict[tuple[int, int, Version, int, float], RolloutGroup] = {}

    def group(self, seq: int, *, size: int = 4, version: Version = FIRST, max_new: int = 6, temperature: float = 1.0) -> RolloutGroup:
        asked = (seq, size, version, max_new, temperature)
        if asked not in self._groups:
            self._groups[asked] = self._sampled(*asked)
        return self._groups[asked]

    @torch.no_grad()
    def _sampled(self, seq: int, size: int, version: Version, max_new: int, temperature: float) -> RolloutGroup:
        rng = torch.Generator().manual_seed(1000 + seq)
        prompt = [1, *torch.randint(3, len(VOCAB), (2 + seq % 4,), generator=rng).tolist()]
        ids = torch.tensor([prompt] * size)
        done = torch.zeros(size, dtype=torch.bool)
        logprobs: list[torch.Tensor] = []
        lengths = torch.full((size,), len(prompt))
        for _ in range(max_new):
            log_pi = (self.model(input_ids=ids).logits[:, -1] / temperature).log_softmax(-1)
            token = torch.multinomial(log_pi.exp(), 1, generator=rng)
            logprobs.append(log_pi.gather(1, token)[:, 0])
            ids = torch.cat([ids, token], 1)
            lengths += ~done
            done |= token[:, 0] == EOS
        rollouts = []
        for i in range(size):
            tokens = ids[i, : lengths[i]].numpy().astype(np.int32)
            mask = (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)
            values = np.zeros(len(tokens), dtype=np.float32)
            values[len(prompt) :] = torch.stack(logprobs, 1)[i, : len(tokens) - len(prompt)].numpy()
            reward = float((tokens[len(prompt) :] % 3 == 0).mean())
            spans = (Span(version=version, start=len(prompt), end=len(tokens)),)
            rollouts.append(Rollout(tokens=tokens, mask=mask, logprobs=values, spans=spans, reward=reward))
        return RolloutGroup(rollouts=tuple(rollouts))

    def headed(self, seq: int, **options: Any) -> tuple[GroupHeader, RolloutGroup]:
        group = self.group(seq, **options)
        return header_of(group, seq=seq, attempt=1, token="t", payload=encode_group(group)), group


@pytest.fixture(name="header_of")
def _header_of() -> Callable[..., GroupHeader]:
    return header_of


def header_of(group: RolloutGroup, *, seq: int, attempt: int, token: str, payload: bytes) -> GroupHeader:
    trainable: dict[Version, int] = {}
    for rollout in group.rollouts:
        for span in rollout.spans:
            trainable[span.version] = trainable.get(span.version, 0) + int(rollout.mask[span.start : span.end].sum())
    return GroupHeader(
        seq=Seq(seq),
        attempt=Attempt(attempt),
        token=SlotToken(token),
        prompt_id=str(seq),
        producer_id="test",
        group_size=len(group.rollouts),
        lengths=tuple(len(rollout.tokens) for rollout in group.rollouts),
        sampled=tuple(int(rollout.mask.sum()) for rollout in group.rollouts),
        trainable=trainable,
        oldest=min(trainable),
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        payload_bytes=len(payload),
        payload_digest=digest(payload),
    )


@dataclass
class Producer:
    """Reserves one slot at a time and puts the group of its `seq`, so groups become ready in the order of `seq`. Waits for the run to begin, and again."""

    client: Client
    keys: Keys
    sampler: Sampler
    limit: int = 10**9
    charge: int = 1 << 14
    put: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once `limit` groups are put; then it ends."""

    async def run(self) -> None:
        ledger = RedisLedger(self.client, self.keys)
        async with wakeups(self.client, self.keys) as waker:
            buffer = ProducerBuffer(ledger, waker, "test-producer")
            while self.put < self.limit:
                mark = waker.mark(Topic.RUN)
                try:
                    (slot,) = await buffer.reserve(1, self.charge)
                except (RunMissing, RunEnded):
                    await waker.wait(Topic.RUN, since=mark)
                    continue
                group = self.sampler.group(slot.seq, version=slot.min_version)
                payload = encode_group(group)
                await buffer.put(header_of(group, seq=slot.seq, attempt=slot.attempt, token=slot.token, payload=payload), payload)
                self.put += 1
            self.reached.set()


async def serve_newest(client: Client, keys: Keys) -> None:
    """An engine as the run sees it: acks every version at once. It samples nothing."""
    registry, channel = Registry(client, keys), Channel(client, keys)
    status = EngineStatus(engine_id=EngineId("e0"), boot_nonce="n0", url="http://127.0.0.1:9", kind="embedded", state=EngineState.STARTING)
    acked: Version | None = None
    async with wakeups(client, keys) as waker:
        while True:
            mark = waker.mark(Topic.WEIGHTS)
            await registry.beat(status)
            newest = await channel.newest_version()
            gone_back = acked is not None and newest is not None and newest.incarnation == acked.incarnation and newest < acked  # Redis lost the pointer's way
            if newest is not None and newest != acked and not gone_back:
                await registry.ack("e0", "n0", newest)
                acked = newest
            await waker.wait(Topic.WEIGHTS, since=mark)


@pytest.fixture
def make_config(model_path: Path, tmp_path: Path, redis_url: str, keys: Keys) -> Callable[..., dict[str, dict[str, Any]]]:
    """A run of the test's own as the tables of its TOML file; a call may change single keys: `trainer__lr=1e-3`."""

    def make(run: str | None = None, **changes: Any) -> dict[str, dict[str, Any]]:
        name = run or keys.run
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "1+2=", "label": "3"}\n')
        tables: dict[str, dict[str, Any]] = {
            "run": {"name": name, "dir": str(tmp_path / name), "seed": 1},
            "redis": {"url": redis_url, "deadline_s": 60.0},
            "model": {"path": str(model_path)},
            "data": {"path": str(prompts)},
            "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_new_tokens": 8},
            "buffer": {"groups_per_step": 4, "chunk_groups": 2, "pipeline_depth": 1.0, "max_staleness": 1000},
            "weights": {"store": str(tmp_path / "weights")},
            "trainer": {"lr": 1e-3, "warmup_steps": 2},
            "checkpoint": {"every_seconds": 0.0, "every_steps": 4},
            "stop": {"steps": 10},
        }
        for dotted, value in changes.items():
            section, _, key = dotted.partition("__")
            tables.setdefault(section, {})[key] = value
        return tables

    return make


@pytest.fixture
def as_file(tmp_path: Path) -> Callable[[dict[str, dict[str, Any]]], Path]:
    def write(tables: dict[str, dict[str, Any]]) -> Path:
        path = tmp_path / f"{tables['run']['name']}.toml"
        path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()) for name, table in tables.items()))
        return path

    return write


@pytest_asyncio.fixture
async def producing(redis: Client, sampler: Sampler) -> AsyncIterator[Callable[..., Producer]]:
    """Starts a producer and an engine of a run; they end with the test."""
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def start(keys: Keys, *, limit: int = 10**9, engine: bool = True, charge: int = 1 << 14) -> Producer:
            producer = Producer(redis, keys, sampler, limit=limit, charge=charge)
            tasks.append(group.create_task(producer.run(), name="test:producer"))
            if engine:
                tasks.append(group.create_task(serve_newest(redis, keys), name="test:engine"))
            return producer

        yield start
        for task in tasks:
            task.cancel()
