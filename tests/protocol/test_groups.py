from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any, cast

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from protocol.arrays import pack
from protocol.codec import decode_group, decode_groups, encode_group
from protocol.errors import DecodeError, SchemaTooNew, WireError
from protocol.groups import payload_bound
from protocol.messages import EngineId, Rollout, RolloutGroup, Span
from protocol.versions import Version
from tests.protocol.samples import GROUP, golden, same_group
from tests.protocol.test_arrays import ARRAYS
from tests.protocol.test_codec import JSON, VERSIONS


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Runs of context and of sampled tokens, in any order; a sampled run may hold tokens that are masked."""
    spans: list[Span] = []
    mask: list[int] = []
    for version, tokens in draw(st.lists(st.tuples(st.none() | VERSIONS, st.lists(st.integers(0, 1), min_size=1, max_size=4)), max_size=4)):
        if version is not None:
            spans.append(Span(version=version, start=len(mask), end=len(mask) + len(tokens)))
        mask += tokens if version is not None else [0] * len(tokens)
    size = len(mask)
    return Rollout(
        tokens=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), dtype="<i4"),
        mask=np.array(mask, dtype="|u1"),
        logprobs=np.array(draw(st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size)), dtype="<f4"),
        spans=tuple(spans),
        reward=draw(st.floats(allow_nan=False)),
        finish_reason=draw(st.text(max_size=5)),
        engine_id=draw(st.text(max_size=5)),
        metadata=draw(st.dictionaries(st.text(max_size=3), JSON, max_size=2)),
    )


GROUPS = st.builds(RolloutGroup, rollouts=st.lists(rollouts(), max_size=4).map(tuple), extras=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=2))


def changed(**fields: object) -> bytes:
    """The sample's payload with top-level keys replaced, or left out where the value is `...`."""
    body = msgpack.unpackb(encode_group(GROUP)) | fields
    return cast("bytes", msgpack.packb({key: value for key, value in body.items() if value is not ...}))


def i4(*values: object) -> dict[str, object]:
    return pack(np.array(values, dtype="<i4"))


def spans(*rows: tuple[int, int, int, int, int]) -> dict[str, object]:
    return pack(np.array(rows, dtype="<i4").reshape(-1, 5))


def metas(**first: object) -> list[dict[str, object]]:
    return [first, {}]


@given(GROUPS, st.booleans())
def test_a_ragged_group_reads_back_equal(group: RolloutGroup, compress: bool) -> None:
    assert same_group(decode_group(encode_group(group, compress=compress)), group)


@pytest.mark.parametrize("empty", [RolloutGroup(rollouts=()), RolloutGroup(rollouts=(), extras={"a": np.zeros(0, dtype="<f4")})])
def test_a_group_of_nothing_reads_back_equal(empty: RolloutGroup) -> None:
    assert same_group(decode_group(encode_group(empty)), empty)


def test_decoding_copies_no_array() -> None:
    first, second = decode_group(encode_group(GROUP)).rollouts
    assert first.tokens.base is not None
    assert not first.tokens.flags.writeable
    assert second.tokens.ctypes.data == first.tokens.ctypes.data + first.tokens.nbytes


def test_rollouts_of_a_decoded_group_read_like_a_tuple_and_are_made_once() -> None:
    rollouts = decode_group(encode_group(GROUP)).rollouts
    assert len(rollouts) == 2
    first, second = rollouts
    assert (rollouts[0], rollouts[-1]) == (first, second)
    assert rollouts[:] == (first, second)
    assert list(reversed(rollouts)) == [second, first]
    assert second in rollouts
    with pytest.raises(IndexError):
        rollouts[2]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))])
def test_a_decoded_group_can_be_copied_and_pickled(copied: Callable[[RolloutGroup], RolloutGroup]) -> None:
    assert same_group(copied(decode_group(encode_group(GROUP))), GROUP)


def test_a_decoded_group_is_written_as_the_bytes_it_was_read_from() -> None:
    payload = encode_group(GROUP)
    assert encode_group(dataclasses.replace(decode_group(payload))) == payload


