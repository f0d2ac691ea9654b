from __future__ import annotations

import dataclasses
import random
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given

from protocol.arrays import unpack
from protocol.codec import SCHEMA, decode_group, encode_group
from protocol.errors import WireError
from protocol.frames import open_frame
from protocol.group_frame import read_in_place
from protocol.groups import columns
from protocol.messages import RolloutGroup
from tests.protocol.samples import GROUP, golden, same_group
from tests.protocol.test_groups import GROUPS, changed

ARRAYS = ("lengths", "tokens", "mask", "logprobs", "spans", "rewards")


def same_reading(frame: bytes) -> bool:
    """Whether the frame is read in place; if so, as the general reader does."""
    read = read_in_place(frame)
    if read is None:
        return False
    arrays, rest = read
    body = open_frame("rollout_group", frame, 1 << 30)
    for name in ARRAYS:
        array, expected = arrays[name], unpack(body[name], name)
        assert (array.dtype, array.shape, array.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        assert not array.flags.writeable
    assert rest == {name: value for name, value in body.items() if name not in {*ARRAYS, "schema", "message"}}
    return True


@given(GROUPS)
def test_what_this_build_writes_is_read_in_place_as_the_general_reader_reads_it(group: RolloutGroup) -> None:
    spans, tokens = sum(len(one.spans) for one in group.rollouts), sum(len(one.tokens) for one in group.rollouts)
    assert same_reading(encode_group(group)) == bool(spans and tokens)


@pytest.mark.parametrize("size", [1, 13, 32, 40, 127, 128, 255, 256, 9000, 16384, 65535, 65536, 70000])
def test_arrays_of_every_size_are_read_in_place(size: int) -> None:
    first = GROUP.rollouts[0]
    mask = np.zeros(size, dtype=np.uint8)
    mask[0] = 1
    one = dataclasses.replace(
        first,
        tokens=np.arange(size, dtype=np.int32),
        mask=mask,
        logprobs=np.arange(size, dtype=np.float32),
        spans=(dataclasses.replace(first.spans[0], start=0, end=1),),
    )
    payload = encode_group(RolloutGroup(rollouts=(one,) * 3))
    assert same_reading(payload)
    assert read_in_place(memoryview(payload)) is not None


def test_a_group_is_read_without_copying_its_arrays() -> None:
    payload = encode_group(GROUP)
    laid, whole = columns(decode_group(payload)), np.frombuffer(payload, dtype=np.uint8)
    for array in (laid.tokens, laid.mask, laid.logprobs, laid.spans):
        assert np.shares_memory(array, whole)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(changed(schema=[2, 0]), id="newer major"),
        pytest.param(changed(message="event"), id="another message"),
        pytest.param(changed(extras={"big": {"dtype": "|u1", "shape": [70000], "data": bytes(70000)}}), id="large extras"),
        pytest.param(cast("bytes", msgpack.packb(dict(reversed(msgpack.unpackb(encode_group(GROUP)).items())))), id="another order"),
        pytest.param(encode_group(GROUP)[:-1], id="truncated"),
        pytest.param(encode_group(GROUP) + b"\x00", id="bytes behind it"),
        pytest.param(encode_group(GROUP, compress=True), id="compressed"),
    ],
)
def test_a_frame_of_another_form_is_left_to_the_general_reader(payload: bytes) -> None:
    assert read_in_place(payload) is None


def test_an_entry_that_stands_there_twice_is_left_to_the_general_reader() -> None:
    payload = encode_group(GROUP)
    twice = bytes([payload[0] + 1]) + payload[1:] + cast("bytes", msgpack.packb("rewards")) + cast("bytes", msgpack.packb([1.0]))
    assert read_in_place(twice) is None
    with pytest.raises(WireError, match="rewards: expected an array, got list"):
        decode_group(twice)


def test_a_newer_minor_with_more_entries_is_read_in_place() -> None:
    payload = changed(schema=[SCHEMA[0], 99], invented={"a": b"x"})
    assert same_reading(payload)
    assert same_group(decode_group(payload), GROUP)


def test_damage_is_never_read_differently() -> None:
    payload, chance = golden("rollout_group"), random.Random(3)
    read = 0
    for _ in range(4000):
        damaged = bytearray(payload)
        for _ in range(chance.choice([1, 1, 2])):
            damaged[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
        frame: Any = bytes(damaged)
        if read_in_place(frame) is not None:
            read += same_reading(frame)
    assert read > 0
