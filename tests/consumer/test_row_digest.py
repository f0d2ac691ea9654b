"""The device's digest: torch's operations and the CUDA kernel against the definition, and what it tells apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from consumer.nvrtc import Kernel, KernelUnavailable
from consumer.row_digest import MARK, ROW_WORDS, row_digest, row_sums

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ROW = 8 * ROW_WORDS


def defined(content: bytes) -> list[int]:
    """The sums as the module's first lines say it."""
    words = np.frombuffer(content + bytes(-len(content) % 8), "<u8")
    sums = []
    for start in range(0, len(words), ROW_WORDS):
        row = words[start : start + ROW_WORDS]
        z = row + np.arange(1, len(row) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        sums.append(int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64)))
    return sums


def noise(size: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def unsigned(sums: torch.Tensor) -> list[int]:
    return sums.cpu().numpy().view(np.uint64).tolist()


SIZES = [0, 1, 7, 8, 9, ROW - 8, ROW - 1, ROW, ROW + 1, ROW + 8, 3 * ROW + 77, 300 * ROW + 5]


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_what_is_defined(size: int):
    content = noise(size)
    assert unsigned(row_sums(content)) == defined(content.numpy().tobytes())


@needs_cuda
@pytest.mark.parametrize("size", SIZES)
def test_a_device_and_its_kernel_give_the_same_sums(size: int):
    content = noise(size)
    there = content.cuda()
    for offset in (0, 3, 8):
        shifted = torch.cat([noise(offset).cuda(), there])[offset:]
        assert unsigned(row_sums(shifted)) == unsigned(row_sums(shifted, kernel=False)) == defined(content.numpy().tobytes())


@needs_cuda
def test_there_is_a_kernel_on_this_device():
    from consumer.row_digest import _kernel

    assert _kernel(torch.device("cuda", torch.cuda.current_device())) is not None


@needs_cuda
def test_a_kernel_that_does_not_compile_says_why():
    with pytest.raises(KernelUnavailable, match="no_such_thing"):
        Kernel('extern "C" __global__ void f() { no_such_thing(); }', "f", torch.device("cuda", 0))


def test_a_machine_without_the_compiler_says_so(monkeypatch: pytest.MonkeyPatch):
    from consumer import nvrtc

    monkeypatch.setattr(nvrtc.torch.version, "cuda", "99.0")
    monkeypatch.setattr(nvrtc.torch, "__file__", str(Path("/nowhere/torch/__init__.py")))
    with pytest.raises(OSError, match=r"libnvrtc\.so\.99"):
        nvrtc._library()


def test_any_changed_element_of_any_type_changes_it():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        tensor = torch.zeros(1003, dtype=dtype)
        seen = {row_digest([{"w": tensor}])}
        for at in (0, 1, 3, 500, 1002):
            other = tensor.clone()
            other[at] = 1
            seen.add(row_digest([{"w": other}]))
        assert len(seen) == 6, dtype


def test_what_moves_is_seen_names_types_and_shapes_too():
    base = noise(2 * ROW + 64)
    rows = torch.cat([base[ROW : 2 * ROW], base[:ROW], base[2 * ROW :]])
    words = base.view(torch.int64).clone()
    words[[0, 1]] = words[[1, 0]]
    one, other = base.view(torch.int16), base.view(torch.float16)
    digests = [
        row_digest([part])
        for part in (
            {"w": base},
            {"w": rows},
            {"w": words.view(torch.uint8)},
            {"v": base},
            {"w": one},
            {"w": other},
            {"w": base.reshape(2, -1)},
            {"w": base[:-8]},
        )
    ]
    assert len(set(digests)) == len(digests)
    a, b = noise(100, 2), noise(100, 3)
    assert row_digest([{"a": a, "b": b}]) != row_digest([{"a": b, "b": a}])
    assert all(one.startswith(MARK) for one in digests)


def test_order_parts_and_layout_in_memory_do_not_matter():
    tensors = {"a": torch.randn(40, 30), "b": torch.randn(7, dtype=torch.bfloat16), "c": torch.randn(())}
    expected = row_digest([tensors])
    for names in itertools.permutations(tensors):
        assert row_digest([{name: tensors[name]} for name in names]) == expected
    transposed = tensors["a"].t().contiguous().t()
    assert not transposed.is_contiguous()
    assert row_digest([tensors | {"a": transposed}]) == expected
    unaligned = torch.cat([torch.zeros(1), tensors["a"].reshape(-1)])[1:].reshape(40, 30)
    assert row_digest([tensors | {"a": unaligned}]) == expected
    assert row_digest([]) != row_digest([{"a": torch.zeros(0)}]) != expected
