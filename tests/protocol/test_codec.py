from __future__ import annotations

import dataclasses
import random
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgpack
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import SCHEMA, decode, encode, to_json
from protocol.errors import DecodeError, SchemaTooNew, WireError
from protocol.messages import EngineStatus, Event, GroupHeader, Manifest, ProducerStatus, TrainerStatus
from protocol.versions import Version
from tests.protocol.samples import ENGINE, HEADER, MESSAGES, PRODUCER, golden

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
VERSIONS = st.builds(Version, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    Version: VERSIONS,
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value a field of this type may hold."""
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if origin in (typing.Union, types.UnionType):
        return JSON if len(parts) > 2 else st.none() | values(next(part for part in parts if part is not type(None)))
    if origin is tuple:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{f.name: values(hints[f.name]) for f in dataclasses.fields(hint)})


ANY_MESSAGE = st.sampled_from([GroupHeader, Manifest, EngineStatus, ProducerStatus, TrainerStatus, Event]).flatmap(values)


def changed(message: object, /, **fields: object) -> bytes:
    """The frame of `message` with top-level keys replaced, or left out where the value is `...`."""
    body = msgpack.unpackb(encode(message)) | fields
    return typing.cast("bytes", msgpack.packb({key: value for key, value in body.items() if value is not ...}))


@given(ANY_MESSAGE)
def test_every_message_reads_back_equal(message: object) -> None:
    assert decode(type(message), encode(message)) == message


@given(ANY_MESSAGE)
def test_every_message_is_plain_json_for_people(message: object) -> None:
    body = to_json(message)
    assert body.keys() == {f.name for f in dataclasses.fields(message)}  # type: ignore[arg-type]
    assert orjson.loads(orjson.dumps(body)).keys() == body.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_a_truncated_frame_is_refused_at_every_byte(name: str) -> None:
    frame = golden(name)
    for end in range(len(frame)):
        with pytest.raises(DecodeError):
            decode(type(MESSAGES[name]), frame[:end])


@pytest.mark.parametrize("name", MESSAGES)
def test_flipped_bits_give_a_wire_error_or_a_message_and_nothing_else(name: str) -> None:
    frame, kind = golden(name), type(MESSAGES[name])
    chance = random.Random(name)
    for _ in range(1500):
        damaged = bytearray(frame)
        for _ in range(chance.choice([1, 1, 2, 8])):
            damaged[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
        try:
            message = decode(kind, bytes(damaged))
        except WireError:
            continue
        assert type(message) is kind


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(GroupHeader, data)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=8), st.integers(0, 400))
def test_arbitrary_bytes_inside_a_frame_give_a_wire_error_or_a_message(data: list[int], at: int) -> None:
    frame = golden("group_header")
    at %= len(frame)
    try:
        message = decode(GroupHeader, frame[:at] + bytes(data) + frame[at + len(data) :])
    except WireError:
        return
    assert isinstance(message, GroupHeader)


@pytest.mark.parametrize(
    "data", [b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1", b""]
)
def test_hostile_lengths_and_nesting_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError, match="group_header"):
        decode(GroupHeader, data)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"seq": ...}, "group_header.seq: is missing"),
        ({"seq": "1"}, "group_header.seq: expected int, got str"),
        ({"seq": True}, "group_header.seq: expected int, got bool"),
        ({"seq": None}, "group_header.seq: expected int, got NoneType"),
        ({"lengths": 3}, "group_header.lengths: expected a list, got int"),
        ({"lengths": [1, "2"]}, r"group_header.lengths\[1\]: expected int, got str"),
        ({"trainable": {"1:7": 1.5}}, r"group_header.trainable\[1:7\]: expected int, got float"),
        ({"trainable": {"boot:1": 1}}, "group_header.trainable key: version: got 'boot:1'"),
        ({"trainable": {b"1:7": 1}}, "group_header.trainable key: expected a version string, got bytes"),
        ({"trainable": [["1:7", 1]]}, "group_header.trainable: expected a map, got list"),
        ({"oldest": 7}, "group_header.oldest: expected a version string, got int"),
        ({"oldest": "1:" + "9" * 5000}, "group_header.oldest: version: got '1:999"),
        ({"rewards": ["x"]}, r"group_header.rewards\[0\]: expected float, got str"),
        ({"timings": 0}, "group_header.timings: expected a map, got int"),
        ({"timings": {"queue_s": "slow"}}, "group_header.timings.queue_s: expected float, got str"),
        ({"metadata": []}, "group_header.metadata: expected a map, got list"),
        ({"metadata": {"x": b"raw"}}, "group_header.metadata: expected JSON values, got bytes"),
        ({"metadata": {"x": {b"raw": 1}}}, "group_header.metadata: a key that is not a string"),
        ({"metadata": {"x": msgpack.ExtType(5, b"1")}}, "group_header.metadata: expected JSON values, got ExtType"),
        ({"schema": ...}, r"group_header.schema: got None, expected \[major, minor\]"),
        ({"schema": [1]}, r"group_header.schema: got \[1\]"),
        ({"schema": [0, 9]}, r"group_header.schema: got \[0, 9\]"),
        ({"schema": [1, "x" * 10_000]}, "group_header.schema: got"),
        ({"message": "manifest"}, "group_header.message: got 'manifest', expected 'group_header'"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], place: str) -> None:
    with pytest.raises(DecodeError, match=place) as caught:
        decode(GroupHeader, changed(HEADER, **fields))
    assert len(str(caught.value)) < 300


def test_a_wrong_choice_lists_the_right_ones() -> None:
    with pytest.raises(DecodeError, match=r"engine_status.state: got 'asleep', expected one of \['starting', 'routable', 'unfit', 'leaving'\]"):
        decode(EngineStatus, changed(ENGINE, state="asleep"))


def test_a_frame_that_is_no_map_is_refused() -> None:
    with pytest.raises(DecodeError, match="expected a map, got list"):
        decode(GroupHeader, typing.cast("bytes", msgpack.packb([1, 2])))


def test_a_key_that_is_a_number_is_refused() -> None:
    with pytest.raises(DecodeError, match="group_header"):
        decode(GroupHeader, typing.cast("bytes", msgpack.packb({1: 2})))


def test_a_newer_major_says_to_upgrade() -> None:
    with pytest.raises(SchemaTooNew, match=rf"schema {SCHEMA[0] + 1}\.0, this process reads up to {SCHEMA[0]}.x: upgrade"):
        decode(GroupHeader, changed(HEADER, schema=[SCHEMA[0] + 1, 0]))


def test_a_newer_minor_with_fields_of_its_own_is_read() -> None:
    assert decode(GroupHeader, changed(HEADER, schema=[SCHEMA[0], SCHEMA[1] + 1], invented={"deep": [b"\x00", 1]})) == HEADER


def test_fields_a_writer_left_out_take_their_defaults() -> None:
    body = {"schema": [1, 0], "message": "producer_status", "producer_id": "p"}
    assert decode(ProducerStatus, typing.cast("bytes", msgpack.packb(body))) == ProducerStatus(producer_id="p")


def test_an_integer_stands_for_a_float_and_not_the_reverse() -> None:
    assert decode(ProducerStatus, changed(PRODUCER, loop_lag_ms=2)).loop_lag_ms == 2.0
    with pytest.raises(DecodeError, match=r"producer_status.pid"):
        decode(ProducerStatus, changed(PRODUCER, pid=2.0))


def test_a_frame_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(DecodeError, match="over the limit of 10"):
        decode(GroupHeader, b"\xc1" * 11, max_bytes=10)


def test_a_frame_may_lie_in_a_memoryview() -> None:
    assert decode(GroupHeader, memoryview(golden("group_header"))) == HEADER
