"""Lets megatron-core compute on a CPU over gloo, for these tests alone: where it names a CUDA device, host memory is taken. Refuses to work beside a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Between its start and end, in this thread."""
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: test on it, without the shim")
    import megatron.core.tensor_parallel.random as randomness

    def nothing(*_: object, **__: object) -> None:
        """Host computations are over when they return, and nothing here draws random numbers."""

    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = nothing  # type: ignore[assignment]
    tracker: Any = randomness.CudaRNGStatesTracker
    tracker.add, tracker.fork = nothing, lambda *_, **__: contextlib.nullcontext()
    randomness._get_cuda_rng_state = randomness._set_cuda_rng_state = nothing  # type: ignore[assignment]
    with _CudaIsCpu():
        yield


class _CudaIsCpu(TorchFunctionMode):
    """`device="cuda"` means host memory, and a tensor there says that it is a CUDA tensor: megatron-core's optimizers take no others."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not options:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in options:
            options["device"] = _host(options["device"])
        if function is torch.Tensor.to:
            args = (args[0], *map(_host, args[1:]))
        return function(*args, **options)


def _host(value: Any) -> Any:
    named = isinstance(value, torch.device) and value.type == "cuda"
    return _CPU if named or (isinstance(value, str) and value.startswith("cuda")) else value
