"""Every side cuts a version in the same way, from the manifest alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ManifestError
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync.buckets import TORCH_NAMES, plan
from weightsync.snapshot import ITEM_BYTES


def manifest(*entries: TensorEntry) -> Manifest:
    return Manifest(version=Version(1, 2), kind="full", parent="", tensors=entries, digest="d", transport="store", location="x", total_bytes=0)


def entry(name: str, dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> TensorEntry:
    return TensorEntry(name=name, dtype=dtype, shape=shape, file="f", checksum="")


entries = st.lists(
    st.builds(entry, st.text("abc.", min_size=1, max_size=6), st.sampled_from(sorted(TORCH_NAMES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)),
    max_size=20,
    unique_by=lambda one: one.name,
)


@given(entries, st.integers(1, 20_000), st.randoms())
def test_every_tensor_travels_once_aligned_and_in_a_bucket_of_the_right_size(tensors: list[TensorEntry], limit: int, random: st.DataObject):
    buckets = plan(manifest(*tensors), limit)
    by_name = {one.name: one for one in tensors}
    assert sorted(name for bucket in buckets for name in bucket.names) == sorted(by_name)
    for bucket in buckets:
        at = 0
        for name, dtype, shape, offset in zip(bucket.names, bucket.dtypes, bucket.shapes, bucket.offsets, strict=True):
            one, size = by_name[name], ITEM_BYTES[by_name[name].dtype]
            assert (dtype, shape, offset) == (TORCH_NAMES[one.dtype], one.shape, at)
            assert at % size == 0, "an engine cannot look at bytes that are not aligned"
            at += size * math.prod(shape)
        assert bucket.nbytes == at
        sizes = [size for name in bucket.names if (size := ITEM_BYTES[by_name[name].dtype] * math.prod(by_name[name].shape))]
        assert at >= limit or bucket is buckets[-1], "only the last may be smaller"
        assert not sizes or sum(sizes[:-1]) < limit
    assert all(bucket.nbytes for bucket in buckets) or len(buckets) == 1, "nobody sends nothing"
    shuffled = list(tensors)
    random.shuffle(shuffled)
    assert plan(manifest(*shuffled), limit) == buckets, "the order in a manifest means nothing"


@given(entries.filter(bool), st.integers(1, 20_000), st.data())
def test_a_bucket_is_called_otherwise_as_soon_as_anything_in_it_differs(tensors: list[TensorEntry], limit: int, data: st.DataObject):
    at = data.draw(st.integers(0, len(tensors) - 1))
    old = tensors[at]
    other = "F64" if old.dtype != "F64" else "F32"
    ways = [entry(old.name + "x", old.dtype, old.shape), entry(old.name, old.dtype, (*old.shape, 1)), entry(old.name, other, old.shape)]
    changed = data.draw(st.sampled_from(ways))
    if changed.name in {one.name for one in tensors if one is not old}:
        return
    before = [bucket.digest for bucket in plan(manifest(*tensors), limit)]
    after = [bucket.digest for bucket in plan(manifest(*tensors[:at], changed, *tensors[at + 1 :]), limit)]
    assert before != after


def test_a_bucket_ends_once_it_is_large_enough_so_that_none_but_the_last_is_small():
    buckets = plan(manifest(entry("a"), entry("big", shape=(100,)), entry("c"), entry("d", shape=(0,))), 64)
    assert [(bucket.names, bucket.nbytes) for bucket in buckets] == [(("a", "big"), 416), (("c", "d"), 16)]
    assert [bucket.names for bucket in plan(manifest(entry("a"), entry("b", shape=(0,))), 16)] == [("a", "b")]


def test_a_type_that_torch_has_no_name_for_is_refused_with_the_tensor_named():
    with pytest.raises(ManifestError, match=r"version 1:2: tensor b has dtype U16, which cannot be sent"):
        plan(manifest(entry("a"), entry("b", "U16")), 64)
