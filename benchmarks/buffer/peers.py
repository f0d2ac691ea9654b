"""The peers on Ray: `ray.util.queue`, an actor around a deque as verl's trainers use, and TransferQueue. Each as its own users call it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

from benchmarks.buffer.loads import Load
from benchmarks.buffer.meter import children_cpu, spread

os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("RAY_DEDUP_LOGS", "1")
_BATCH = 32


@contextlib.contextmanager
def ray_session() -> Iterator[None]:
    """Ray on this machine, started and ended outside of what is measured."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=8, object_store_memory=2 << 30, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _plain(group: Any) -> list[tuple[Any, ...]]:
    return [(one.tokens, one.logprobs, one.mask, one.reward) for one in group.rollouts]


class RayQueue:
    """ray.util.queue.Queue: put_async and get_async of one group."""

    name = "ray.util.queue"
    server_cpu = staticmethod(children_cpu)

    def __init__(self) -> None:
        from ray.util.queue import Queue

        self._queue = Queue(maxsize=4096)

    async def prepare(self, load: Load) -> None:
        return

    async def put(self, load: Load) -> None:
        await spread(len(load.groups), lambda i: self._queue.put_async(_plain(load.groups[i])))

    async def get(self, load: Load) -> None:
        await spread(len(load.groups), lambda _: self._queue.get_async())

    async def clear(self) -> None:
        return


class RayDeque:
    """An asyncio actor around a deque of cloudpickled samples, with the statistics call that its producers make for every put."""

    name = "ray actor deque"
    server_cpu = staticmethod(children_cpu)

    def __init__(self) -> None:
        import ray

        class Queue:
            def __init__(self) -> None:
                self._items: deque[bytes] = deque()
                self._filled = asyncio.Condition()

            async def put(self, item: bytes) -> bool:
                async with self._filled:
                    self._items.append(item)
                    self._filled.notify()
                return True

            async def get(self) -> bytes:
                async with self._filled:
                    await self._filled.wait_for(lambda: bool(self._items))
                    return self._items.popleft()

            async def statistics(self) -> dict[str, int]:
                return {"size": len(self._items)}

        self._pickle = ray.cloudpickle
        self._actor = ray.remote(num_cpus=1, max_concurrency=64)(Queue).remote()

    async def prepare(self, load: Load) -> None:
        return

    async def put(self, load: Load) -> None:
        async def one(i: int) -> None:
            await self._actor.put.remote(self._pickle.dumps(_plain(load.groups[i])))
            await self._actor.statistics.remote()

        await spread(len(load.groups), one)

    async def get(self, load: Load) -> None:
        async def one(_: int) -> None:
            self._pickle.loads(await self._actor.get.remote())

        await spread(len(load.groups), one)

    async def clear(self) -> None:
        return


class TransferQueue:
    """TransferQueue's asynchronous key-value calls with `batch` groups an operation."""

    server_cpu = staticmethod(children_cpu)

    def __init__(self, *, batch: int = 1) -> None:
        self.name = "TransferQueue" if batch == 1 else f"TransferQueue x{batch}"
        self._batch = batch
        self._names: list[list[str]] = []
        self._round = 0

    @staticmethod
    def start() -> None:
        import transfer_queue as tq
        from omegaconf import OmegaConf

        storage = {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}
        tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))

    @staticmethod
    def stop() -> None:
        import transfer_queue as tq

        tq.close()

    async def prepare(self, load: Load) -> None:
        self._round += 1
        names = [f"{self._round}-{i}" for i in range(len(load.groups))]
        self._names = [names[start : start + self._batch] for start in range(0, len(names), self._batch)]

    async def put(self, load: Load) -> None:
        import numpy as np
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        async def one(number: int) -> None:
            names, at = self._names[number], number * self._batch
            rollouts = [one for group in load.groups[at : at + len(names)] for one in group.rollouts]
            columns = {
                "tokens": torch.from_numpy(np.stack([one.tokens for one in rollouts])),
                "logprobs": torch.from_numpy(np.stack([one.logprobs for one in rollouts])),
                "mask": torch.from_numpy(np.stack([one.mask for one in rollouts])),
                "reward": torch.tensor([one.reward for one in rollouts]),
            }
            keys = [f"{name}-{i}" for name in names for i in range(len(rollouts) // len(names))]
            await tq.async_kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(columns, batch_size=len(keys)), tags=[{} for _ in keys])

        await spread(len(self._names), one)

    async def get(self, load: Load) -> None:
        import transfer_queue as tq

        async def one(number: int) -> None:
            await tq.async_kv_batch_get(keys=[f"{name}-{i}" for name in self._names[number] for i in range(8)], partition_id="train")

        await spread(len(self._names), one)

    async def clear(self) -> None:
        import transfer_queue as tq

        tq.kv_clear(keys=[f"{name}-{i}" for names in self._names for name in names for i in range(8)], partition_id="train")
