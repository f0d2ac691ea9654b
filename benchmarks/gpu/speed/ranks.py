"""Rows of several ranks, a process and a device each: `fsdp1` and `fsdp2` (as many tokens for each rank), `tp1` and `tp2` (the same tokens for all together).

A rank of these is a process that this module starts; rank 0 tells. They end without a word to each other: a group that is taken down may wait for a rank
that is gone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.gpu.speed.workload import PEAK_FLOPS, SIZES, Sizes, chunk_of, model_folder, operations, tell
from consumer.config import TrainerConfig

_DEADLINE_S = 120


def main(row: str, size: str, device: str) -> None:
    ranks = int(row[-1])
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "benchmarks.gpu.speed", "--child", "ranks:member", row, size, device, folder]
        others = [subprocess.Popen([*argv, str(rank)]) for rank in range(1, ranks)]
        try:
            member(row, size, device, folder, "0")
        finally:
            for one in others:
                one.kill()
                one.wait()
    os._exit(0)


def member(row: str, size: str, device: str, folder: str, rank: str) -> None:
    import torch
    import torch.distributed as dist

    number, ranks, sizes = int(rank), int(row[-1]), SIZES[size]
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", number)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=number,
        world_size=ranks,
        timeout=timedelta(seconds=_DEADLINE_S),
        device_id=None if place.type == "cpu" else place,
    )
    if row.startswith("fsdp"):
        _sharded(row, sizes, place, number, ranks)
    else:
        with _shim(place.type == "cpu"):
            _tensor_parallel(row, sizes, place, number, ranks)


def _settings(sizes: Sizes, place: Any, **more: Any) -> TrainerConfig:
    return TrainerConfig(
        device=str(place), dtype="bfloat16", micro_batch_tokens=sizes.micro_batch, lr=1e-6, torch_threads=1 if place.type == "cpu" else 8, **more
    )


def _sharded(row: str, sizes: Sizes, place: Any, rank: int, ranks: int) -> None:
    from consumer.losses import LossConfig
    from consumer.ranks.sharded import ShardedBackend

    backend = ShardedBackend(model_folder(sizes.model), _settings(sizes, place, packing="on"), loss=LossConfig(), temperature=1.0, seed=1)
    _measure(row, sizes, backend, place, tell_it=rank == 0, share=(rank, ranks), devices=ranks, packed=backend._packed)


def _tensor_parallel(row: str, sizes: Sizes, place: Any, rank: int, ranks: int) -> None:
    from consumer.megatron.backend import MegatronBackend
    from consumer.megatron.config import MegatronConfig

    backend = MegatronBackend(
        model_folder(sizes.model), _settings(sizes, place), megatron=MegatronConfig(tp=ranks, distributed_optimizer=False), temperature=1.0, seed=1
    )
    _measure(row, sizes, backend, place, tell_it=rank == 0, share=(0, 1), devices=ranks, packed=True)


def _measure(row: str, sizes: Sizes, backend: Any, place: Any, *, tell_it: bool, share: tuple[int, int], devices: int, packed: bool) -> None:
    import torch

    rank, ranks = share
    found: list[tuple[float, float, float]] = []
    peak = 0
    for turn in range(sizes.warm_up + sizes.rounds):
        seqs = range(1000 * turn, 1000 * turn + sizes.groups * ranks)
        every = [chunk_of(seqs[one * sizes.groups : (one + 1) * sizes.groups], sizes) for one in range(ranks)]
        lengths = [int(n) for chunk in every for group in chunk.groups for n in group.starts[1:] - group.starts[:-1] - 1]
        work = operations(sizes.model, lengths, sum(chunk.tokens for chunk in every))
        if place.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.distributed.barrier()
        began = time.perf_counter()
        backend.accumulate(every[rank])
        report = backend.finish_step(turn + 1, sum(chunk.divisor for chunk in every))
        seconds = time.perf_counter() - began
        peak = max(peak, torch.cuda.max_memory_allocated()) if place.type == "cuda" else 0
        if turn >= sizes.warm_up:
            found.append((seconds, sum(lengths) / seconds, work / seconds))
    if tell_it:
        tell(
            row,
            packed=packed,
            devices=devices,
            tokens_per_s=statistics.median(rate for _, rate, _ in found),
            tokens_per_s_rounds=[rate for _, rate, _ in found],
            mfu=statistics.median(rate for _, _, rate in found) / (PEAK_FLOPS * devices),
            step_s=statistics.median(seconds for seconds, _, _ in found),
            peak_bytes=peak,
            grad_norm=report.grad_norm,
        )


def _shim(wanted: bool) -> Any:
    """megatron-core names CUDA devices; a trial on a CPU takes what its tests take."""
    import contextlib

    if not wanted:
        return contextlib.nullcontext()
    from tests.consumer.megatron.shim import cpu_for_cuda

    return cpu_for_cuda()
