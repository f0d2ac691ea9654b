"""The trainer as a Ray actor."""

from __future__ import annotations

import argparse
import asyncio
import functools

from consumer.main import train
from deploy.config import UpConfig
from deploy.ray.ranks import RayRanks
from producer.ray_actor import DaemonActor
from protocol.config import load
from protocol.connection import asking, connect
from protocol.keys import Keys


class TrainerActor(DaemonActor):
    """`rl-trainer`: makes the run if it is not there, else goes on from its newest checkpoint, which lies in a folder that every node must share.

    Of several ranks it is the first; it starts the others in the bundles after its own, and they end with it.
    """

    async def body(self, path: str, stop: asyncio.Event) -> None:
        sets = list(self.settings.sets)
        config = load(UpConfig, path, sets=sets)
        there = await _exists(config)
        await train(
            argparse.Namespace(config=path, set=sets, new=not there, resume=there, shadow=None, recorded=None, from_step=None, abandon=False),
            stop,
            address=self.address,
            start_others=functools.partial(RayRanks, self.settings, self.bundles, cpus=config.ray.trainer_cpus),
        )


async def _exists(config: UpConfig) -> bool:
    client = connect(config.redis.url, deadline_s=config.redis.deadline_s)
    try:
        with asking("whether the run is there"):
            return bool(await client.exists(Keys(config.run.name).state))
    finally:
        await client.aclose()
