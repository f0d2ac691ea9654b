"""torch tensors as plain bytes and back."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightsync.snapshot import TensorBytes

DTYPES = MappingProxyType({
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
})  # fmt: skip
"""The spelling of safetensors by torch's type."""
TORCH = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})


def view_bytes(tensor: Tensor) -> TensorBytes:
    """The memory of a tensor in host memory, not copied where it is contiguous: it changes with the tensor."""
    whole = tensor.detach().contiguous()
    if not whole.numel():
        return TensorBytes(dtype=DTYPES[whole.dtype], shape=tuple(whole.shape), data=b"")
    data: NDArray[np.uint8] = whole.reshape(-1).view(torch.uint8).numpy()
    return TensorBytes(dtype=DTYPES[whole.dtype], shape=tuple(whole.shape), data=data.data)


def copy_out(tensor: Tensor) -> TensorBytes:
    """A copy of a tensor, wherever it is."""
    return view_bytes(tensor.detach().to("cpu", copy=True))


def copy_in(tensor: TensorBytes) -> Tensor:
    """A copy in host memory."""
    dtype: Any = TORCH[tensor.dtype]
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).reshape(tensor.shape)
