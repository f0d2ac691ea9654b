"""Copies that a reader keeps are never written; copies that nobody reads yet give way to newer ones. The same on a device, where there is one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Mapping

import pytest
import torch

from consumer.row_digest import MARK, row_digest
from consumer.snapshot_buffers import SnapshotBuffers
from consumer.tensor_bytes import view_bytes
from protocol.errors import WeightError
from weightsync.cast import cast
from weightsync.snapshot import TensorBytes, digest_of, weights_digest

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
if torch.cuda.is_available():
    torch.zeros(1, device=CUDA).to(CPU).pin_memory()  # the first use opens pipes that the process keeps
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(CUDA, id="cuda", marks=needs_cuda)]


def weights(device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "embed": torch.randn(37, 16, generator=rng),
        "half": torch.randn(5, 3, generator=rng).to(torch.bfloat16),
        "turned": torch.randn(6, 8, generator=rng).t(),
        "steps": torch.tensor(seed),
        "mask": torch.arange(7) % 2 == seed % 2,
        "none": torch.empty(0, 4),
        "scale": torch.randn((), generator=rng),
    }
    unaligned = torch.randn(9, generator=rng).to(device)[1:]
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"unaligned": unaligned}


def as_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorBytes]:
    return {name: view_bytes(tensor.cpu()) for name, tensor in tensors.items()}


def plain(tensors: Mapping[str, TensorBytes]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (one.dtype, one.shape, bytes(one.data)) for name, one in tensors.items()}


def change(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    for name, value in weights(CPU, seed).items():
        tensors[name].copy_(value)


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_what_the_weights_were_to_the_bit_while_they_go_on_changing(device: torch.device):
    tensors = weights(device)
    buffers = SnapshotBuffers(tensors, device)
    for seed in range(6):
        change(tensors, seed)
        expected = plain(as_bytes(tensors))
        held = buffers.take(tensors)
        change(tensors, 100)
        read = held.host()
        assert read is not None
        assert read is held.host()
        assert plain(read) == plain(held) == expected
        held.release()


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_known_by_the_digest_of_its_place(device: torch.device):
    tensors = weights(device)
    held = SnapshotBuffers(tensors, device).take(tensors)
    digest = digest_of(held)
    assert held.plain == (device == CPU)
    if held.plain:
        assert digest == weights_digest(as_bytes(tensors))
    else:
        assert digest == row_digest([weights(CPU)])
        assert digest.startswith(MARK)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_read_stays_and_what_waits_gives_way(device: torch.device):
    tensors = weights(device)
    buffers = SnapshotBuffers(tensors, device)
    change(tensors, 1)
    first = buffers.take(tensors)
    read = first.host()
    assert read is not None
    expected = plain(read)
    waiting = []
    for seed in (2, 3, 4, 5):
        change(tensors, seed)
        waiting.append(buffers.take(tensors))
    assert plain(read) == expected, "written while it was read"
    assert waiting[0].host() is None
    with pytest.raises(WeightError, match="newer"):
        waiting[0]["embed"]
    waiting[0].release()  # by whom it was replaced: changes nothing
    newest = waiting[-1].host()
    assert newest is not None
    assert plain(newest) == plain(as_bytes(tensors))
    assert plain(read) == expected


def test_memory_is_used_again_and_never_more_than_readers_need():
    tensors = weights(CPU)
    buffers = SnapshotBuffers(tensors, CPU)
    seen: set[int] = set()
    base = buffers.take(tensors)
    base.host()
    for _ in range(12):  # a reader that keeps the version before while it reads the next, as deltas need it
        held = buffers.take(tensors)
        assert held.host() is not None
        pending = buffers.take(tensors)
        seen |= {one.buffer.flat.data_ptr() for one in (held, pending, base) if one.buffer is not None}
        base.release()
        base = held
        pending.release()
    assert len(seen) == 3


@needs_cuda
def test_a_device_needs_two_buffers_however_slow_the_reader_is():
    tensors = weights(CUDA)
    buffers = SnapshotBuffers(tensors, CUDA)
    gc.collect()  # of what other tests had there
    before = torch.cuda.memory_allocated()
    kept = [buffers.take(tensors)]
    for _ in range(5):
        kept.append(buffers.take(tensors))
        kept[-1].host()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_device_may_cast_on_the_way_to_what_numpy_would_make(device: torch.device, dtype: str):
    tensors = weights(device)
    held = SnapshotBuffers(tensors, device).take(tensors)
    read = held.host(dtype)
    assert read is not None
    made = cast(read, dtype)
    assert plain(made) == plain(cast(as_bytes(tensors), dtype))
    assert held.plain or made is read


@needs_cuda
def test_what_a_device_has_in_parts_is_copied_to_host_memory_alone():
    tensors = weights(CUDA) | {"offloaded": torch.randn(9, 4)}
    before = torch.cuda.memory_allocated()
    buffers = SnapshotBuffers(tensors, CUDA, on_host=True)
    for seed in range(3):
        change(tensors, seed)
        expected = as_bytes(tensors)
        held = buffers.take(tensors)
        change(tensors, 100)
        read = held.host("bfloat16")
        assert read is not None
        assert plain(read) == plain(expected)
        assert not held.plain
        assert digest_of(held) == row_digest([{name: tensor.to(CUDA) for name, tensor in (weights(CPU, seed) | {"offloaded": tensors["offloaded"]}).items()}])
        held.release()
    assert torch.cuda.memory_allocated() == before


@needs_cuda
def test_a_number_beyond_float16_is_refused_on_the_way_from_a_device():
    tensors = {"w": torch.tensor([1.0, 1e6], device=CUDA)}
    with pytest.raises(WeightError, match=r"tensor w .*float16"):
        SnapshotBuffers(tensors, CUDA).take(tensors).host("float16")


def test_a_failed_copy_gives_its_memory_back():
    tensors = weights(CPU)
    buffers = SnapshotBuffers(tensors, CPU)
    with pytest.raises(RuntimeError):
        buffers.take(tensors | {"embed": torch.zeros(3)})
    assert len(buffers._free) == 1
    assert plain(buffers.take(tensors)) == plain(as_bytes(tensors))


@pytest.mark.parametrize("device", DEVICES)
def test_readers_in_other_threads_see_whole_copies_or_none(device: torch.device):
    """A trainer that takes as fast as it can, and a reader that is slower."""
    tensors = {f"w{i}": torch.zeros(5000, device=device) for i in range(4)}
    buffers = SnapshotBuffers(tensors, device)
    newest, done = [buffers.take(tensors)], threading.Event()
    outcomes: list[str] = []

    def read() -> None:
        while not done.is_set() or len(outcomes) < 3:
            held = newest[-1]
            found = held.host()
            if found is not None:
                first = bytes(found["w0"].data)[:4]
                outcomes.append("whole" if all(bytes(one.data) == first * 5000 for one in found.values()) else "torn")
                held.release()

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, 300):
        for tensor in tensors.values():
            tensor.fill_(step)
        newest.append(buffers.take(tensors))
    done.set()
    newest.append(buffers.take(tensors))
    for _ in range(3):
        if not reader.is_alive():
            break
        newest.append(buffers.take(tensors))
        reader.join(0.5)
    reader.join(20)
    assert not reader.is_alive()
    assert "torn" not in outcomes
    assert outcomes
