"""Tensors in this process's GPU memory as CUDA IPC handles that SGLang's `/update_weights_from_tensor` takes. Same host, same GPU.

The payload is pickle because that endpoint knows nothing else: the one stated exception to "no pickle on the wire" (rule W10). It is made here and read by
SGLang; this project reads none.
"""

from __future__ import annotations

import base64
import io
import math
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from weightsync.server.shelf import Staged

if TYPE_CHECKING:
    import torch

_DEVICE_ARGUMENT = 6
"""Place of the device's number among the arguments of torch's `rebuild_cuda_tensor`."""


def payload(staged: Staged) -> str:
    """All tensors of a version for one rank of one engine, base64. Good for being read once.

    The memory belongs to the server for ever; whoever uses a payload keeps a hold on the version until the engine has answered something later. So each
    payload is made of aliases that own nothing: torch counts the readers of each, and what is never read costs no memory of the device.
    """
    return base64.b64encode(_dump(aliases(staged))).decode()


def aliases(staged: Staged) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a version, by name, in memory that they do not own."""
    import torch

    tensors: list[tuple[str, torch.Tensor]] = []
    for bucket, flat in zip(staged.buckets, staged.memory, strict=True):
        storage = torch._C._construct_storage_from_data_pointer(flat.data_ptr(), flat.device, flat.numel())  # noqa: SLF001 - there is no public way
        for name, dtype, shape, offset in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
            kind: torch.dtype = getattr(torch, dtype)
            tensor = torch.empty(0, dtype=kind, device=flat.device)
            tensor.set_(storage, offset // kind.itemsize, shape, _contiguous(shape))
            tensors.append((name, tensor))
    return tensors


def collect() -> None:
    """Let go of what readers have given back."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call, unused-ignore]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _dump(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    import torch
    from torch.multiprocessing import reductions

    def reduce(tensor: torch.Tensor) -> Any:
        rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call, unused-ignore]
        device = arguments[_DEVICE_ARGUMENT]
        if isinstance(device, int):  # the engine may number its GPUs otherwise; its side of this looks the id up
            device = str(torch.cuda.get_device_properties(device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], device, *arguments[_DEVICE_ARGUMENT + 1 :])

    out = io.BytesIO()
    pickler = ForkingPickler(out)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: reduce}
    pickler.dump(tensors)
    return out.getvalue()
