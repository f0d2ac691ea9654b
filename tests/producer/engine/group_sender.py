"""The other side of a weight group, as trainers write it: `torch.distributed`'s own helper, a default group of one, rank 0 of the extra group.

As a program it is a process that can be killed: `python group_sender.py FOLDER NAME MODE TENSORS [CUT]` prints the port, joins, and broadcasts the first
TENSORS tensors of the folder's model. MODE plain: one after the other; after CUT of them it kills itself. MODE flat: as one run of bytes.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper

_TIMEOUT = dt.timedelta(seconds=60)


def ordered(folder: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(folder / "model.safetensors").items()))


def flattened(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors.values()])


class Sender:
    """Listens at `port` once made. Methods block."""

    def __init__(self, name: str) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.name = name
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
        self.port = self._store.port
        self._group: Any = None

    def join(self) -> None:
        nested = dist.PrefixStore(self.name, self._store)
        self._group, _ = _new_process_group_helper(2, 0, [], "gloo", nested, group_name=self.name, timeout=_TIMEOUT)
        dist.distributed_c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

    def send(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._group)

    def leave(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = self._store = None  # type: ignore[assignment]

    async def meet(self, asked: asyncio.Task[Any]) -> Any:
        """Join while the engine does; what the engine answered."""
        await asyncio.to_thread(self.join)
        return await asked


def main(folder: Path, name: str, mode: str, count: int, cut: int) -> None:
    chosen = dict(list(ordered(folder).items())[:count])
    sender = Sender(name)
    print(sender.port, flush=True)
    sender.join()
    if mode == "flat":
        sender.send(flattened(chosen))
    for at, tensor in enumerate(chosen.values() if mode == "plain" else ()):
        if at == cut:
            os.kill(os.getpid(), signal.SIGKILL)
        sender.send(tensor)
    print("sent", flush=True)
    sys.stdin.read()  # the engine must have taken all before this side is gone


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else -1)