def test_spans_may_stand_in_any_order_of_the_rollouts() -> None:
    mixed = spans((1, 1, 7, 3, 4), (0, 1, 7, 3, 6), (1, 2, 8, 4, 5))
    assert same_group(decode_group(changed(spans=mixed)), GROUP)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        ((), r"rollouts\[0\].spans: 5 tokens"),
        (((0, 1, 7, 4, 6), (1, 1, 7, 3, 5)), r"rollouts\[0\].spans: 1 tokens"),
        (((1, 1, 7, 4, 5), (0, 1, 7, 3, 6)), r"rollouts\[1\].spans: 1 tokens"),
        (((1, 1, 7, 3, 4), (0, 1, 7, 3, 4), (0, 1, 7, 5, 6)), r"rollouts\[0\].spans: 2 tokens"),
        (((0, 1, 7, 0, 6),), r"rollouts\[1\].spans: 2 tokens"),
    ],
)
def test_a_token_with_mask_1_outside_all_spans_is_refused_wherever_it_lies(rows: tuple[tuple[int, int, int, int, int], ...], place: str) -> None:
    with pytest.raises(DecodeError, match=place):
        decode_group(changed(spans=spans(*rows)))


@pytest.mark.parametrize("many", [0, 20])
def test_of_many_payloads_the_wrong_ones_are_named_and_the_others_read(many: int) -> None:
    wrong = [changed(spans=spans((0, 1, 7, 4, 6), (1, 1, 7, 3, 5))), encode_group(GROUP)[:-1], changed(mask=pack(np.full(11, 2, dtype="|u1")))]
    found = decode_groups([*[encode_group(GROUP)] * many, *wrong, encode_group(GROUP)])
    assert [str(one).partition(":")[0] for one in found if isinstance(one, DecodeError)] == ["rollouts[0].spans", "rollout_group", "mask"]
    assert [i for i, one in enumerate(found) if isinstance(one, DecodeError)] == [many, many + 1, many + 2]
    assert all(same_group(one, GROUP) for one in found if isinstance(one, RolloutGroup))
    with pytest.raises(SchemaTooNew):
        decode_groups([encode_group(GROUP), changed(schema=[2, 0])])
    assert [type(one) for one in decode_groups([b""] * many)] == [DecodeError] * many


@pytest.mark.parametrize("name", ["rollout_group", "rollout_group_zstd"])
def test_a_truncated_payload_is_refused_at_every_byte(name: str) -> None:
    payload = golden(name)
    for end in range(len(payload)):
        with pytest.raises(DecodeError):
            decode_group(payload[:end])


@pytest.mark.parametrize("name", ["rollout_group", "rollout_group_zstd"])
def test_flipped_bits_give_a_wire_error_or_a_group_that_holds_its_invariants(name: str) -> None:
    payload = golden(name)
    chance = random.Random(name)
    for _ in range(4000):
        damaged = bytearray(payload)
        for _ in range(chance.choice([1, 1, 2, 8])):
            damaged[chance.randrange(len(payload))] ^= 1 << chance.randrange(8)
        try:
            group = decode_group(bytes(damaged), max_bytes=1 << 20)
        except WireError:
            continue
        for r in group.rollouts:
            covered = np.zeros(len(r.tokens), dtype=bool)
            for s in r.spans:
                assert 0 <= s.start < s.end <= len(r.tokens)
                assert not covered[s.start : s.end].any()
                covered[s.start : s.end] = True
            assert covered[r.mask == 1].all()
            assert set(r.mask.tolist()) <= {0, 1}
            assert len(r.mask) == len(r.logprobs) == len(r.tokens)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_group(data)
    with pytest.raises(WireError):
        decode_group(b"\x28\xb5\x2f\xfd" + data, max_bytes=1 << 20)


