"""The process group of the ranks, and the store they meet at. Every collective and every wait has a deadline; torch's own are 10 and 30 minutes, or none.

A group on CUDA devices has two transports: NCCL for tensors that lie on them, gloo for those in host memory.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined, unused-ignore]

from consumer.ranks.channel import RankLost
from consumer.ranks.place import Place
from protocol.errors import ConfigError, RollstreamError

JOIN_S = 300.0
"""From the first rank's start to the last one's: imports, and the start of containers."""
COLLECTIVE_S = 600.0
"""A rank waits for another in a collective. They run micro-batches of like size in step, so this is for one that hangs."""
_CHANNEL = "rollstream/channel"
"""In a store that may have known earlier lives of the ranks. torchrun counts restarts on each host by itself, so no number of its own tells them apart."""
_WAKE_S = 4.0
"""A rank is gone: whoever waits for it in a collective is woken by that with gloo; with NCCL by `abort`."""


def open_store(place: Place) -> TCPStore:
    """The store at `place`: made by whoever started the ranks, or by rank 0. With `own_store` its port is free for any. Blocks.

    Raises: `RankLost` where it cannot be reached.
    """
    lent = not place.own_store and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
    deadline = timedelta(seconds=JOIN_S)
    try:
        return TCPStore(place.host, place.port, None, is_master=place.rank == 0 and not lent, timeout=deadline, wait_for_workers=False)
    except RuntimeError as problem:  # DistNetworkError, DistStoreError
        raise RankLost(f"rank {place.rank}: no store at {place.host}:{place.port} ({_first_line(problem)}): is rank 0 there?") from problem


def tell_channel(store: Store, port: int, token: str) -> None:
    """Where rank 0 of this life of the ranks listens, for the others: in place of what was told in an earlier life, if the store is older."""
    store.set(_CHANNEL, f"{port} {token}")


def find_channel(store: Store, place: Place) -> tuple[int, str]:
    """Port and token of rank 0's channel, as soon as one was told; it may be that of an earlier life, which nobody answers at. Blocks.

    Raises: `RankLost` if none was within `JOIN_S`.
    """
    try:
        told = store.get(_CHANNEL).decode()
    except RuntimeError as problem:
        raise RankLost(f"rank {place.rank}: rank 0 did not open its channel within {JOIN_S:.0f} s ({_first_line(problem)}); see its log") from problem
    port, _, token = told.partition(" ")
    return int(port), token


def join(store: Store, place: Place, device: torch.device, *, token: str) -> None:
    """Make the default group, of all ranks that know this life's `token`. Blocks until all are there. Raises: `RankLost`."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore(f"rollstream/{token}", store),
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as problem:
        leave()
        raise RankLost(f"rank {place.rank}: the process group of {place.ranks} ranks did not form ({_first_line(problem)})") from problem


def join_alone(device: str) -> None:
    """Make the default group, of this process alone, unless there is one: what is cut over ranks is whole then."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined, unused-ignore]
        atexit.register(leave)


def leave() -> None:
    """In good order; harmless where there is no group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Wake whoever waits in a collective, from any thread: with NCCL the death of another rank does."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch has no public name for it


def device_of(place: Place, wanted: str) -> torch.device:
    """`cuda` and `cuda:N` are the first of as many devices as this host has ranks. Raises: `ConfigError`."""
    device = torch.device(wanted)
    if device.type != "cuda":
        return device
    index = (device.index or 0) + place.local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.device {wanted}: rank {place.rank} would take cuda:{index}, and this host has {torch.cuda.device_count()} devices; start fewer ranks here"
        )
    return torch.device("cuda", index)


def echoes(problem: BaseException) -> bool:
    """Whether this is how the end of another rank shows in a collective."""
    text = str(problem).lower()
    return isinstance(problem, dist.DistError) or (
        isinstance(problem, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection closed", "process group"))
    )


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:200]


async def woken(free: threading.Event, failure: RollstreamError, *, role: str) -> None:
    """Return once the thread that may wait for a rank that is gone is `free`; one that does not wake ends the process, with the exit code of `failure`."""
    if await asyncio.to_thread(free.wait, _WAKE_S):
        return
    await asyncio.to_thread(abort)
    if not await asyncio.to_thread(free.wait, _WAKE_S):
        sys.stderr.write(f"{role}: {failure}\n")
        sys.stderr.flush()
        os._exit(failure.exit_code)
