"""Ranks above 0 of a trainer as Ray actors, each on a bundle of the run's group. Rank 0 starts them, owns them, and they die with it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from consumer.config import TrainerDaemonConfig
from consumer.ranks.children import KILL_S, Lost
from consumer.ranks.place import Place
from deploy.ray.placement_group import WHOLE_GPU, seat
from producer.ray_actor import Settings, forget_overrides
from protocol.config import load
from protocol.daemon import SUPERVISED, run_daemon


class RankActor:
    """One rank for one life of rank 0. Never started again by Ray: rank 0 ends with it, and its next life starts another."""

    def follow(self, settings: Settings, place: Place) -> int:
        """Run to its end; what its exit code would be as a process."""
        forget_overrides()
        os.environ[SUPERVISED] = "1"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

        async def rank(_stop: asyncio.Event) -> None:
            from consumer.ranks.follower import follow  # torch

            with settings.file() as path:
                config = load(TrainerDaemonConfig, path, sets=settings.sets)
            await follow(config, place)

        return run_daemon(f"rl-trainer rank {place.rank}", rank)


class RayRanks:
    """`consumer.ranks.children.Others` on a Ray cluster, in the actor of rank 0: rank `r` sits in bundle `bundles[r]` of that actor's group.

    A bundle whose node is lost is found another place by Ray. A rank waits for that, and rank 0 for the rank, as long as ranks wait for each other at their
    start.
    """

    def __init__(self, settings: Settings, bundles: Sequence[int], place: Place, lost: Lost, *, cpus: float) -> None:
        assert len(bundles) == place.ranks, "each rank has a bundle"
        self._settings, self._bundles, self._place, self._lost = settings, tuple(bundles), place, lost
        self._cpus = cpus
        self._actors: list[Any] = []
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            for rank in range(1, self._place.ranks):
                actor, end = await asyncio.to_thread(self._start, rank)
                self._actors.append(actor)
                self._watching.append(asyncio.create_task(self._watch(rank, end), name=f"trainer:rank {rank}"))
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        import ray

        await self.ended(KILL_S)
        for actor in self._actors:
            await asyncio.to_thread(ray.kill, actor, no_restart=True)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    async def ended(self, deadline_s: float) -> None:
        if self._watching:
            await asyncio.wait(self._watching, timeout=deadline_s)

    def _start(self, rank: int) -> tuple[Any, Any]:
        """Returns at once: the bundle may wait for a node."""
        import ray

        group = ray.util.get_current_placement_group()
        assert group is not None, "the actor of rank 0 sits in the group of the run"
        bundle = self._bundles[rank]
        gpus = WHOLE_GPU if "GPU" in group.bundle_specs[bundle] else 0
        options = {"num_cpus": self._cpus, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": seat(group, bundle)}
        actor = ray.remote(RankActor).options(**options).remote()
        # An actor sees the GPU of its own bundle alone: the first of those it sees.
        place = dataclasses.replace(self._place, rank=rank, local_rank=0, own_store=False)
        return actor, actor.follow.remote(self._settings, place)

    async def _watch(self, rank: int, end: Any) -> None:
        from ray.exceptions import RayError

        try:
            code = int(await end)
        except RayError:  # its process or node is gone
            code = -signal.SIGKILL
        self._lost(rank, code)