ONES = pack(np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1], dtype="|u1"))
WHOLE = ((0, 1, 7, 3, 6), (1, 1, 7, 3, 5))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"lengths": ...}, "lengths: expected an array, got NoneType"),
        ({"lengths": i4(12, -1)}, "lengths: a negative length"),
        ({"lengths": i4(6, 6)}, "tokens: 11 entries, expected 12 by lengths"),
        ({"lengths": i4(2**31 - 1, 2**31 - 1)}, "tokens: 11 entries, expected 4294967294 by lengths"),
        ({"lengths": pack(np.array([6, 5], dtype="<i8"))}, "lengths: got <i8 of 1 dimensions"),
        ({"lengths": i4(11)}, "rollouts: expected 1 rollouts"),
        ({"tokens": i4(1)}, "tokens: 1 entries, expected 11 by lengths"),
        ({"tokens": pack(np.zeros((11, 1), dtype="<i4"))}, "tokens: got <i4 of 2 dimensions"),
        ({"mask": pack(np.zeros(11, dtype="|i1"))}, r"mask: got \|i1"),
        ({"mask": pack(np.full(11, 2, dtype="|u1"))}, "mask: holds 2, expected 0 and 1"),
        ({"logprobs": pack(np.zeros(11, dtype="<f8"))}, "logprobs: got <f8"),
        ({"logprobs": pack(np.zeros(10, dtype="<f4"))}, "logprobs: 10 entries, expected 11"),
        ({"rewards": pack(np.zeros(3, dtype="<f8"))}, "rollouts: expected 2 rollouts and rewards"),
        ({"rewards": [1.0, 2.0]}, "rewards: expected an array, got list"),
        ({"spans": pack(np.zeros((0, 4), dtype="<i4"))}, r"spans: shape \[0, 4\], expected \[spans, 5\]"),
        ({"spans": spans((2, 1, 7, 0, 1))}, r"spans\[0\]: names rollout 2"),
        ({"spans": spans((-1, 1, 7, 0, 1))}, r"spans\[0\]: names rollout -1"),
        ({"spans": spans((0, -1, 7, 0, 1))}, r"spans\[0\]: names rollout 0, version -1:7"),
        ({"spans": spans((0, 1, -7, 0, 1))}, r"spans\[0\]: names rollout 0, version 1:-7"),
        ({"spans": spans((0, 1, 7, -1, 1))}, r"spans\[0\]: \[-1, 1\) is not inside \[0, 6\)"),
        ({"spans": spans((0, 1, 7, 3, 7))}, r"spans\[0\]: \[3, 7\) is not inside \[0, 6\)"),
        ({"spans": spans((0, 1, 7, 3, 3))}, r"spans\[0\]: \[3, 3\)"),
        ({"spans": spans((0, 1, 7, 3, 5), (0, 1, 8, 4, 6))}, r"spans\[1\]: \[4, 6\) is not inside \[5, 6\)"),
        ({"spans": spans((0, 1, 7, 4, 6), (0, 1, 8, 3, 4))}, r"spans\[1\]: \[3, 4\) is not inside \[6, 6\)"),
        ({"spans": spans(WHOLE[0])}, r"rollouts\[1\].spans: 2 tokens with mask 1 lie in no span"),
        ({"spans": spans((0, 1, 7, 3, 5), WHOLE[1])}, r"rollouts\[0\].spans: 1 tokens with mask 1 lie in no span"),
        ({"rollouts": ...}, "rollouts: expected 2 rollouts"),
        ({"rollouts": [{}]}, "rollouts: expected 2 rollouts"),
        ({"rollouts": [{}, 1]}, r"rollouts\[1\]: expected a map, got int"),
        ({"rollouts": metas(finish_reason=1)}, r"rollouts\[0\].finish_reason: expected str, got int"),
        ({"rollouts": metas(engine_id=None)}, r"rollouts\[0\].engine_id: expected str, got NoneType"),
        ({"rollouts": metas(metadata=[])}, r"rollouts\[0\].metadata: expected a map, got list"),
        ({"rollouts": metas(metadata={"x": b""})}, r"rollouts\[0\].metadata: expected JSON values, got bytes"),
        ({"extras": 1}, "extras: expected a map, got int"),
        ({"extras": {"x": 1}}, "extras.x: expected an array, got int"),
        ({"extras": {b"x": ONES}}, "extras key: expected str, got bytes"),
        ({"message": "event"}, "rollout_group.message: got 'event'"),
    ],
)
def test_a_hostile_field_is_refused_by_name(fields: dict[str, Any], place: str) -> None:
    with pytest.raises(DecodeError, match=place):
        decode_group(changed(**fields))


@pytest.mark.parametrize("rows", [WHOLE, ((0, 1, 7, 3, 4), (0, 1, 7, 5, 6), WHOLE[1]), ((0, 1, 7, 0, 6), (1, 1, 7, 0, 5)), ()])
@pytest.mark.parametrize("at", range(11))
def test_a_mask_that_is_neither_0_nor_1_is_refused_wherever_it_lies(rows: tuple[tuple[int, int, int, int, int], ...], at: int) -> None:
    mask = np.zeros(11, dtype="|u1")
    decode_group(changed(spans=spans(*rows), mask=pack(mask)))
    mask[at] = 255
    with pytest.raises(DecodeError, match="mask: holds 255, expected 0 and 1"):
        decode_group(changed(spans=spans(*rows), mask=pack(mask)))


def test_rollouts_without_their_own_facts_take_defaults() -> None:
    first = decode_group(changed(rollouts=metas(), extras=...)).rollouts[0]
    assert (first.finish_reason, first.engine_id, first.metadata) == ("stop", "", {})


