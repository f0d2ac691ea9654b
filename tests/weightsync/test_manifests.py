from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from protocol.errors import ManifestError
from protocol.messages import Manifest, TensorEntry
from protocol.versions import Version
from weightsync.manifests import check_manifest

ENTRY = TensorEntry(name="model.w", dtype="BF16", shape=(4, 3), file="model.safetensors", checksum="0" * 16)
FULL = Manifest(
    version=Version(1, 3), kind="full", parent="", tensors=(ENTRY,), digest="d", transport="store", location="/dev/shm/run/v1-3", total_bytes=24
)  # fmt: skip
DELTA = dataclasses.replace(FULL, kind="delta", parent="p", parent_version=Version(1, 2))


def test_what_a_store_writes_is_sound():
    check_manifest(FULL)
    check_manifest(DELTA)
    check_manifest(dataclasses.replace(DELTA, tensors=(dataclasses.replace(ENTRY, file="", shape=()),)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "Q9"}, "model.w has dtype 'Q9'"),
        ({"shape": (-4, 3)}, "model.w has shape"),
        ({"shape": (1 << 62, 1 << 62)}, "model.w has shape"),
        ({"shape": (0, 1 << 63)}, "model.w has shape"),
        ({"file": "../../etc/passwd"}, "model.w is said to lie in"),
        ({"file": "a\0b"}, "model.w is said to lie in"),
        ({"file": "x" * 300}, "model.w is said to lie in"),
        ({"file": "."}, "model.w is said to lie in"),
    ],
)
def test_an_entry_that_no_version_has_is_refused_with_the_tensor_named(change: dict[str, Any], words: str):
    with pytest.raises(ManifestError, match=words):
        check_manifest(dataclasses.replace(FULL, tensors=(dataclasses.replace(ENTRY, **change),)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "half"}, "is of kind 'half'"),
        ({"location": ""}, "is no place"),
        ({"location": "/dev/shm/\0"}, "is no place"),
        ({"parent_version": None, "kind": "delta"}, "a delta has one"),
        ({"parent_version": Version(1, 2)}, "any other version none"),
        ({"kind": "adapter", "parent_version": Version(1, 2)}, "any other version none"),
        ({"kind": "delta", "parent_version": Version(1, 3)}, "is not older"),
    ],
)
def test_a_manifest_that_no_store_writes_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(ManifestError, match=words):
        check_manifest(dataclasses.replace(FULL, **change))
