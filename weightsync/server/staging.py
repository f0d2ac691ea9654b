"""Versions from files onto the device, checked on the way: the checksum is of the very bytes that engines will get.

    mapped file ──copy──► flat buffer                                     (cpu)
    mapped file ──copy──► pinned ring ──own stream──► flat buffer         (cuda)

Nothing here blocks a sender: copies run on threads and streams of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from protocol.errors import ManifestError, TransportFailed
from protocol.messages import Manifest, TensorEntry
from weightsync.buckets import Bucket, plan
from weightsync.server.shelf import Staged
from weightsync.snapshot import TensorBytes

if TYPE_CHECKING:
    import torch

_SLOT_BYTES = 32 << 20
_SLOTS = 2
_THREADS = 8

Bytes = npt.NDArray[np.uint8]


class _Sink(Protocol):
    """Where one thread copies to."""

    def copy(self, source: Bytes, target: torch.Tensor) -> str:
        """Copy, and return the xxh3-64 of what was copied."""

    def drain(self) -> None:
        """Return once all copies have arrived."""


class _Host:
    def copy(self, source: Bytes, target: torch.Tensor) -> str:
        into: Bytes = target.numpy()
        np.copyto(into, source)
        return xxhash.xxh3_64_hexdigest(into.data)

    def drain(self) -> None:
        return


class _Ring:
    """Pinned slots and a stream of one thread: while one slot travels, the next is filled and hashed."""

    def __init__(self, device: torch.device) -> None:
        import torch

        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self._slots = [torch.empty(_SLOT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_SLOTS)]
        self._views: list[Bytes] = [slot.numpy() for slot in self._slots]
        self._free = [torch.cuda.Event() for _ in range(_SLOTS)]  # type: ignore[no-untyped-call, unused-ignore]
        self._next = 0

    def copy(self, source: Bytes, target: torch.Tensor) -> str:
        import torch

        mark = xxhash.xxh3_64()
        for low in range(0, source.size, _SLOT_BYTES):
            at, self._next = self._next, (self._next + 1) % _SLOTS
            size = min(_SLOT_BYTES, source.size - low)
            self._free[at].synchronize()  # of an event that was never recorded: at once
            filled = self._views[at][:size]
            np.copyto(filled, source[low : low + size])
            mark.update(filled.data)
            with torch.cuda.stream(self._stream):
                target[low : low + size].copy_(self._slots[at][:size], non_blocking=True)
                self._free[at].record(self._stream)
        return mark.hexdigest()

    def drain(self) -> None:
        self._stream.synchronize()


class Stager:
    """Copies versions to `device`. Its threads and pinned memory are kept from one version to the next."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._threads = min(_THREADS, os.cpu_count() or 1)
        self._sinks: list[_Sink] = []

    def stage(self, manifest: Manifest, tensors: Mapping[str, TensorBytes], memory: Sequence[torch.Tensor]) -> Staged:
        """The version on the device. `memory`: of a version that was given up; used where it fits.

        Raises: `ManifestError` naming the tensor; `TransportFailed` where the device is at fault.
        """
        buckets = plan(manifest, self._bucket_bytes)
        entries = {entry.name: entry for entry in manifest.tensors}
        try:
            flat = self._memory(buckets, memory)
            work = [
                (entries[name], flat[at][offset : offset + _nbytes(bucket, place)])
                for at, bucket in enumerate(buckets)
                for place, (name, offset) in enumerate(zip(bucket.names, bucket.offsets, strict=True))
            ]
            work.sort(key=lambda one: -one[1].numel())
            self._copy_all(manifest, tensors, work)
        except RuntimeError as problem:  # out of memory is one of these
            raise TransportFailed(f"version {manifest.version} cannot be staged on {self._device}: {problem!s:.300}") from problem
        return Staged(version=manifest.version, digest=manifest.digest, buckets=buckets, memory=flat)

    def _memory(self, buckets: Sequence[Bucket], old: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        import torch

        sizes = [bucket.nbytes for bucket in buckets]
        if [flat.numel() for flat in old] == sizes:
            return tuple(old)
        return tuple(torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes)

    def _copy_all(self, manifest: Manifest, tensors: Mapping[str, TensorBytes], work: Sequence[tuple[TensorEntry, torch.Tensor]]) -> None:
        """Thread i takes every n-th of the tensors, largest first."""
        while len(self._sinks) < self._threads:
            self._sinks.append(_Ring(self._device) if self._device.type == "cuda" else _Host())
        with ThreadPoolExecutor(self._threads, thread_name_prefix="stage") as pool:
            copies = [pool.submit(self._copy_some, manifest, tensors, work[i :: self._threads], sink) for i, sink in enumerate(self._sinks)]
        for copy in copies:
            copy.result()

    def _copy_some(self, manifest: Manifest, tensors: Mapping[str, TensorBytes], work: Sequence[tuple[TensorEntry, torch.Tensor]], sink: _Sink) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)
        try:
            for entry, target in work:
                _copy(manifest, entry, tensors.get(entry.name), target, sink)
        finally:
            sink.drain()


def _copy(manifest: Manifest, entry: TensorEntry, tensor: TensorBytes | None, target: torch.Tensor, sink: _Sink) -> None:
    if tensor is None:
        raise ManifestError(f"version {manifest.version}: tensor {entry.name} is not in {entry.file}")
    if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
        raise ManifestError(f"version {manifest.version}: tensor {entry.name} is {tensor.dtype} {tensor.shape}, expected {entry.dtype} {entry.shape}")
    if not tensor.nbytes:
        checksum = xxhash.xxh3_64_hexdigest(b"")
    else:
        source: Bytes = np.frombuffer(tensor.data, dtype=np.uint8)
        try:
            checksum = sink.copy(source, target)
        finally:
            del source  # a map that is still looked at cannot be closed, and the traceback of an error would go on looking
    if checksum != entry.checksum:
        raise ManifestError(f"version {manifest.version}: tensor {entry.name} has checksum {checksum}, expected {entry.checksum}: its bytes are damaged")


def _nbytes(bucket: Bucket, place: int) -> int:
    end = bucket.offsets[place + 1] if place + 1 < len(bucket.offsets) else bucket.nbytes
    return end - bucket.offsets[place]