def test_deep_metadata_reads_back() -> None:
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    group = RolloutGroup(rollouts=(dataclasses.replace(GROUP.rollouts[0], metadata={"x": deep}),))
    assert decode_group(encode_group(group)).rollouts[0].metadata == {"x": deep}


def test_a_newer_major_says_to_upgrade() -> None:
    with pytest.raises(SchemaTooNew, match=r"rollout_group was written with schema 2\.0"):
        decode_group(changed(schema=[2, 0]))


def test_a_newer_minor_with_fields_of_its_own_is_read() -> None:
    assert same_group(decode_group(changed(schema=[1, 9], invented=[1, {"a": b"x"}])), GROUP)


def test_arrays_of_different_length_are_refused_by_the_writer() -> None:
    wrong = Rollout(tokens=np.zeros(2, dtype="<i4"), mask=np.zeros(2, dtype="|u1"), logprobs=np.zeros(1, dtype="<f4"), spans=(), reward=0.0)
    with pytest.raises(ValueError, match="rollout 0 has 2 tokens, 2 mask values and 1 logprobs"):
        encode_group(RolloutGroup(rollouts=(wrong,)))


def test_a_version_too_large_for_the_wire_is_refused_by_the_writer() -> None:
    wrong = Rollout(
        tokens=np.zeros(1, dtype="<i4"),
        mask=np.ones(1, dtype="|u1"),
        logprobs=np.zeros(1, dtype="<f4"),
        spans=(Span(version=Version(1, 2**31), start=0, end=1),),
        reward=0.0,
    )
    with pytest.raises(OverflowError):
        encode_group(RolloutGroup(rollouts=(wrong,)))


def zstd_header(size: int) -> bytes:
    """The start of a zstd frame that claims `size` bytes of content."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little")


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 40, 2**63, 2**64 - 3])
def test_a_huge_content_size_is_refused_before_memory_is_taken(size: int) -> None:
    with pytest.raises(DecodeError, match="over the limit of 1048576"):
        decode_group(zstd_header(size) + b"\x01\x00\x00", max_bytes=1 << 20)


def test_a_bomb_is_refused_at_the_limit() -> None:
    with pytest.raises(DecodeError, match="over the limit of 1048576"):
        decode_group(zstandard.compress(bytes(2 << 20)), max_bytes=1 << 20)


def test_a_zstd_frame_of_unknown_size_is_refused() -> None:
    with pytest.raises(DecodeError, match="decompresses to an unknown size"):
        decode_group(zstandard.ZstdCompressor(write_content_size=False).compress(encode_group(GROUP)))


def test_a_zstd_frame_that_lies_about_its_size_is_refused() -> None:
    honest = zstandard.compress(bytes(100_000))
    lying = bytearray(zstandard.compress(bytes(100_000)))
    at = honest.index((100_000).to_bytes(4, "little"))
    lying[at : at + 4] = (1000).to_bytes(4, "little")
    with pytest.raises(DecodeError, match="damaged zstd frame"):
        decode_group(bytes(lying))


def test_bytes_after_a_zstd_frame_are_refused() -> None:
    with pytest.raises(DecodeError, match="damaged zstd frame"):
        decode_group(encode_group(GROUP, compress=True) + b"tail")


def test_a_payload_may_lie_in_a_memoryview() -> None:
    assert same_group(decode_group(memoryview(encode_group(GROUP))), GROUP)
    assert same_group(decode_group(memoryview(encode_group(GROUP, compress=True))), GROUP)


def test_no_payload_is_larger_than_its_bound() -> None:
    """The worst there may be: full length, and every new token of another version."""
    prompt, new, size = 7, 40, 3
    spans = tuple(Span(version=Version(10**6, 10**6 + i), start=prompt + i, end=prompt + i + 1) for i in range(new))
    rollout = Rollout(
        tokens=np.full(prompt + new, 2**31 - 1, dtype=np.int32),
        mask=np.array([0] * prompt + [1] * new, dtype=np.uint8),
        logprobs=np.full(prompt + new, -1e30, dtype=np.float32),
        spans=spans,
        reward=-1.0 / 3,
        finish_reason="length",
        engine_id=EngineId("r" * 63 + "-engine-1000"),
    )
    payload = encode_group(RolloutGroup(rollouts=(rollout,) * size))
    bound = payload_bound(group_size=size, prompt_tokens=prompt, new_tokens=new)
    assert bound / 2 < len(payload) <= bound
