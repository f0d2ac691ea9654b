"""Copies of the weights in memory that is used again: the only part of publishing that training waits for.

    take ──► held ── host() ──► read ── release() ──► free
               └── a newer take finds no free buffer ──► taken over; host() says None

On a CPU a buffer is host memory, and what `host` gives are views of it. On a CUDA device `take` copies from device memory to device memory; `host` then copies
to pinned host memory on a stream of its own, in the publisher's thread, and the device's buffer is free again as soon as that is done. Where the device has a
part of the weights only, or none (`on_host`), there is no room for two whole copies: buffers are pinned host memory, `take` copies there, and waits for that.

Invariants: a buffer is written only by `take`, and never between `host` and `release`. A copy that nobody reads yet may be lost to a newer one, so two buffers
are enough on a device while one is read at a time; on a CPU a reader that keeps two makes it three.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.gather import whole
from consumer.row_digest import row_digest
from consumer.tensor_bytes import DTYPES, view_bytes
from weightsync.cast import FLOATS, refuse_infinite
from weightsync.snapshot import HeldWeights, TensorBytes, weights_digest

_ALIGN = 256
_WORD = 8
_ON_DEVICE = 2
_PIECE = 64 << 20
"""Bytes of one copy to the host: a millisecond, so that copies of the training thread get in between."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    flat: Tensor
    views: dict[str, Tensor]


