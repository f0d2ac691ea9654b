"""`rl-producer` as it is, but for the model: its groups are made up, and its engine only says that it serves the newest version.

Started as `python -m tests.faults.synthetic_producer -c run.toml --index 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import producer.main
from producer.engine.client import Sampling
from producer.rewards import Reward
from producer.sampler import Sampled, Sampler
from producer.source import Chosen
from protocol.config import load
from protocol.connection import connect
from protocol.errors import RedisUnavailable, SampleFailed
from protocol.keys import Keys
from protocol.messages import EngineId, EngineState, EngineStatus
from protocol.versions import Version
from protocol.wakeups import Topic, wakeups
from tests.faults.synthetic import HELD_UNTIL, extra_of, fails, group_of
from weightsync.channel import Channel
from weightsync.registry import BEAT_S, Registry

_LOOK_S = 0.02


class SyntheticSampler(Sampler):
    """Takes versions from the pool as sampling does, over an update of the weights if one comes, and makes up the rest."""

    async def sample(self, chosen: Chosen, prompt: list[int], *, min_version: Version | None, sampling: Sampling, rid: str, prefix: str = "") -> Sampled:
        _, seq, attempt, i = rid.split("-")
        while (held := os.environ.get(HELD_UNTIL)) and not Path(held).exists():
            await asyncio.sleep(_LOOK_S)
        first = await self._version(min_version)
        await asyncio.sleep(random.uniform(0.0, 0.02))  # what sampling takes: versions change meanwhile, groups overtake each other
        if fails(int(seq), int(attempt)):
            raise SampleFailed("it is of those that fail once")
        then = await self._version(min_version)
        group = group_of(int(seq), [first, then] if then > first else [first])
        rollout, extras = group.rollouts[int(i)], {"scores": extra_of(int(seq), int(i))}
        return Sampled(rollout=rollout, reward=Reward(rollout.reward, extras=extras), queue_s=0.0, generate_s=0.01, reward_s=0.0)

    async def _version(self, at_least: Version | None) -> Version:
        engine = await self._pool.acquire(at_least)
        self._pool.release(engine)
        return engine.version


@contextlib.asynccontextmanager
async def engine(options: argparse.Namespace) -> AsyncIterator[None]:
    """An engine of the run while the context is open: routable once the first version is out, and at the newest from then on."""
    config = load(producer.main.ProducerDaemonConfig, options.config, sets=options.set)
    keys, client = Keys(config.run.name), connect(config.redis.url, deadline_s=config.redis.deadline_s)
    name, nonce = EngineId(f"engine-{options.index}"), uuid.uuid4().hex
    status = EngineStatus(engine_id=name, boot_nonce=nonce, url="http://127.0.0.1:9", kind="embedded", state=EngineState.STARTING, pid=os.getpid())
    registry, channel = Registry(client, keys), Channel(client, keys)

    async def serve() -> None:
        async with wakeups(client, keys) as waker:
            while True:
                mark = waker.mark(Topic.WEIGHTS)
                with contextlib.suppress(RedisUnavailable):
                    await registry.beat(status)
                    newest = await channel.newest_version()
                    (acked,) = (one.version for one in await registry.engines() if one.boot_nonce == nonce)
                    if newest is not None and (acked is None or newest > acked):  # by the registry, as a reconciler does it: Redis may have forgotten
                        await registry.ack(name, nonce, newest)
                await waker.wait(Topic.WEIGHTS, since=mark, timeout_s=BEAT_S)

    serving = asyncio.create_task(serve(), name="engine:serve")
    try:
        yield
        with contextlib.suppress(RedisUnavailable):
            await registry.leave(name, nonce)
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await client.aclose()


async def with_engine(options: argparse.Namespace, stop: asyncio.Event) -> None:
    async with engine(options):
        await PRODUCE(options, stop)


PRODUCE = producer.main.produce


def main() -> int:
    producer.main.Sampler = SyntheticSampler
    producer.main.produce = with_engine
    return producer.main.main()


if __name__ == "__main__":
    sys.exit(main())
