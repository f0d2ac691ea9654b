"""A delta gives the version's very bytes on its parent's very bytes, and nothing else, whatever is in it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ManifestError
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync import delta
from weightsync.delta import SLAB, Step
from weightsync.snapshot import ITEM_BYTES, TensorBytes, weights_digest

Tensors = Mapping[str, TensorBytes]
FIRST, SECOND = Version(1, 0), Version(1, 1)


def tensor(dtype: str, content: bytes) -> TensorBytes:
    return TensorBytes(dtype=dtype, shape=(len(content) // ITEM_BYTES[dtype],), data=content)


def full(tensors: Tensors, version: Version = FIRST) -> Manifest:
    entries = tuple(
        TensorEntry(name=name, dtype=one.dtype, shape=one.shape, file="model.safetensors", checksum=xxhash.xxh3_64_hexdigest(one.data))
        for name, one in sorted(tensors.items())
    )
    digest = weights_digest(tensors)
    return Manifest(version=version, kind="full", parent="", tensors=entries, digest=digest, transport="store", location="", total_bytes=0)


def step(parent: Manifest, base: Tensors, tensors: Tensors, version: Version = SECOND, threads: int = 2) -> Step:
    changes = delta.encode(parent, base, tensors, threads=threads)
    whole = full(tensors, version)
    entries = tuple(dataclasses.replace(entry, file="delta.safetensors" if entry.name in changes.blobs else "") for entry in whole.tensors)
    manifest = dataclasses.replace(whole, kind="delta", parent=parent.digest, parent_version=parent.version, tensors=entries)
    return Step(manifest, changes.blobs)


def applied(parent: Manifest, base: Tensors, *chain: Step, threads: int = 2) -> dict[str, bytes]:
    into = {name: bytearray(b"\xaa" * one.nbytes) for name, one in base.items()}
    delta.apply(parent, base, chain, {name: memoryview(one) for name, one in into.items()}, threads=threads)
    return {name: bytes(one) for name, one in into.items()}


def raw(tensors: Tensors) -> dict[str, bytes]:
    return {name: bytes(one.data) for name, one in tensors.items()}


def changed(one: TensorBytes, share: float, seed: int = 0) -> TensorBytes:
    """Some elements, moved by a few units in the last place as an optimizer does."""
    rng = np.random.default_rng(seed)
    item = ITEM_BYTES[one.dtype]
    elements = np.frombuffer(bytearray(one.data), f"<u{item}")
    chosen = np.flatnonzero(rng.random(len(elements)) < share)
    elements[chosen] += rng.integers(1, 4, len(chosen)).astype(elements.dtype)
    return TensorBytes(dtype=one.dtype, shape=one.shape, data=elements.tobytes())


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.integers(0, 300), st.sampled_from([0.0, 0.003, 0.02, 0.3, 1.0]), st.integers(0, 9)),
        min_size=1,
        max_size=5,
    )
)
@settings(deadline=None, max_examples=60)
def test_applied_to_its_parent_it_gives_the_version_for_every_type_and_share(shapes: list[tuple[str, int, float, int]]):
    rng = np.random.default_rng(0)
    base = {f"t{i}": tensor(dtype, rng.bytes(ITEM_BYTES[dtype] * count)) for i, (dtype, count, _, _) in enumerate(shapes)}
    new = {name: changed(one, shapes[i][2], shapes[i][3]) for i, (name, one) in enumerate(base.items())}
    parent = full(base)
    made = step(parent, base, new)
    assert applied(parent, base, made) == raw(new)
    differs = {
        name: np.frombuffer(base[name].data, f"<u{ITEM_BYTES[one.dtype]}") != np.frombuffer(one.data, f"<u{ITEM_BYTES[one.dtype]}") for name, one in new.items()
    }
    assert set(made.blobs) == {name for name, one in differs.items() if one.any()}
    encoded = delta.encode(parent, base, new)
    assert (encoded.elements, encoded.changed) == (sum(one.size for one in differs.values()), sum(int(one.sum()) for one in differs.values()))


@pytest.mark.parametrize("share", [1e-6, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_of_several_slabs_and_chains_of_several_deltas(share: float, threads: int):
    rng = np.random.default_rng(1)
    count = 2 * SLAB + 77
    base = {"big": tensor("BF16", rng.bytes(2 * count)), "same": tensor("F32", rng.bytes(40)), "none": tensor("F32", b"")}
    parent = full(base)
    first = {**base, "big": changed(base["big"], share, 1)}
    second = {**first, "big": changed(first["big"], share, 2), "same": changed(first["same"], 1.0)}
    one = step(parent, base, first, Version(1, 1), threads)
    two = step(full(first, Version(1, 1)), first, second, Version(1, 2), threads)
    assert applied(parent, base, one, two, threads=threads) == raw(second)
    assert sum(blob.nbytes for blob in one.blobs.values()) < 2 * count * (0.1 if share < 0.1 else 0.7)


def test_at_the_share_of_a_bf16_step_it_is_a_small_part_of_the_whole():
    rng = np.random.default_rng(2)
    base = {"w": tensor("BF16", rng.bytes(2 * SLAB))}
    parent = full(base)
    assert delta.encode(parent, base, {"w": changed(base["w"], 0.02)}).nbytes < 0.02 * 2 * SLAB


def test_negative_zero_and_not_a_number_are_changes_like_any_other():
    base = {"w": tensor("F32", np.array([0.0, 1.0, np.nan], "<f4").tobytes())}
    new = {"w": tensor("F32", np.array([-0.0, 1.0, np.nan], "<f4").tobytes())}
    parent = full(base)
    assert delta.encode(parent, base, new).changed == 1
    assert applied(parent, base, step(parent, base, new)) == raw(new)


@pytest.fixture
def pair() -> tuple[Tensors, Tensors]:
    rng = np.random.default_rng(3)
    base = {"a.weight": tensor("BF16", rng.bytes(2 * 5000)), "b.weight": tensor("F32", rng.bytes(4 * 300)), "c.weight": tensor("F32", rng.bytes(12))}
    return base, {**base, "a.weight": changed(base["a.weight"], 0.02), "b.weight": changed(base["b.weight"], 0.4)}


@pytest.mark.parametrize("which", ["names", "more", "type", "shape", "bytes"])
def test_what_does_not_belong_to_the_parent_is_not_encoded(pair: tuple[Tensors, Tensors], which: str):
    base, new = pair
    parent = full(base)
    b = new["b.weight"]
    wrong: dict[str, tuple[Tensors, Tensors, str]] = {
        "names": (base, {name: one for name, one in new.items() if name != "b.weight"}, "the version has no tensor b.weight"),
        "more": (base, {**new, "d.weight": b}, "the version has another tensor d.weight"),
        "type": (base, {**new, "b.weight": dataclasses.replace(b, dtype="I32")}, r"tensor b\.weight as I32 .*expected F32"),
        "shape": (base, {**new, "b.weight": dataclasses.replace(b, shape=(3, 100))}, r"tensor b\.weight as F32 \[3, 100\], expected F32 \[300\]"),
        "bytes": (new, new, r"tensor a\.weight of the base has checksum .*, expected"),
    }
    old, version, words = wrong[which]
    with pytest.raises(ManifestError, match=words):
        delta.encode(parent, old, version)


def test_on_another_parent_it_is_refused_by_the_name_of_a_tensor(pair: tuple[Tensors, Tensors]):
    base, new = pair
    parent = full(base)
    made = step(parent, base, new)
    other = {**base, "b.weight": changed(base["b.weight"], 0.1, 9)}
    with pytest.raises(ManifestError, match=r"delta of tensor b\.weight is on bytes with checksum .* another parent"):
        applied(full(other), other, made)
    other = {**base, "c.weight": changed(base["c.weight"], 1.0, 9)}
    with pytest.raises(ManifestError, match=r"tensor c\.weight is said to be as in its parent.* another parent"):
        applied(full(other), other, made)
    with pytest.raises(ManifestError, match=r"digest .* another parent \(from tensor a\.weight"):
        applied(parent, base, made._replace(manifest=dataclasses.replace(made.manifest, parent="0" * 32)))


def test_bytes_that_are_not_the_parent_s_though_they_go_by_its_manifest_are_found_by_the_result(pair: tuple[Tensors, Tensors]):
    base, new = pair
    parent = full(base)
    damaged = {**base, "c.weight": changed(base["c.weight"], 1.0, 9)}
    with pytest.raises(ManifestError, match=r"tensor c\.weight has checksum .* after its delta, expected"):
        applied(parent, damaged, step(parent, base, new))


@pytest.mark.parametrize("which", ["checksum", "shape", "type", "missing", "extra", "kind"])
def test_a_manifest_that_does_not_fit_is_refused_by_the_name_of_its_tensor(pair: tuple[Tensors, Tensors], which: str):
    base, new = pair
    parent = full(base)
    made = step(parent, base, new)
    entries = {entry.name: entry for entry in made.manifest.tensors}
    b = entries["b.weight"]
    changes = {
        "checksum": ({**entries, "b.weight": dataclasses.replace(b, checksum="0" * 16)}, r"b\.weight has checksum"),
        "shape": ({**entries, "b.weight": dataclasses.replace(b, shape=(100, 3))}, r"b\.weight as F32 \[100, 3\]"),
        "type": ({**entries, "b.weight": dataclasses.replace(b, dtype="I32")}, r"b\.weight as I32"),
        "missing": ({name: one for name, one in entries.items() if name != "b.weight"}, r"has no tensor b\.weight"),
        "extra": ({**entries, "d.weight": dataclasses.replace(b, name="d.weight")}, r"has another tensor d\.weight"),
        "kind": (entries, "is full, expected a delta"),
    }
    tensors, words = changes[which]
    manifest = dataclasses.replace(made.manifest, tensors=tuple(tensors.values()), kind="full" if which == "kind" else "delta")
    with pytest.raises(ManifestError, match=words):
        applied(parent, base, made._replace(manifest=manifest))
    with pytest.raises(ManifestError, match=r"delta of tensor b\.weight is not in"):
        applied(parent, base, made._replace(blobs={name: one for name, one in made.blobs.items() if name != "b.weight"}))


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_no_damage_of_a_blob_gets_through_or_ends_in_another_error(pair: tuple[Tensors, Tensors], name: str):
    base, new = pair
    parent = full(base)
    made = step(parent, base, new)
    content = bytes(made.blobs[name].data)
    rng = np.random.default_rng(4)
    for _ in range(300):
        torn = bytearray(content[: rng.integers(0, len(content) + 1)] if rng.random() < 0.3 else content)
        if len(torn) == len(content):
            torn[rng.integers(0, len(torn))] ^= 1 << rng.integers(0, 8)
        with pytest.raises(ManifestError, match=name.replace(".", r"\.")):
            applied(parent, base, made._replace(blobs={**made.blobs, name: tensor("U8", bytes(torn))}))


def _sealed(item: int, changed_: int, base: str, body: bytes) -> TensorBytes:
    """A blob whose own checksum is right, whatever is in it: what a hostile writer can make."""
    return tensor("U8", struct.pack("<4s3xBQQQ", b"RSD1", item, changed_, int(base, 16), xxhash.xxh3_64_intdigest(body)) + body)


def _record(form: int, count: int, raw_: bytes, *, size: int | None = None) -> bytes:
    frame = zstandard.ZstdCompressor().compress(raw_)
    return struct.pack("<B3xII", form, count, len(frame) if size is None else size) + frame


@pytest.mark.parametrize(
    ("body", "changed_"),
    [
        (_record(1, 2, b"\x01\x00" + b"\0\0\0\0"), 2),  # the same element twice
        (_record(1, 2, b"\xff\xff" + b"\0\0\0\0"), 2),  # beyond the end
        (_record(3, 1, b"\xff\xff\xff" + b"\0\0"), 1),  # far beyond the end
        (_record(8, 3, b"\x01" + b"\0" * 12 + b"\0" * 6), 3),  # fewer bits than changes
        (_record(8, 1, b"\xff" * 13 + b"\0\0"), 1),  # more bits than changes
        (_record(1, 2, b"\x01" * 5), 2),  # unpacks to too little
        (_record(1, 2, b"\x01" * (1 << 20)), 2),  # unpacks to too much
        (_record(1, 2, b"", size=4) + b"\0" * 4, 2),  # no zstd frame
        (_record(7, 2, b"\x01" * 6), 2),  # no such form
        (_record(1, 101, b"\x01" * 303), 101),  # more changes than elements
        (_record(1, 0, b""), 0),  # nothing, in a form for something
        (_record(0, 1, b""), 1),
        (_record(1, 1, b"\x01\0\0", size=1 << 30), 1),  # reaches out of the blob
        (_record(1, 1, b"\x01\0\0") + b"more", 1),
        (_record(1, 1, b"\x01\0\0"), 2),  # counts do not agree
        (b"", 0),
        (b"\x01", 0),
    ],
)
def test_hostile_records_are_refused_by_the_name_of_their_tensor(body: bytes, changed_: int):
    base = {"w": tensor("BF16", bytes(200))}
    parent = full(base)
    good = step(parent, base, {"w": changed(base["w"], 0.5)})
    blob = _sealed(2, changed_, parent.tensors[0].checksum, body)
    with pytest.raises(ManifestError, match="tensor w"):
        applied(parent, base, good._replace(blobs={"w": blob}))


def test_a_frame_that_says_it_is_huge_takes_no_memory():
    base = {"w": tensor("BF16", bytes(200))}
    parent = full(base)
    good = step(parent, base, {"w": changed(base["w"], 0.5)})
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 30)))
    body = struct.pack("<B3xII", 1, 2, len(frame)) + frame
    with pytest.raises(ManifestError, match="tensor w has a slab of 1073741824 bytes, expected 6"):
        applied(parent, base, good._replace(blobs={"w": _sealed(2, 2, parent.tensors[0].checksum, body)}))


def test_told_to_stop_it_stops(pair: tuple[Tensors, Tensors]):
    base, new = pair
    parent = full(base)
    into = {name: memoryview(bytearray(one.nbytes)) for name, one in base.items()}
    with pytest.raises(InterruptedError):
        delta.apply(parent, base, [step(parent, base, new)], into, stopped=lambda: True)
