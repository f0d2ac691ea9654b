from __future__ import annotations

import numpy as np
import pytest
import torch

from protocol.errors import WeightError
from weightsync import cast as cast_module
from weightsync.cast import cast
from weightsync.snapshot import TensorBytes

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def of(tensor: torch.Tensor) -> TensorBytes:
    name = next(name for name, dtype in (TORCH | {"I64": torch.int64}).items() if dtype == tensor.dtype)
    return TensorBytes(dtype=name, shape=tuple(tensor.shape), data=bytes(tensor.reshape(-1).view(torch.uint8).numpy()))


@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_numbers_become_what_torch_makes_of_them(monkeypatch: pytest.MonkeyPatch, source: str, wanted: str):
    monkeypatch.setattr(cast_module, "_PIECE", 1000)
    bits = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 32, 20_012, dtype=np.uint32).view(np.int32).copy())
    numbers = bits.view(torch.float32)
    numbers = torch.where(numbers.abs() < 60_000, numbers, 1.5)
    halves = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), 2**-133, 0.0, -0.0, 2**-24, 1 + 2**-11, 1 + 3 * 2**-11])
    tensor = torch.cat([numbers, halves]).to(TORCH[source]).reshape(3, -1)
    made = cast({"w": of(tensor)}, wanted)["w"]
    expected = of(tensor.to(getattr(torch, wanted)))
    assert (made.dtype, made.shape, bytes(made.data)) == (expected.dtype, expected.shape, bytes(expected.data))


def test_every_upper_half_of_a_float_with_a_tie_below_it_rounds_to_even():
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    tensor = torch.from_numpy(bits.view(np.float32).copy())
    ours = np.frombuffer(cast({"w": of(tensor)}, "bfloat16")["w"].data, "<u2")
    theirs = tensor.to(torch.bfloat16).view(torch.int16).numpy().view("<u2")
    ordinary = ~np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(ours[ordinary], theirs[ordinary])
    assert set(ours[~ordinary].tolist()) == {0x7FC0}
    assert np.isinf(torch.from_numpy(ours[[0x7F7F]].view(np.int16).copy()).view(torch.bfloat16).float().numpy()).all(), (
        "beyond the largest: infinite, as torch has it"
    )


def test_nothing_is_copied_where_nothing_changes_and_nothing_shared_where_something_does():
    floats, steps = torch.ones(3), torch.arange(4)
    tensors = {"w": of(floats), "n": of(steps)}
    assert cast(tensors, "") is tensors
    assert cast(tensors, "float32") is tensors
    backing = bytearray(tensors["n"].data)
    tensors["n"] = TensorBytes(dtype="I64", shape=(4,), data=backing)
    made = cast(tensors, "bfloat16")
    backing[:] = bytes(len(backing))
    assert (made["n"].dtype, bytes(made["n"].data)) == ("I64", bytes(of(steps).data))
    assert {name: one.dtype for name, one in made.items()} == {"w": "BF16", "n": "I64"}


@pytest.mark.parametrize("number", [70_000.0, float("inf"), float("nan")])
def test_a_number_that_float16_does_not_reach_is_refused_by_the_name_of_its_tensor(number: float):
    with pytest.raises(WeightError, match=r"model\.w .*float16.*bfloat16"):
        cast({"model.w": of(torch.tensor([1.0, number]))}, "float16")


def test_a_tensor_without_elements_is_cast_too():
    made = cast({"w": TensorBytes(dtype="F32", shape=(0, 4), data=b"")}, "bfloat16")["w"]
    assert (made.dtype, made.shape, made.nbytes) == ("BF16", (0, 4), 0)
