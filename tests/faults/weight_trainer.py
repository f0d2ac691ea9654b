"""A trainer without torch that trains nothing and publishes a version with every step, by the real ledger and the real `Publisher`.

What each version holds is told in `versions.jsonl` beside the run's file before it is published, so that a judge knows it from nobody else.
Started as `python -m tests.faults.weight_trainer -c run.toml --every 0.4`; started again it attaches anew, from the starting weights.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import orjson
import xxhash

from buffer.config import BufferConfig
from buffer.contract import Blocked
from buffer.redis_ledger import RedisLedger
from protocol.codec import digest
from protocol.config import ModelConfig, RedisConfig, RunConfig, Tree, load
from protocol.connection import connect
from protocol.daemon import arguments, run_daemon
from protocol.identity import RunIdentity
from protocol.keys import Keys
from protocol.messages import GroupHeader
from protocol.versions import Version
from weightsync.channel import Channel
from weightsync.config import WeightsConfig
from weightsync.publisher import Publisher
from weightsync.registry import Registry
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes, weights_digest
from weightsync.store import open_store

TOLD = "versions.jsonl"
_CHANGED = 50
"""One element of so many differs from the version before."""
_PAYLOAD = b"nothing to learn from"
_AGAIN_S = 0.02


class WeightTrainerConfig(Tree):
    run: RunConfig
    redis: RedisConfig = RedisConfig()
    model: ModelConfig
    weights: WeightsConfig = WeightsConfig()


class Weights:
    """Bytes that are a function of the version alone."""

    def __init__(self, model: Path, incarnation: int) -> None:
        with open_tensors(model / "model.safetensors") as tensors:
            self._arrays = {name: np.frombuffer(bytes(tensor.data), dtype="<f4").reshape(tensor.shape).copy() for name, tensor in tensors.items()}
        self._incarnation = incarnation

    def step(self, n: int) -> Mapping[str, TensorBytes]:
        rng = np.random.default_rng((self._incarnation, n))
        for array in self._arrays.values():
            flat = array.reshape(-1)
            flat[rng.integers(0, flat.size, flat.size // _CHANGED + 1)] += rng.normal(0, 0.05, flat.size // _CHANGED + 1).astype("<f4")
        return {name: TensorBytes(dtype="F32", shape=array.shape, data=array.tobytes()) for name, array in self._arrays.items()}


async def train(config: WeightTrainerConfig, told: Path, every_s: float, paced_by: frozenset[str], stop: asyncio.Event) -> None:
    client, keys = connect(config.redis.url, deadline_s=config.redis.deadline_s), Keys(config.run.name)
    ledger, channel = RedisLedger(client, keys), Channel(client, keys)
    store = open_store(config.weights, config.run, config.model.path)
    try:
        settings = BufferConfig(groups_per_step=1, chunk_groups=1, pipeline_depth=1.0, max_staleness=100_000, slot_seconds=1.0)
        await ledger.create(RunIdentity(schema_major=1, seed=0, group_size=1, dataset="none", tokenizer="none"), settings)
        incarnation = (await ledger.attach(None, trainer_id="trainer")).incarnation
        weights = Weights(Path(config.model.path), incarnation)
        async with Publisher(channel, store, config=config.weights) as publisher:
            for n in range(1_000_000):
                tensors = weights.step(n)
                if n:
                    await _train_step(ledger, incarnation, n, weights_digest(tensors))
                version = Version(incarnation, n)
                _tell(told, version, tensors)
                publisher.submit(Snapshot(version=version, tensors=tensors), incarnation, acknowledged=True)
                await _served(Registry(client, keys), paced_by, version, stop)
                try:
                    async with asyncio.timeout(every_s):
                        await stop.wait()
                except TimeoutError:
                    continue
                return
    finally:
        await client.aclose()


async def _served(registry: Registry, paced_by: frozenset[str], version: Version, stop: asyncio.Event) -> None:
    """Each of these engines serves it, or what came after."""
    while paced_by - {str(one.engine_id) for one in await registry.engines() if one.version is not None and one.version >= version}:
        if stop.is_set():
            return
        await asyncio.sleep(_AGAIN_S)


def _tell(told: Path, version: Version, tensors: Mapping[str, TensorBytes]) -> None:
    checksums = {name: xxhash.xxh3_64_hexdigest(tensor.data) for name, tensor in tensors.items()}
    handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(handle, orjson.dumps({"version": str(version), "checksums": checksums}) + b"\n")
    finally:
        os.close(handle)


async def _train_step(ledger: RedisLedger, incarnation: int, step: int, weights: str) -> None:
    """The whole life of one group: what the ledger asks for before it lets a version be called trained."""
    await ledger.open_step(incarnation, step)
    while isinstance(await ledger.lease(incarnation, step, 0), Blocked):
        await _put(ledger, incarnation)
    await ledger.trained(incarnation, step, weights, {"reward": 0.0, "tokens": 1})


async def _put(ledger: RedisLedger, incarnation: int) -> None:
    granted = await ledger.reserve("trainer", uuid.uuid4().hex, 1, max_bytes=1000)
    if isinstance(granted, Blocked):  # held by the life before this one, for as long as slots last
        await asyncio.sleep(_AGAIN_S)
        return
    for slot in granted.slots:
        version = Version(incarnation, 0)
        header = GroupHeader(
            seq=slot.seq,
            attempt=slot.attempt,
            token=slot.token,
            prompt_id="none",
            producer_id="trainer",
            group_size=1,
            lengths=(2,),
            sampled=(1,),
            trainable={version: 1},
            oldest=version,
            rewards=(0.0,),
            payload_bytes=len(_PAYLOAD),
            payload_digest=digest(_PAYLOAD),
        )
        await ledger.put(header, _PAYLOAD)


def main() -> int:
    parser = arguments("weight-trainer", "Publishes versions of weights that nobody trained.")
    parser.add_argument("--every", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--paced-by", nargs="*", default=[], metavar="ENGINE", help="a version waits until these serve the one before")
    options = parser.parse_args()
    config = load(WeightTrainerConfig, options.config, sets=options.set)
    return run_daemon("weight-trainer", lambda stop: train(config, Path(options.config).parent / TOLD, options.every, frozenset(options.paced_by), stop))


if __name__ == "__main__":
    sys.exit(main())
