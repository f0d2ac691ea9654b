"""`python -m benchmarks.weights.trainer DEVICE SIZE FOLDER`: a policy on a device, changed, copied and published as after a step.

It writes its starting weights to FOLDER as a model that engines start from. Commands:
    open {run, redis, weights}   a publisher for a new run; close {run}
    step {kind, seed}            fresh: all matrices anew; sparse: one element in fifty anew; adam: each float32 master by ± a learning rate of 1e-6
    publish {run, n}             snapshot, then submit; how long training stood still
    published {run}              waits until it is out
    logprobs {ids, prompt}       of the tokens after the prompt, under the weights held now
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.weights.child import Answer, answer_commands
from benchmarks.weights.random_model import STD, build, save
from consumer.snapshot_buffers import SnapshotBuffers
from protocol.config import RunConfig
from protocol.connection import Client, connect
from protocol.keys import Keys
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher
from weightsync.snapshot import Snapshot
from weightsync.store import open_store

INCARNATION = 1
_LEARNING_RATE = 1e-6
_SPARSE = 0.02


@dataclass(frozen=True, slots=True)
class _Run:
    client: Client
    keys: Keys
    publisher: Publisher


class Trainer:
    def __init__(self, device: str, size: str, folder: Path) -> None:
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._model = build(size, device, seed=1)
        self._folder = folder
        if not (folder / "config.json").exists():
            save(self._model, folder)
        self._parameters: Mapping[str, Tensor] = dict(self._model.named_parameters())
        self._masters: dict[str, Tensor] = {}
        self._copies = SnapshotBuffers(self._parameters, self._device)
        self._runs: dict[str, _Run] = {}

    async def handle(self, command: dict[str, Any]) -> Answer:
        do = getattr(self, "_do_" + command.pop("do"))
        answer: Answer = await do(**command)
        return answer

    async def _do_open(self, run: str, redis: str, weights: dict[str, Any]) -> Answer:
        config, client, keys = WeightsConfig(**weights), connect(redis), Keys(run)
        store = open_store(config, RunConfig(name=run), self._folder)
        await client.hset(keys.state, mapping={"incarnation": INCARNATION, "trained": 0})
        publisher = await Publisher(Channel(client, keys), store, config=config).__aenter__()
        self._runs[run] = _Run(client=client, keys=keys, publisher=publisher)
        return {"parameters": sum(one.numel() for one in self._parameters.values())}

    async def _do_step(self, kind: str, seed: int) -> Answer:
        started = time.monotonic()
        generator = torch.Generator(self._device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter.dim() > 1:
                    self._change(name, parameter, kind, generator)
        self._wait()
        return {"seconds": time.monotonic() - started}

    def _change(self, name: str, parameter: Tensor, kind: str, generator: torch.Generator) -> None:
        if kind == "adam":  # what Adam does early on: each element by about the learning rate, in the master's precision
            if name not in self._masters:
                self._masters[name] = parameter.float()
            step = torch.randn(parameter.shape, generator=generator, device=self._device).sign_().mul_(_LEARNING_RATE)
            parameter.copy_(self._masters[name].add_(step))
            return
        self._masters.pop(name, None)
        if kind == "fresh":
            parameter.normal_(0.0, STD, generator=generator)
        else:
            chosen = torch.rand(parameter.shape, generator=generator, device=self._device) < _SPARSE
            parameter[chosen] = torch.empty(int(chosen.sum()), dtype=parameter.dtype, device=self._device).normal_(0.0, STD, generator=generator)

    async def _do_publish(self, run: str, n: int) -> Answer:
        """Training stands still until the copy is complete; the digest that it also takes of every step is told apart."""
        one = self._runs[run]
        await one.client.hset(one.keys.state, "trained", n)
        self._wait()
        began = time.monotonic()
        held = self._copies.take(self._parameters)
        copied = time.monotonic()
        digest = held.digest()
        digested = time.monotonic()
        snapshot = Snapshot(version=Version(INCARNATION, n), tensors=held, digest=digest if held.plain else "")
        one.publisher.submit(snapshot, INCARNATION, acknowledged=True)
        return {"began": began, "submitted": time.monotonic(), "blocked_ms": (copied - began) * 1e3, "digest_ms": (digested - copied) * 1e3}

    async def _do_published(self, run: str) -> Answer:
        publisher = self._runs[run].publisher
        await publisher.drain(240.0)
        manifest = publisher.published
        assert manifest is not None
        return {
            "version": str(manifest.version),
            "kind": manifest.kind,
            "bytes": manifest.total_bytes,
            "whole_bytes": sum(one.numel() * one.element_size() for one in self._parameters.values()),
            "elements": manifest.elements,
            "changed_elements": manifest.changed_elements,
            "publish_s": publisher.publish_s,
        }

    async def _do_logprobs(self, ids: list[int], prompt: int) -> Answer:
        with torch.no_grad():
            logits = self._model(torch.tensor([ids], device=self._device)).logits[0].float().log_softmax(-1)
        return {"logprobs": [float(logits[at - 1, ids[at]]) for at in range(prompt, len(ids))]}

    async def _do_close(self, run: str) -> Answer:
        one = self._runs.pop(run)
        await one.publisher.__aexit__(None, None, None)
        await one.client.aclose()
        return {}

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


async def main() -> None:
    trainer = Trainer(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    await answer_commands(trainer.handle)


if __name__ == "__main__":
    asyncio.run(main())
