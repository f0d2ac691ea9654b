"""A checkpoint's state from rank 0, which has read it, to the backends of all ranks.

A backend that cuts it up itself (`scatters`) needs it on rank 0 alone. Any other gets it whole on every rank: by broadcast through host memory, a tensor at a
time.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from consumer.backend import Backend, TrainingState
from protocol.frames import MAX_FRAME_BYTES, open_frame, write_frame
from weightsync.snapshot import TensorBytes

_LAYOUT = "state_layout"
_EMPTY = TrainingState(weights={}, optimizer={}, rng={})


def hand_over(backend: Backend, state: TrainingState | None) -> None:
    """`backend.restore` on every rank of the default group, which all call this; `state` is rank 0's, None elsewhere."""
    if getattr(backend, "scatters", False):
        backend.restore(_EMPTY if state is None else state)
    else:
        backend.restore(broadcast_state(state))


def broadcast_state(state: TrainingState | None) -> TrainingState:
    """Rank 0's, on every rank."""
    layout = _broadcast(None if state is None else _layout(state))
    body = open_frame(_LAYOUT, layout, MAX_FRAME_BYTES)
    found: dict[str, dict[str, TensorBytes]] = {"weights": {}, "optimizer": {}}
    for part, name, dtype, shape in body["tensors"]:
        own = None if state is None else cast("TensorBytes", getattr(state, part)[name])
        data = _broadcast(None if own is None else own.data)
        found[part][name] = TensorBytes(dtype=dtype, shape=tuple(shape), data=data)
    return TrainingState(weights=found["weights"], optimizer=found["optimizer"], rng=body["rng"])


def _layout(state: TrainingState) -> bytes:
    tensors = [[part, name, tensor.dtype, list(tensor.shape)] for part in ("weights", "optimizer") for name, tensor in getattr(state, part).items()]
    return write_frame(_LAYOUT, {"tensors": tensors, "rng": dict(state.rng)})


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
