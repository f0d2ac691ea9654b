"""One CUDA kernel from its source, by the run-time compiler that comes with torch: no toolkit and no C compiler is needed.

Source: NVRTC and CUDA driver API, CUDA toolkit documentation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class KernelUnavailable(Exception):
    """The kernel cannot be had here; the same has to be computed without it."""


class Kernel:
    """`Kernel(source, name, device)`: compiled for `device`, callable from any thread.

    Raises: `KernelUnavailable` with the compiler's words.
    """

    def __init__(self, source: str, name: str, device: torch.device) -> None:
        index = torch.cuda.current_device() if str(device) == "cuda" else device.index
        major, minor = torch.cuda.get_device_capability(index)
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
            image = _compile(_library(), source, f"--gpu-architecture=sm_{major}{minor}")
        except (OSError, AttributeError) as problem:
            raise KernelUnavailable(f"no run-time compiler for CUDA ({problem})") from problem
        torch.cuda.synchronize(index)  # the device's context exists from here on
        self._context = ctypes.c_void_p()
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._call("cuCtxSetCurrent", self._context)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, ctypes.c_char_p(name.encode()))

    def __call__(self, *, grid: int, block: int, arguments: Sequence[Any], stream: int) -> None:
        """Launch on a stream, by its handle. `arguments`: ctypes values, pointers as `c_void_p`; what they point to must live until the stream is through.

        Raises: `KernelUnavailable` if the launch is refused.
        """
        self._call("cuCtxSetCurrent", self._context)  # a thread that has not used CUDA yet has none
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.cast(ctypes.pointer(one), ctypes.c_void_p) for one in arguments))
        sizes = [ctypes.c_uint(one) for one in (grid, 1, 1, block, 1, 1, 0)]
        self._call("cuLaunchKernel", self._function, *sizes, ctypes.c_void_p(stream), places, None)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise KernelUnavailable(f"{name} answered {code}")


def _library() -> ctypes.CDLL:
    """The compiler of torch's own CUDA version: where the loader finds it, or in the packages that torch's wheels depend on."""
    major = str(torch.version.cuda).partition(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parent.parent / "nvidia"
    tried = [
        name,
        *(str(path) for path in sorted(packages.glob(f"*/lib/{name}"))),
        *(str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libnvrtc*.so*"))),
    ]
    for one in tried:
        try:
            return ctypes.CDLL(one)
        except OSError:
            continue
    raise OSError(f"{name} is neither known to the loader nor below {packages}")


def _compile(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if code := nvrtc.nvrtcCreateProgram(ctypes.byref(program), ctypes.c_char_p(source.encode()), ctypes.c_char_p(b"kernel.cu"), 0, None, None):
        raise KernelUnavailable(f"nvrtcCreateProgram answered {code}")
    try:
        options = (ctypes.c_char_p * 1)(architecture.encode())
        if code := nvrtc.nvrtcCompileProgram(program, 1, options):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(1, size.value))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KernelUnavailable(f"nvrtcCompileProgram answered {code}: {log.value.decode(errors='replace')[:500]}")
        if code := nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            raise KernelUnavailable(f"nvrtcGetCUBINSize answered {code}")
        image = ctypes.create_string_buffer(size.value)
        if code := nvrtc.nvrtcGetCUBIN(program, image):
            raise KernelUnavailable(f"nvrtcGetCUBIN answered {code}")
        return image.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
