from __future__ import annotations

import dataclasses

import pytest

from protocol import messages
from protocol.codec import SCHEMA, decode, decode_group, encode, encode_group
from protocol.groups import _KIND
from tests.protocol.samples import GOLDEN, GROUP, MESSAGES, SINCE, as_of, golden, same_group

EARLIER = [path.name for path in GOLDEN.parent.iterdir() if path != GOLDEN]
GROUPS = ("rollout_group", "rollout_group_zstd")


@pytest.mark.parametrize("name", MESSAGES)
def test_bytes_of_a_message_are_those_of_its_schema(name: str) -> None:
    assert encode(MESSAGES[name]).hex() == golden(name).hex()


@pytest.mark.parametrize("name", MESSAGES)
def test_released_bytes_read_back_equal(name: str) -> None:
    assert decode(type(MESSAGES[name]), golden(name)) == MESSAGES[name]


def test_bytes_of_a_group_are_those_of_its_schema() -> None:
    assert encode_group(GROUP).hex() == golden("rollout_group").hex()


@pytest.mark.parametrize("name", GROUPS)
def test_released_groups_read_back_equal(name: str) -> None:
    assert same_group(decode_group(golden(name)), GROUP)


@pytest.mark.parametrize("schema", EARLIER)
def test_frames_of_an_earlier_schema_read_with_new_fields_at_their_defaults(schema: str) -> None:
    expected = as_of(schema)
    assert {path.stem for path in (GOLDEN.parent / schema).iterdir()} == {*expected, *GROUPS}
    for name, message in expected.items():
        assert golden(name, schema) != golden(name)
        assert decode(type(message), golden(name, schema)) == message
    for name in GROUPS:
        assert same_group(decode_group(golden(name, schema)), GROUP)


def test_every_earlier_schema_is_there_and_what_each_brought_is_named() -> None:
    assert sorted(EARLIER) == ["1.0", "1.1", "1.2", "1.3"]
    assert list(SINCE) == ["1.1", "1.2", "1.3", "1.4"]


def test_every_message_has_a_golden_file() -> None:
    declared = {name for name, cls in vars(messages).items() if dataclasses.is_dataclass(cls) and cls.__module__ == messages.__name__}
    sampled = {type(message).__name__ for message in MESSAGES.values()} | {"Rollout", "RolloutGroup"}
    assert declared == sampled
    assert {path.stem for path in GOLDEN.iterdir()} == {*MESSAGES, _KIND, "rollout_group_zstd"}


def test_samples_set_every_field_to_something_else_than_its_default() -> None:
    left = {
        f"{name}.{f.name}"
        for name, message in MESSAGES.items()
        for f in dataclasses.fields(message)  # type: ignore[arg-type]
        if f.default is not dataclasses.MISSING and getattr(message, f.name) == f.default
    }
    assert left == {"group_timings.encode_s"}


def test_golden_files_are_of_the_schema_written_now() -> None:
    assert f"{SCHEMA[0]}.{SCHEMA[1]}" == GOLDEN.name


def test_no_field_is_called_as_the_frame_s_own_keys() -> None:
    assert not {f.name for message in MESSAGES.values() for f in dataclasses.fields(message)} & {"schema", "message"}  # type: ignore[arg-type]
