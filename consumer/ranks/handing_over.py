"""A checkpoint's state to the backends of all ranks that do not read it themselves (`consumer.backend.ReadsItsPart`): from rank 0, which has it on disk or
in memory, whole to every rank, by broadcast through host memory, a tensor at a time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.backend import Backend, ReadsItsPart, TrainingState
from consumer.shards import dtype_of, shape_of
from protocol.frames import MAX_FRAME_BYTES, open_frame, write_frame
from weightsync.snapshot import TensorBytes

_LAYOUT = "state_layout"


def reads_its_part(backend: Backend) -> bool:
    return isinstance(backend, ReadsItsPart) and backend.reads_its_part


def broadcast_state(state: TrainingState | None) -> TrainingState:
    """Rank 0's, on every rank of the default group, which all call this; `state` is None elsewhere."""
    layout = _broadcast(None if state is None else _layout(state))
    body = open_frame(_LAYOUT, layout, MAX_FRAME_BYTES)
    found: dict[str, dict[str, TensorBytes]] = {group: {} for group in body["groups"]}
    for group, name, dtype, shape in body["tensors"]:
        data = _broadcast(None if state is None else state.groups[group][name].data)
        found[group][name] = TensorBytes(dtype=dtype, shape=tuple(shape), data=data)
    return TrainingState(weights=found.pop("weights"), optimizer=found.pop("optimizer"), others=found, rng=body["rng"])


def _layout(state: TrainingState) -> bytes:
    tensors = [[group, name, dtype_of(every, name), list(shape_of(every, name))] for group, every in state.groups.items() for name in every]
    return write_frame(_LAYOUT, {"groups": list(state.groups), "tensors": tensors, "rng": dict(state.rng)})


def _broadcast(own: bytes | bytearray | memoryview | None) -> memoryview:
    """Rank 0's bytes, of any length."""
    size = torch.tensor(0 if own is None else memoryview(own).nbytes)
    dist.broadcast(size, 0)
    if not size:
        return memoryview(b"")
    values: Tensor = torch.empty(int(size), dtype=torch.uint8) if own is None else torch.frombuffer(bytearray(own), dtype=torch.uint8)
    dist.broadcast(values, 0)
    found: memoryview = values.numpy().data
    return found
