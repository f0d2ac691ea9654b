"""Weights in the type that engines compute in: half the bytes to write, send and load.

Rounding is to the nearest, ties to even, as torch and every GPU round; numbers without a value (NaN) become one such number. float64 goes by way of float32.

>>> import numpy as np
>>> ones = TensorBytes(dtype="F32", shape=(3,), data=np.array([1.0, 1.00390625, -2.5], "<f4").tobytes())
>>> [hex(bits) for bits in np.frombuffer(cast({"w": ones}, "bfloat16")["w"].data, "<u2")]
['0x3f80', '0x3f80', '0xc020']
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protocol.errors import WeightError
from weightsync.snapshot import ITEM_BYTES, TensorBytes
from weightsync.spread import spread

SPELLED = MappingProxyType({"float32": "F32", "bfloat16": "BF16", "float16": "F16"})
"""safetensors' spelling of what `weights.dtype` may be."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What is cast; integers, booleans and 8-bit floats stay as they are."""
_NUMPY = MappingProxyType({"F64": "<f8", "F32": "<f4", "F16": "<f2"})
_PIECE = 1 << 20
"""Elements at a time: they and what they become stay in a core's cache."""
_Array: TypeAlias = "NDArray[Any]"


def cast(tensors: Mapping[str, TensorBytes], dtype: str) -> Mapping[str, TensorBytes]:
    """`tensors` with every float in `dtype` (torch's name; "" as they are). The same mapping if nothing changes; else nothing in it shares memory with it.

    Raises: `WeightError` naming a tensor that holds a number beyond `dtype`, or no finite number.
    """
    wanted = SPELLED.get(dtype, "")
    if not wanted or all(tensor.dtype == wanted or tensor.dtype not in FLOATS for tensor in tensors.values()):
        return tensors
    made: dict[str, TensorBytes] = {}
    work: list[tuple[str, _Array, _Array, str]] = []
    for name, tensor in tensors.items():
        new = wanted if tensor.dtype in FLOATS else tensor.dtype
        if new == tensor.dtype:
            made[name] = TensorBytes(dtype=new, shape=tensor.shape, data=bytes(tensor.data))
            continue
        source = _elements(tensor)
        target: _Array = np.empty(len(source), "<u2" if new == "BF16" else _NUMPY[new])
        made[name] = TensorBytes(dtype=new, shape=tensor.shape, data=target.view(np.uint8).data)
        work += [(name, source[at : at + _PIECE], target[at : at + _PIECE], tensor.dtype) for at in range(0, len(source), _PIECE)]
    spread(lambda piece: _piece(*piece, wanted), work)
    return made


def refuse_infinite(name: str, tensor: TensorBytes) -> None:
    """Raises: `WeightError` if a number of a float16 tensor became infinite."""
    if tensor.dtype == "F16" and not bool(np.isfinite(np.frombuffer(tensor.data, "<f2")).all()):
        raise WeightError(_BEYOND.format(name=name, dtype="float16"))


_BEYOND = "tensor {name} holds a number that {dtype} does not reach, or none at all: set weights.dtype to bfloat16, or look at the gradients of the last steps"


def _elements(tensor: TensorBytes) -> _Array:
    found: _Array = np.frombuffer(tensor.data, "<u2" if tensor.dtype == "BF16" else _NUMPY[tensor.dtype])
    assert found.nbytes == tensor.nbytes == len(found) * ITEM_BYTES[tensor.dtype]
    return found


def _piece(name: str, source: _Array, target: _Array, dtype: str, wanted: str) -> None:
    if dtype == "BF16":
        source = (source.astype("<u4") << 16).view("<f4")
    if wanted == "BF16":
        target[:] = _rounded(source.astype("<f4", copy=False))
        return
    with np.errstate(over="ignore"):
        target[:] = source
    if wanted == "F16" and not np.isfinite(target).all():
        raise WeightError(_BEYOND.format(name=name, dtype="float16"))


def _rounded(numbers: _Array) -> _Array:
    """The upper halves of float32, to nearest even."""
    bits = numbers.view("<u4")
    rounded: _Array = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
    rounded[np.isnan(numbers)] = 0x7FC0
    return rounded
