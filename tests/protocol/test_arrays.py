from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.arrays import DTYPES, Array, pack, unpack, unpack_as
from protocol.errors import DecodeError
from tests.protocol.samples import same_array

ARRAYS = hnp.arrays(st.sampled_from(sorted(DTYPES)), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))


@given(ARRAYS)
def test_an_array_reads_back_equal(array: Array) -> None:
    assert same_array(unpack(msgpack.unpackb(msgpack.packb(pack(array))), "x"), array)


@given(ARRAYS)
def test_strided_and_big_endian_arrays_become_plain_ones(array: Array) -> None:
    assert same_array(unpack(pack(array.T), "x"), np.ascontiguousarray(array.T).reshape(array.T.shape))
    assert np.array_equal(unpack(pack(array.astype(array.dtype.newbyteorder(">"))), "x"), array, equal_nan=True)


def test_a_decoded_array_is_a_read_only_view() -> None:
    data = np.arange(4, dtype="<i4").tobytes()
    array = unpack({"dtype": "<i4", "shape": [4], "data": data}, "x")
    assert np.shares_memory(array, np.frombuffer(data, dtype="u1"))
    assert not array.flags.writeable


@pytest.mark.parametrize("dtype", ["?", "O", "U3", "complex64", "datetime64[s]", "uint64"])
def test_a_dtype_without_a_wire_form_is_the_caller_s_bug(dtype: str) -> None:
    with pytest.raises(ValueError, match="has no wire form"):
        pack(np.zeros(2, dtype=dtype))


@pytest.mark.parametrize(
    ("wire", "place"),
    [
        (None, "x: expected an array, got NoneType"),
        ({}, r"x.dtype: got None"),
        ({"dtype": "|O", "shape": [1], "data": bytes(8)}, r"x.dtype: got '\|O'"),
        ({"dtype": ["<i4"], "shape": [1], "data": bytes(4)}, r"x.dtype: got \['<i4'\]"),
        ({"dtype": ">i4", "shape": [1], "data": bytes(4)}, "x.dtype: got '>i4'"),
        ({"dtype": "<i4", "shape": 1, "data": bytes(4)}, "x.shape: got 1"),
        ({"dtype": "<i4", "shape": [-1], "data": bytes(4)}, r"x.shape: got \[-1\]"),
        ({"dtype": "<i4", "shape": [True], "data": bytes(4)}, r"x.shape: got \[True\]"),
        ({"dtype": "<i4", "shape": [1.0], "data": bytes(4)}, r"x.shape: got \[1.0\]"),
        ({"dtype": "<i4", "shape": [1] * 9, "data": bytes(4)}, "x.shape: got"),
        ({"dtype": "<i4", "shape": [2**32, 2**32], "data": b""}, "x.shape: .* over the limit"),
        ({"dtype": "<i4", "shape": [0, 2**62, 2**62], "data": b""}, "x.shape: .* over the limit"),
        ({"dtype": "<i4", "shape": [2**64 - 1], "data": bytes(4)}, "x.shape: .* over the limit"),
        ({"dtype": "<i4", "shape": [2**40], "data": bytes(4)}, "x.data: 4 bytes, expected"),
        ({"dtype": "<i4", "shape": [2], "data": bytes(7)}, "x.data: 7 bytes, expected 8"),
        ({"dtype": "<i4", "shape": [1], "data": "abcd"}, "x.data: expected bytes, got str"),
    ],
)
def test_hostile_dtypes_and_shapes_are_refused_by_name(wire: object, place: str) -> None:
    with pytest.raises(DecodeError, match=place):
        unpack(wire, "x")


def test_another_dtype_or_rank_than_asked_for_is_refused() -> None:
    with pytest.raises(DecodeError, match="got <f4 of 1 dimensions, expected <i4 of 1"):
        unpack_as(pack(np.zeros(2, dtype="<f4")), "x", "<i4", 1)
    with pytest.raises(DecodeError, match="got <i4 of 2 dimensions"):
        unpack_as(pack(np.zeros((2, 1), dtype="<i4")), "x", "<i4", 1)
