"""The main file of a server of SGLang: runs in the interpreter that has SGLang, by its path, and imports nothing of rollstream.

`multiprocessing` imports it again in every process that the server starts, so what is done at its top holds in all of them:

- the server dies with the host that started it, and its processes with it (SGLang ties those to their parent itself)
- keys come from the environment, and never appear in the log
- without CUDA: SGLang's CPU path needs none of its compiled kernels for dense models where the CPU has no AMX, but imports them. They are replaced by names
  that raise when called. And torchvision from PyPI, whose library does not load beside a torch for CPUs, needs two operators to be declared. Its LoRA asks for
  pinned memory, which there is none of without a device, and the halves of an engine hand over a device's: both get ordinary memory.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PARENT = "ROLLSTREAM_ENGINE_HOST_PID"
_KEYS = {"--api-key": "ROLLSTREAM_ENGINE_KEY", "--admin-api-key": "ROLLSTREAM_ENGINE_ADMIN_KEY"}
_PR_SET_PDEATHSIG = 1
_KERNELS = "sgl_kernel"
_KERNELS_VERSION = "0.4.10"


def _die_with_the_host() -> None:
    """The host may be gone already: then nobody would ever send the signal."""
    host = os.environ.pop(_PARENT, "")  # popped: the server's own processes have another parent
    if host:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(host):
            os._exit(1)


def _hide_keys() -> None:
    """SGLang logs its arguments when it starts."""
    secrets = [os.environ[name] for name in _KEYS.values() if os.environ.get(name)]
    make = logging.getLogRecordFactory()

    def hidden(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001 - a malformed call, which logging itself only prints
            text = f"{record.msg} {record.args}"
        if any(secret in text for secret in secrets):
            for secret in secrets:
                text = text.replace(secret, "***")
            record.msg, record.args = text, ()
        return record

    if secrets:
        logging.setLogRecordFactory(hidden)


class _Kernel:
    """A compiled kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"{self.__name__} is a compiled kernel of SGLang, which this CPU installation does not have: use a dense model")

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _KernelModule(types.ModuleType):
    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.__name__}.{name}")


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the kernels' package."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - the import system's signature
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == _KERNELS else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _KernelModule(spec.name)
        module.__dict__.update(__path__=[], __version__=_KERNELS_VERSION)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _do_without_kernels() -> None:
    from torch import library as operators

    for name in ("nms", "qnms"):
        operators.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.meta_path.insert(0, _KernelFinder())


def _do_without_pinned_memory() -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]


def _do_without_device_memory() -> None:
    """What a prefill hands to a decode lies in ordinary memory here, and SGLang calls it a device's."""
    from nixl import _bindings

    _bindings.VRAM_SEG = _bindings.DRAM_SEG


def _serve() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    keys = [word for flag, name in _KEYS.items() if os.environ.get(name) for word in (flag, os.environ[name])]
    try:
        run_server(prepare_server_args([*sys.argv[1:], *keys]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


_die_with_the_host()
_hide_keys()
if sys.path and Path(sys.path[0]).absolute() == Path(__file__).absolute().parent:
    del sys.path[0]  # what lies beside this file is rollstream's
if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    _do_without_kernels()
    if "--enable-lora" in sys.argv:
        _do_without_pinned_memory()
    if "--disaggregation-mode" in sys.argv:
        _do_without_device_memory()

if __name__ == "__main__":
    _serve()
