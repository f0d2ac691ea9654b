"""Which device the weight server of `rollstream up` sends from. Pure.

| `weights.transport` | device |
| --- | --- |
| gloo | the CPU: it sends from host memory |
| nccl | the trainer's GPU, where the snapshot lies; where an engine has that one too, or the trainer has none, the first that is no engine's |
| ipc | the engines' GPU; of several the trainer's, else the first |

The two ends of a transfer by NCCL cannot share a GPU. By handle an engine reads the memory of its own GPU, so those on others take versions from the store.
The weight server itself says so where the GPU is not there, and `deploy.checks` before anything starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Literal, TypeAlias

from deploy.config import UpConfig
from producer.engine.sglang.arguments import gpus_here

Transport: TypeAlias = Literal["store", "delta", "gloo", "nccl", "ipc"]


def server_device(config: UpConfig) -> str:
    """In torch's spelling; empty: the transport needs no weight server."""
    return choose_device(config.weights.transport, trainer=_index(config.trainer.device), engines=engine_gpus(config))


def choose_device(transport: Transport, *, trainer: int | None, engines: Collection[int]) -> str:
    """`trainer`: GPU of its first rank; None: it computes on the CPU. `engines`: all GPUs of engines on this machine.

    >>> [choose_device("nccl", trainer=gpu, engines=(0, 1)) for gpu in (2, 0, None)]
    ['cuda:2', 'cuda:2', 'cuda:2']
    >>> [choose_device("ipc", trainer=gpu, engines=(1, 2)) for gpu in (2, 0, None)]
    ['cuda:2', 'cuda:1', 'cuda:1']
    """
    match transport:
        case "gloo":
            return "cpu"
        case "nccl":
            free = next(gpu for gpu in itertools.count() if gpu not in engines)
            return f"cuda:{free if trainer is None or trainer in engines else trainer}"
        case "ipc":
            shared = trainer in engines or not engines
            return f"cuda:{(trainer or 0) if shared else min(engines)}"
        case _:
            return ""


def engine_gpus(config: UpConfig) -> frozenset[int]:
    """Of every engine that `up` starts here, those of the evaluation's own included."""
    engine = config.engine
    return frozenset(range(engine.gpu, engine.gpu + (engine.count + config.eval.engines) * gpus_here(engine)))


def shared_gpu(config: UpConfig) -> str:
    """What to say where trainer and engines are on one GPU at the same time; empty: they are not, or take turns there."""
    trainer = _index(config.trainer.device)
    if trainer not in engine_gpus(config) or config.placement.layout == "colocated":
        return ""
    return (
        f"trainer.device {config.trainer.device} is an engine's GPU too (engine.gpu {config.engine.gpu}): both have their memory there at the same time; bound "
        "the engine's by --mem-fraction-static in engine.args, choose another GPU, or use placement.layout colocated"
    )


def _index(device: str) -> int | None:
    kind, _, number = device.partition(":")
    return None if kind == "cpu" else int(number or 0)
