"""Stand-in for flashinfer: SGLang 0.5.17 imports these modules on CUDA whatever SGLANG_IS_FLASHINFER_AVAILABLE says."""

from __future__ import annotations

from collections.abc import Callable

from absent import Submodules, served

__version__ = "0.6.15"
_MODULES = ("sampling", "fp4_quantization", "fused_moe", "fused_moe.core", "gemm", "comm", "comm.mnnvl", "prefill")


def _attribute(module: str) -> Callable[[str], object]:
    if module != "flashinfer.comm":
        return served(module)

    def absent(name: str) -> object:
        raise AttributeError(name)  # SGLang asks for its names one by one and does without those that are missing

    return absent


Submodules({f"flashinfer.{module}" for module in _MODULES}, _attribute).install()
__getattr__ = served("flashinfer")
