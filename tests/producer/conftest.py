"""A stage for producers: a tiny tokenizer, a data set, a run in a real Redis, and engines that speak /generate over real HTTP and fail on demand."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from buffer.config import BufferConfig
from buffer.redis_ledger import RedisLedger
from producer.config import ProducerDaemonConfig
from producer.main import Prepared, prepare
from protocol.config import validate
from protocol.connection import Client
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Wakeups, wakeups
from weightsync.registry import Registry

CHARACTERS = "0123456789=>+? abcdefghijklmnopqrstuvwxyz<|_/\n"
CHAT_TEMPLATE = (  # fmt: skip
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A model folder as far as a producer reads it: a character tokenizer that puts <s> before text."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclasses.dataclass
class StagedEngine:
    """An engine whose answers a test writes. `behave` is asked for each request: "ok", a status, "drop" or "hang"."""

    id: str
    url: str = ""
    nonce: str = "boot:1"
    versions: list[tuple[str, int]] = dataclasses.field(default_factory=lambda: [("1:0", 4)])
    """(version, tokens) of each span."""
    texts: list[str] = dataclasses.field(default_factory=lambda: ["1234"])
    """Answered in turn."""
    abort_at: list[int] = dataclasses.field(default_factory=list)
    """The next answers are ended on purpose after so many tokens."""
    behave: Callable[[dict[str, Any]], str | int] = lambda _: "ok"
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    arrived: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    go: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """What "hang" waits for."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.arrived.set()
        behaviour = self.behave(body)
        if behaviour == "drop":
            assert request.transport is not None
            request.transport.close()
        elif behaviour == "hang":
            await self.go.wait()
        elif isinstance(behaviour, int):
            return web.json_response({"error": {"message": "staged"}}, status=behaviour)
        return web.json_response(self._answer())

    async def abort(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    def _answer(self) -> dict[str, Any]:
        spans, at = [], 0
        for version, tokens in self.versions:
            spans.append({"version": version, "start": at, "end": at + tokens})
            at += tokens
        ids = [(i % 10) + 2 for i in range(at)]
        if self.abort_at:
            return self._cut(ids, self.abort_at.pop(0))
        return {
            "text": self.texts[(len(self.requests) - 1) % len(self.texts)],
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": 1},
                "weight_version": self.versions[-1][0],
                "weight_versions": spans,
                "output_token_logprobs": [[-0.5 - i / 8, token, None] for i, token in enumerate(ids)],
            },
        }

    def _cut(self, ids: list[int], tokens: int) -> dict[str, Any]:
        version = self.versions[0][0]
        meta: dict[str, Any] = {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "weight_version": version}
        if tokens:
            meta["weight_versions"] = [{"version": version, "start": 0, "end": tokens}]
            meta["output_token_logprobs"] = [[-0.25, token, None] for token in ids[:tokens]]
        return {"text": "", "output_ids": ids[:tokens], "meta_info": meta}

    def status(self) -> EngineStatus:
        return EngineStatus(engine_id=EngineId(self.id), boot_nonce=self.nonce, url=self.url, kind="embedded", state=EngineState.STARTING, capacity=8)


class Stage:
    """One run and everything around it."""

    def __init__(self, folder: Path, *, redis: Client, keys: Keys, url: str, waker: Wakeups, session: aiohttp.ClientSession) -> None:
        self.folder, self.redis, self.keys, self.url, self.wakeups, self.session = folder, redis, keys, url, waker, session
        self.ledger = RedisLedger(redis, keys)
        self.registry = Registry(redis, keys)
        self.runners: list[web.AppRunner] = []
        self.engines: list[StagedEngine] = []
        write_model(folder / "model")
        write_rows(folder / "train.jsonl", [{"prompt": f">{i}=", "label": "1234"} for i in range(8)])

    def values(self, **sections: dict[str, Any]) -> dict[str, Any]:
        base: dict[str, Any] = {
            "run": {"name": self.keys.run, "dir": str(self.folder / "run")},
            "redis": {"url": self.url, "deadline_s": 60.0},
            "model": {"path": str(self.folder / "model")},
            "data": {"path": str(self.folder / "train.jsonl")},
            "rollout": {"group_size": 2, "max_new_tokens": 8},
            "producer": {"max_inflight_groups": 2, "sample_deadline_seconds": 60.0, "group_deadline_seconds": 300.0, "drain_seconds": 1.0},
        }
        for section, values in sections.items():
            base[section] = base.get(section, {}) | values
        return base

    def config(self, **sections: dict[str, Any]) -> ProducerDaemonConfig:
        return validate(ProducerDaemonConfig, self.values(**sections), source="test")

    def file(self, **sections: dict[str, Any]) -> Path:
        path = self.folder / "run.toml"
        lines = []
        for section, values in self.values(**sections).items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        path.write_text("\n".join(lines) + "\n")
        return path

    async def create(self, config: ProducerDaemonConfig, **settings: Any) -> Prepared:
        """The run, with a trainer attached at step 0."""
        prepared = prepare(config)
        await self.ledger.create(prepared.identity, BufferConfig(**({"groups_per_step": 2, "slot_seconds": 600.0} | settings)))
        await self.ledger.attach(None, trainer_id="t")
        return prepared

    async def engine(self, name: str, version: str = "1:0", **fields: Any) -> StagedEngine:
        """An engine that serves and is routable at `version`."""
        engine = StagedEngine(name, versions=[(version, 4)], **fields)
        self.engines.append(engine)
        app = web.Application()
        app.router.add_post("/generate", engine.generate)
        app.router.add_post("/abort_request", engine.abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self.runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await self.registry.beat(engine.status(), ttl_s=600.0)
        await self.registry.ack(name, engine.nonce, Version.parse(version))
        return engine

    async def close(self) -> None:
        for engine in self.engines:
            engine.go.set()
        await asyncio.gather(*(runner.cleanup() for runner in self.runners))

    async def audit(self, op: str) -> list[dict[str, Any]]:
        return [json.loads(fields[b"d"]) for _, fields in await self.redis.xrange(self.keys.audit) if fields[b"op"].decode() == op]


@pytest_asyncio.fixture
async def stage(tmp_path: Path, redis: Client, keys: Keys, redis_url: str) -> AsyncIterator[Stage]:
    async with wakeups(redis, keys) as waker, aiohttp.ClientSession() as session:
        stage = Stage(tmp_path, redis=redis, keys=keys, url=redis_url, waker=waker, session=session)
        try:
            yield stage
        finally:
            await stage.close()


@pytest.fixture
def make_stage(tmp_path: Path) -> Callable[..., Stage]:
    """A stage on a Redis of the test's own; `close` it."""
    return partial(Stage, tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")