class SnapshotBuffers:
    """`take` from the thread that trains; what it returns may be used in any.

    `tensors`: what will be copied, by name, plain or sharded. With a device, memory for two copies is taken at once, there or `on_host`.
    Raises: torch's error if the device has not that much.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, *, on_host: bool = False) -> None:
        self._layout = {name: (tensor.dtype, torch.Size(tensor.shape)) for name, tensor in tensors.items()}
        self._device, self._on_host = device, on_host and device.type == "cuda"
        self._lock = threading.Lock()
        self._waiting: list[BufferedWeights] = []
        """That nobody reads yet, oldest first."""
        self._pinned: list[Tensor] = []
        self._free: list[_Buffer] = []
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            if not self._on_host:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
            self._free = [self._made() for _ in range(_ON_DEVICE)]
            _warm_up(device)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> BufferedWeights:
        """A copy of `tensors`, complete on return: they may change then. Sharded ones are gathered by bucket; every process of their mesh must call it."""
        buffer = self._claim()
        try:
            parts, digest = self._copied(tensors, buffer), ""
            if self._on_host:
                digest = row_digest(on_device(parts, self._device))  # while they are there
            for _ in parts:
                pass
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        except BaseException:
            self._give_back(buffer)
            raise
        held = BufferedWeights(self, buffer, plain=self._device.type != "cuda", on_host=self._stream is None, digest=digest)
        with self._lock:
            self._waiting.append(held)
        return held

    # -- for BufferedWeights ---------------------------------------------------------------------------------------------------------------------

    def start_reading(self, held: BufferedWeights) -> _Buffer | None:
        """From here on nobody takes it over; None if somebody has."""
        with self._lock:
            self._forget(held)
            return held.buffer

    def stop(self, held: BufferedWeights) -> None:
        with self._lock:
            self._forget(held)
            buffer, held.buffer = held.buffer, None
        if buffer is not None:
            self._give_back(buffer)

    def to_host(self, buffer: _Buffer, dtype: torch.dtype | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Pinned host memory and the tensors in it, floats in `dtype`. Blocks its own thread only."""
        assert self._stream is not None
        layout = {name: (dtype if dtype is not None and DTYPES[old] in FLOATS else old, shape) for name, (old, shape) in self._layout.items()}
        places, size = _places(layout)
        with self._lock:
            fitting = [one for one in self._pinned if one.numel() == size]
            self._pinned = fitting[1:]
        with torch.cuda.stream(self._stream), torch.no_grad():  # of its device too, which this thread may not have used yet
            pinned = fitting[0] if fitting else torch.empty(size, dtype=torch.uint8, pin_memory=True)
            views = _views(pinned, layout, places)
            if layout == self._layout:
                for at in range(0, size, _PIECE):
                    pinned[at : at + _PIECE].copy_(buffer.flat[at : at + _PIECE], non_blocking=True)
            else:
                for name, view in views.items():
                    source, target = buffer.views[name].reshape(-1), view.view(-1)
                    step = _PIECE // view.element_size()
                    for at in range(0, source.numel(), step):
                        target[at : at + step].copy_(source[at : at + step].to(view.dtype), non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call, unused-ignore]
            done.record(self._stream)  # type: ignore[no-untyped-call, unused-ignore]
        done.synchronize()  # type: ignore[no-untyped-call, unused-ignore]
        return pinned, views

    def give_back_pinned(self, pinned: Tensor) -> None:
        with self._lock:
            self._pinned.append(pinned)

    # -- parts -----------------------------------------------------------------------------------------------------------------------------------

    def _copied(self, tensors: Mapping[str, Tensor], buffer: _Buffer) -> Iterator[dict[str, Tensor]]:
        """Each bucket, its copy under way."""
        for part in whole(tensors):
            _copy(buffer.views, part, wait=self._device.type != "cuda")
            yield part

    def _claim(self) -> _Buffer:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._waiting:
                oldest = self._waiting.pop(0)
                buffer, oldest.buffer = oldest.buffer, None
                assert buffer is not None
                return buffer
        return self._made()

    def _forget(self, held: BufferedWeights) -> None:
        self._waiting = [one for one in self._waiting if one is not held]

    def _give_back(self, buffer: _Buffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def _made(self) -> _Buffer:
        places, size = _places(self._layout)
        place = torch.device("cpu") if self._on_host else self._device
        flat = torch.empty(size, dtype=torch.uint8, device=place, pin_memory=self._on_host)
        return _Buffer(flat=flat, views=_views(flat, self._layout, places))


class BufferedWeights(HeldWeights):
    """Made by `SnapshotBuffers.take`. `digest` on a device is `consumer.row_digest`."""

    def __init__(self, buffers: SnapshotBuffers, buffer: _Buffer, *, plain: bool, on_host: bool, digest: str = "") -> None:
        """`digest`: what it is, if that is known already."""
        self.plain, self._on_host, self._digest = plain, on_host, digest
        self.buffer: _Buffer | None = buffer
        """Of `buffers`, under its lock; None: given back, or taken over."""
        self._buffers = buffers
        self._host: dict[str, TensorBytes] | None = None
        self._pinned: Tensor | None = None
        self._once = threading.Lock()

    def digest(self) -> str:
        buffer = self.buffer
        if self._digest:
            return self._digest
        assert buffer is not None, "digest() comes before the memory is given back"
        return weights_digest(_bytes(buffer.views)) if self.plain else row_digest([buffer.views])

    def host(self, dtype: str = "") -> Mapping[str, TensorBytes] | None:
        with self._once:
            if self._host is None:
                self._host = self._read(dtype)
            return self._host

    def release(self) -> None:
        with self._once:
            self._host = None
            pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._buffers.give_back_pinned(pinned)
        self._buffers.stop(self)

    def _read(self, dtype: str) -> dict[str, TensorBytes] | None:
        buffer = self._buffers.start_reading(self)
        if buffer is None:
            return None
        if self._on_host:
            return _bytes(buffer.views)
        self._pinned, views = self._buffers.to_host(buffer, getattr(torch, dtype) if dtype else None)
        self._buffers.stop(self)
        found = _bytes(views)
        for name, tensor in found.items():
            refuse_infinite(name, tensor)
        return found


def on_device(parts: Iterable[Mapping[str, Tensor]], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Each part there, to be digested; what lies there already is not copied."""
    for part in parts:
        yield {name: tensor.to(device) for name, tensor in part.items()}


def _warm_up(device: torch.device) -> None:
    """Kernels are compiled and loaded when they are first used: not while training waits."""
    words = torch.zeros(8, dtype=torch.int64, device=device)
    torch._foreach_copy_([words.clone()], [words])
    row_digest([{"words": words}])


def _copy(views: Mapping[str, Tensor], part: Mapping[str, Tensor], *, wait: bool) -> None:
    """Into `views`; what lies in one piece by words of 8 bytes in a few launches, whatever its type."""
    targets, sources = [], []
    for name, source in part.items():
        target = views[name]
        aligned = source.is_contiguous() and not (source.data_ptr() % _WORD or source.nbytes % _WORD)
        if source.dtype == target.dtype and source.device == target.device and aligned and source.numel():
            targets.append(target.view(-1).view(torch.int64))
            sources.append(source.view(-1).view(torch.int64))
        else:
            target.copy_(source, non_blocking=not wait)
    if targets:
        torch._foreach_copy_(targets, sources)


def _places(layout: Mapping[str, tuple[torch.dtype, torch.Size]]) -> tuple[dict[str, tuple[int, int]], int]:
    """First byte and end of each tensor, and the size of all."""
    places, size = {}, 0
    for name, (dtype, shape) in layout.items():
        nbytes = math.prod(shape) * dtype.itemsize
        places[name] = (size, size + nbytes)
        size += -(-nbytes // _ALIGN) * _ALIGN
    return places, size


def _views(flat: Tensor, layout: Mapping[str, tuple[torch.dtype, torch.Size]], places: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {name: flat[slice(*places[name])].view(dtype).view(shape) for name, (dtype, shape) in layout.items()}


def _bytes(views: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    return {name: view_bytes(view) for name, view in views.items()}
