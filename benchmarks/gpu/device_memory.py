"""Memory of GPUs while a run goes on: of each GPU in all, and of each part of the run where the driver tells it by process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from deploy.up.records import read_records

_LOOK_S = 0.5


class DeviceMemory:
    """`async with watched(…) as memory`; `told` afterwards."""

    def __init__(self) -> None:
        self.peak: dict[int, int] = {}
        """Bytes, by GPU."""
        self.parts: dict[str, tuple[int, int]] = {}
        """Fewest and most bytes, by part of the run, from when it had any; over all GPUs."""
        self.looks = 0

    @property
    def told(self) -> dict[str, Any]:
        return {
            "peak_bytes": {str(gpu): peak for gpu, peak in self.peak.items()},
            "parts": {part: {"least_bytes": least, "most_bytes": most} for part, (least, most) in self.parts.items()},
            "looks": self.looks,
        }

    def seen(self, used: Mapping[int, int], parts: Mapping[str, int]) -> None:
        """`used`: bytes by GPU; `parts`: by part of the run.

        >>> memory = DeviceMemory()
        >>> memory.seen({0: 5}, {"trainer-0": 2}), memory.seen({0: 4}, {"trainer-0": 3, "engine-0": 1})
        (None, None)
        >>> memory.peak, memory.parts
        ({0: 5}, {'trainer-0': (2, 3), 'engine-0': (1, 1)})
        """
        self.looks += 1
        for gpu, bytes_ in used.items():
            self.peak[gpu] = max(self.peak.get(gpu, 0), bytes_)
        for part, bytes_ in parts.items():
            least, most = self.parts.get(part, (bytes_, bytes_))
            self.parts[part] = min(least, bytes_), max(most, bytes_)


@contextlib.asynccontextmanager
async def watched(folder: Path, gpus: tuple[int, ...]) -> AsyncIterator[DeviceMemory]:
    """Looks twice a second, as long as the context is open; never, where there is no GPU or nobody to ask. `folder`: of the run."""
    memory = DeviceMemory()
    task = asyncio.create_task(_watch(memory, folder, gpus), name="memory")
    try:
        yield memory
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _watch(memory: DeviceMemory, folder: Path, gpus: tuple[int, ...]) -> None:
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
        handles = {gpu: pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in gpus}
    except pynvml.NVMLError:
        return
    while True:
        with contextlib.suppress(pynvml.NVMLError):
            used = {gpu: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for gpu, handle in handles.items()}
            by_pid: dict[int, int] = {}
            for handle in handles.values():
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    by_pid[process.pid] = by_pid.get(process.pid, 0) + int(process.usedGpuMemory or 0)
            memory.seen(used, _by_part(by_pid, {record.identity.pid: str(record.child) for record in read_records(folder)}))
        await asyncio.sleep(_LOOK_S)


def _by_part(by_pid: Mapping[int, int], parts: Mapping[int, str]) -> dict[str, int]:
    """A process belongs to the part that it descends from; of one that is nobody's, nothing is told."""
    found: dict[str, int] = {}
    for pid, bytes_ in by_pid.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            owner = next((parts[one.pid] for one in (process, *process.parents()) if one.pid in parts), None)
            if owner is not None:
                found[owner] = found.get(owner, 0) + bytes_
    return found
