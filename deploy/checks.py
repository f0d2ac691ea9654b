"""All that can be known wrong before a process of the run starts. Opens no socket, writes nothing.

The rules are the daemons' own: each checks its part again when it starts; here they meet, so that `rollstream up` fails before it has made anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson

from deploy.config import UpConfig
from deploy.placement import demand_of, place
from protocol.config import RunConfig
from protocol.errors import ConfigError
from protocol.keys import Keys
from protocol.objects import object_store
from weightsync.config import WeightsConfig, is_url, relay_folder

_COUNT_GPUS = "import torch; print(torch.cuda.device_count())"
_COUNT_S = 120.0
"""A first import of torch from a slow disk takes most of a minute."""
_FROM_GPU = ("nccl", "ipc")


def check_all(config: UpConfig) -> None:
    """Cross-field rules, model folder and whether its weight files are whole, every row of the data set and of the held-out set, reward function, drivers
    of the stores behind URLs.

    Raises: `ConfigError` naming file, line or key and what to do.
    """
    from consumer.config import TrainerDaemonConfig
    from producer.config import ProducerDaemonConfig
    from producer.main import prepare

    Keys(config.run.name)
    trainer = TrainerDaemonConfig(**{name: getattr(config, name) for name in TrainerDaemonConfig.model_fields})
    trainer.check()
    check_weights(trainer.model_folder)
    if config.loss.needs_teacher and not config.teacher.urls:
        raise ConfigError(
            f"loss.kind {config.loss.kind} without teacher.urls: nobody scores what is sampled; give the URLs of the teacher's servers, or use another kind"
        )
    check_stores(config)
    if config.ray.address or config.placement.model_fields_set - {"layout"}:
        place(demand_of(config))
    prepare(ProducerDaemonConfig(**{name: getattr(config, name) for name in ProducerDaemonConfig.model_fields}))


def check_stores(config: UpConfig) -> None:
    """Whether each place outside Redis is one that every process of the run can reach, as far as its name tells. Asks none of them.

    Raises: `ConfigError` naming the key, for a scheme nobody knows, a driver that is not installed, or one process's own memory.
    """
    places = {"weights.store": config.weights.store, "buffer.spill": config.buffer.spill, "buffer.blobs": config.buffer.blobs}
    for key, where in places.items():
        if any(part.startswith("memory://") for part in where.split("::")):
            raise ConfigError(f"{key} {where}: memory:// is the memory of one process, and a run has several; give a folder or the URL of a store")
        if where:
            object_store(where, key=key)
    relay_folder(config.weights, config.run)


def check_carrier(weights: WeightsConfig, run: RunConfig, *, device: str = "") -> None:
    """Whether this machine has what its relay or weight server needs, for `up`, which starts one here; a file alone may be for another machine.
    `device`: what its weight server would send from.

    Raises: `ConfigError`: no such GPU, or a folder of copies that cannot be written to.
    """
    if weights.transport in _FROM_GPU:
        check_gpu(weights, device)
    if weights.transport == "delta" or is_url(weights.store):
        folder = relay_folder(weights, run)
        try:
            there = next(path for path in (folder, *folder.parents) if path.exists())
            good = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        except OSError:
            good = False
        if not good:
            raise ConfigError(f"weights.relay: nothing can be written to {folder}; choose another folder, or make it writable")


def check_gpu(weights: WeightsConfig, device: str = "") -> None:
    """Whether torch sees a GPU here, and `device`, which a weight server of this transport sends from. It is asked in a process of its own, as `up` needs
    no torch.

    Raises: `ConfigError` if it does not, or cannot be asked.
    """
    wanted = f'weights.transport = "{weights.transport}" needs a GPU here, for the weight server'
    instead = 'use "store", "delta" or "gloo", or a machine with one'
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, timeout=_COUNT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ConfigError(f"{wanted}: torch cannot be asked for one ({problem})") from problem
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise ConfigError(f"{wanted}: torch cannot be asked for one ({why:.300}); {instead}")
    if asked.stdout.strip() == "0":
        raise ConfigError(f"{wanted}, and torch sees none (driver, CUDA_VISIBLE_DEVICES, a torch built for CPUs?); {instead}")
    if int(device.partition(":")[2] or 0) >= int(asked.stdout):
        which = "a GPU that is no engine's, the trainer's if it can" if weights.transport == "nccl" else "the engines' GPU"
        raise ConfigError(
            f'weights.transport = "{weights.transport}": its weight server would send from {device}, and torch sees {asked.stdout.strip()} here: it '
            f"needs {which}; "
            'use "store", "delta" or "ipc", or leave it a GPU by trainer.device and engine.gpu'
        )


def check_weights(folder: Path) -> None:
    """Whether every safetensors file has all the bytes its header speaks of; a copy that broke off has not. Raises: `ConfigError` naming the file."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size - 8 - length
                header = orjson.loads(file.read(length) if size >= 0 else b"")
            whole = all(entry["data_offsets"][1] <= size for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"model.path {folder}: {path.name} is no whole safetensors file; copy or save the weights again")
