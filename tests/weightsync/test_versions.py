"""What every store of versions promises: a folder on disk, shared memory, objects in a folder, objects behind an fsspec URL."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from protocol.config import RunConfig
from protocol.errors import ConfigError, ManifestError, VersionGone
from protocol.failpoints import VARIABLE, Failpoint
from protocol.messages import Manifest
from protocol.versions import Version
from tests.weightsync.places import KINDS, Place, place_of, raw, weights
from weightsync import delta
from weightsync.config import WeightsConfig
from weightsync.object_versions import ObjectVersions
from weightsync.safetensors_file import open_model
from weightsync.snapshot import Snapshot, TensorBytes
from weightsync.store import DirectoryStore, VersionStore, open_store


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, model_path: Path) -> Iterator[Place]:
    with place_of(request.param, tmp_path, model_path) as one:
        yield one


@pytest.fixture
def versions(place: Place) -> VersionStore:
    return place.open()


def test_a_version_in_several_files_is_read_back_as_it_was(place: Place, versions: VersionStore):
    manifest = versions.write(weights(0))
    assert len({entry.file for entry in manifest.tensors}) == 2
    reader = place.open(writer=False)
    reader.verify(manifest)
    with reader.open(manifest) as tensors:
        assert {name: bytes(one.data) for name, one in tensors.items()} == raw(weights(0))
        assert {name: (one.dtype, one.shape) for name, one in tensors.items()} == {name: (one.dtype, one.shape) for name, one in weights(0).tensors.items()}
    assert reader.versions() == (Version(1, 0),)
    assert reader.manifest(Version(1, 0)) == manifest


def test_a_delta_holds_what_changed_and_gives_the_version_on_its_parent(place: Place, versions: VersionStore):
    parent = versions.write(weights(0))
    manifest = versions.write_delta(weights(1), parent, weights(0).tensors)
    assert (manifest.kind, manifest.parent, manifest.parent_version) == ("delta", parent.digest, Version(1, 0))
    assert {entry.name for entry in manifest.tensors if not entry.file} == {"model.norm.weight", "model.steps"}
    assert 0 < manifest.changed_elements < 0.05 * manifest.elements
    assert manifest.total_bytes < 0.1 * parent.total_bytes
    reader = place.open(writer=False)
    reader.verify(manifest)
    into = {name: bytearray(one.nbytes) for name, one in weights(0).tensors.items()}
    with reader.open(parent) as base, reader.open(manifest) as blobs:
        delta.apply(parent, base, [delta.Step(manifest, blobs)], {name: memoryview(one) for name, one in into.items()})
    assert {name: bytes(one) for name, one in into.items()} == raw(weights(1))
    assert manifest.digest == versions.write(dataclasses.replace(weights(1), version=Version(2, 1))).digest


def test_a_delta_of_a_step_that_changed_nothing_is_whole_and_gives_its_parent(place: Place, versions: VersionStore):
    parent = versions.write(weights(0))
    manifest = versions.write_delta(dataclasses.replace(weights(0), version=Version(1, 1)), parent, weights(0).tensors)
    assert (manifest.kind, manifest.changed_elements, manifest.total_bytes) == ("delta", 0, 0)
    reader = place.open(writer=False)
    reader.verify(manifest)
    assert versions.write_delta(dataclasses.replace(weights(0), version=Version(1, 1)), parent, weights(0).tensors).digest == manifest.digest
    into = {name: bytearray(one.nbytes) for name, one in weights(0).tensors.items()}
    with reader.open(parent) as base, reader.open(manifest) as blobs:
        delta.apply(parent, base, [delta.Step(manifest, blobs)], {name: memoryview(one) for name, one in into.items()})
    assert {name: bytes(one) for name, one in into.items()} == raw(weights(0))


def test_where_a_delta_saves_little_the_version_is_whole(versions: VersionStore):
    parent = versions.write(weights(0))
    rng = np.random.default_rng(9)
    other = {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=rng.bytes(one.nbytes)) for name, one in weights(0).tensors.items()}
    manifest = versions.write_delta(Snapshot(version=Version(1, 1), tensors=other), parent, weights(0).tensors)
    assert (manifest.kind, manifest.parent, manifest.parent_version) == ("full", "", None)
    versions.verify(manifest)


def test_a_delta_over_incarnations_or_backwards_is_refused(versions: VersionStore):
    parent = versions.write(weights(3))
    for version in (Version(2, 4), Version(1, 3), Version(1, 2)):
        with pytest.raises(ManifestError, match=f"version {version}: a delta on 1:3 is refused"):
            versions.write_delta(dataclasses.replace(weights(4), version=version), parent, weights(3).tensors)
    with pytest.raises(ManifestError, match=r"tensor model\.embed\.weight of the base has checksum"):
        versions.write_delta(weights(4), parent, weights(2).tensors)
    assert versions.versions() == (Version(1, 3),)


def test_a_version_is_written_once_whether_whole_or_as_a_delta(versions: VersionStore):
    parent = versions.write(weights(0))
    made = versions.write_delta(weights(1), parent, weights(0).tensors)
    assert versions.write(weights(1)) == versions.write_delta(weights(1), parent, weights(0).tensors) == made
    with pytest.raises(ManifestError, match="other weights"):
        versions.write(dataclasses.replace(weights(2), version=Version(1, 1)))
    versions.verify(made)


def test_a_copy_has_the_files_and_the_assets(place: Place, versions: VersionStore, tmp_path: Path):
    manifest = versions.write(weights(0))
    target = tmp_path / "copy"
    target.mkdir()
    place.open(writer=False).copy(manifest, target)
    assert {path.name for path in target.iterdir()} == {
        *(entry.file for entry in manifest.tensors),
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    }
    assert (target / "config.json").read_text() == "{}"
    with open_model(target) as tensors:
        assert {name: bytes(one.data) for name, one in tensors.items()} == raw(weights(0))
    other = tmp_path / "assets"
    other.mkdir()
    versions.assets(versions.write_delta(weights(1), manifest, weights(0).tensors), other)
    assert (other / "tokenizer.json").read_text() == "{}"


def test_told_to_stop_a_copy_stops(versions: VersionStore, tmp_path: Path):
    (target := tmp_path / "copy").mkdir()
    with pytest.raises(InterruptedError):
        versions.copy(versions.write(weights(0)), target, stopped=lambda: True)


def test_what_is_deleted_is_gone_which_is_not_damage(versions: VersionStore, tmp_path: Path):
    manifest = versions.write(weights(0))
    versions.delete(Version(1, 0))
    versions.delete(Version(1, 0))
    assert versions.versions() == ()
    (target := tmp_path / "copy").mkdir()
    for read in (
        versions.verify,
        lambda one: versions.open(one).__enter__(),
        lambda one: versions.manifest(one.version),
        lambda one: versions.copy(one, target),
    ):
        with pytest.raises(VersionGone):
            read(manifest)


def test_a_sweep_keeps_what_is_known_with_its_parents_and_nothing_else(versions: VersionStore):
    parent = versions.write(weights(0))
    for n in (1, 2, 3):
        parent = versions.write_delta(weights(n), parent, weights(n - 1).tensors)
    versions.write(weights(7))
    versions.write(dataclasses.replace(weights(7), version=Version(2, 7)))
    assert versions.drop_unlisted(1, {Version(1, 2)}) == (Version(1, 3), Version(1, 7))
    assert versions.versions() == (Version(1, 0), Version(1, 1), Version(1, 2), Version(2, 7))
    assert versions.sweep(1, {Version(1, 1)}) == (Version(1, 2),), "a later incarnation may be about to publish its own"
    assert versions.sweep(2, {Version(1, 1)}) == (Version(2, 7),)
    assert versions.versions() == (Version(1, 0), Version(1, 1))
    assert versions.sweep(2, ()) == (Version(1, 0), Version(1, 1))


def test_a_store_that_is_not_there_yet_is_empty(versions: VersionStore):
    assert versions.versions() == versions.sweep(2, ()) == versions.drop_unlisted(1, ()) == ()
    with pytest.raises(VersionGone):
        versions.manifest(Version(1, 0))


# -- bad input -----------------------------------------------------------------------------------------------------------------------------------


def _entry(manifest: Manifest, which: str, **changes: object) -> Manifest:
    return dataclasses.replace(manifest, tensors=tuple(dataclasses.replace(one, **changes) if one.name == which else one for one in manifest.tensors))


BAD: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "missing": (lambda one: _entry(one, "model.norm.weight", name="model.ghost"), r"tensor model\.ghost is not in"),
    "twice": (lambda one: dataclasses.replace(one, tensors=(*one.tensors, one.tensors[0])), r"tensor model\.embed\.weight is listed twice"),
    "unlisted": (lambda one: dataclasses.replace(one, tensors=one.tensors[:-1]), r"tensor model\.steps in .* is not in the manifest"),
    "nowhere": (lambda one: _entry(one, "model.norm.weight", file=""), r"tensor model\.norm\.weight is in no file"),
    "shape": (lambda one: _entry(one, "model.layer.weight", shape=(15, 100)), r"tensor model\.layer\.weight is BF16 \(1500,\), expected BF16 \(15, 100\)"),
    "type": (lambda one: _entry(one, "model.layer.weight", dtype="F16"), r"tensor model\.layer\.weight is BF16 .*expected F16"),
    "checksum": (lambda one: _entry(one, "model.steps", checksum="0" * 16), r"tensor model\.steps has checksum .*damaged"),
    "outside": (lambda one: _entry(one, "model.steps", file="../../secret"), r"tensor model\.steps is said to lie in \.\./\.\./secret, outside"),
    "absolute": (lambda one: _entry(one, "model.steps", file="/etc/passwd"), r"tensor model\.steps is said to lie in /etc/passwd, outside"),
    "elsewhere": (lambda one: dataclasses.replace(one, location="/etc"), r"lies in /etc.* outside the store"),
}


@pytest.mark.parametrize("which", BAD)
def test_a_bad_manifest_is_refused_by_the_name_of_its_tensor(versions: VersionStore, which: str):
    change, words = BAD[which]
    manifest = versions.write(weights(0))
    with pytest.raises(ManifestError, match=words):
        versions.verify(change(manifest))
    versions.verify(manifest)


@pytest.mark.parametrize("place", ["directory", "memory"], indirect=True)
def test_weights_that_an_engine_would_load_though_no_manifest_names_them_are_refused(place: Place, versions: VersionStore):
    manifest = versions.write(weights(0))
    file = manifest.tensors[0].file
    shutil.copyfile(place.path(manifest, file), place.path(manifest, "more.safetensors"))
    with pytest.raises(ManifestError, match=r"more\.safetensors is not in the manifest"):
        versions.verify(manifest)


@pytest.mark.parametrize("which", ["outside", "absolute", "elsewhere"])
def test_nothing_is_copied_from_outside(versions: VersionStore, which: str, tmp_path: Path):
    change, words = BAD[which]
    (target := tmp_path / "copy").mkdir()
    with pytest.raises(ManifestError, match=words):
        versions.copy(change(versions.write(weights(0))), target)
    assert not [path for path in target.iterdir() if path.name in ("secret", "passwd")]


@pytest.mark.parametrize("place", ["directory", "memory", "objects"], indirect=True)
@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_damaged_or_truncated_file_is_refused_by_the_name_of_a_tensor(place: Place, versions: VersionStore, kind: str):
    manifest = versions.write(weights(0))
    if kind == "delta":
        manifest = versions.write_delta(weights(1), manifest, weights(0).tensors)
    file = next(entry.file for entry in manifest.tensors if entry.name == "model.layer.weight")
    path = place.path(manifest, file)
    whole = path.read_bytes()
    names = "|".join(entry.name.replace(".", r"\.") for entry in manifest.tensors if entry.file == file)
    for at in (len(whole) - 1, len(whole) - 20):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ManifestError, match=rf"tensor ({names}) .*damaged"):
            versions.verify(manifest)
    for cut in (1, 9):
        path.write_bytes(whole[:-cut])
        with pytest.raises(ManifestError, match=rf"tensor ({names}) lies at bytes .* torn"):
            versions.verify(manifest)
    path.write_bytes(whole)
    versions.verify(manifest)


@pytest.mark.parametrize("place", ["directory", "memory", "objects"], indirect=True)
def test_a_manifest_file_that_is_none_is_refused(place: Place, versions: VersionStore):
    manifest = versions.write(weights(0))
    path = place.path(manifest, "manifest.json")
    for content in (b"", b"{}", b"[1]", b'{"version": "1:0"}', path.read_bytes()[:-3], path.read_bytes().replace(b'"1:0"', b'"1:9"')):
        path.write_bytes(content)
        with pytest.raises(ManifestError, match=r"manifest\.json"):
            versions.manifest(Version(1, 0))


def test_the_store_of_a_run_follows_its_configuration(tmp_path: Path):
    run = RunConfig(name="r")
    here = open_store(WeightsConfig(store=str(tmp_path)), run)
    there = open_store(WeightsConfig(store=f"file://{tmp_path}"), run)
    assert isinstance(here, DirectoryStore)
    assert isinstance(there, DirectoryStore)
    assert here.folder == there.folder == tmp_path / "r"
    away = open_store(WeightsConfig(store="memory://bucket/weights/"), run)
    assert (type(away), away.location) == (ObjectVersions, "memory://bucket/weights/r")
    with pytest.raises(ConfigError, match=r"weights\.store"):
        open_store(WeightsConfig(store="nonsense://bucket"), run)


# -- kills ---------------------------------------------------------------------------------------------------------------------------------------

_WRITER = """
import os, sys
from protocol.failpoints import arm
from tests.weightsync.places import Place, weights
from pathlib import Path
kind, where, model, what = sys.argv[1:]
store = Place(kind, where, Path(model)).open()
parent = store.write(weights(0))
print("written", flush=True)
arm(os.environ)
store.write(weights(1)) if what == "full" else store.write_delta(weights(1), parent, weights(0).tensors)
"""
_EDGES = [
    *((what, str(at)) for what, parts in (("full", 2), ("delta", 1)) for at in (*(f"{Failpoint.VERSION_PART_WRITTEN}:{n}" for n in range(1, parts + 1)),)),
    *itertools.product(("full", "delta"), (str(Failpoint.VERSION_WRITTEN), str(Failpoint.VERSION_RENAMED))),
]


@pytest.mark.faults
@pytest.mark.parametrize("place", ["directory", "objects"], indirect=True)
@pytest.mark.parametrize(("what", "edge"), _EDGES)
def test_a_kill_between_any_two_writes_leaves_no_half_version(place: Place, model_path: Path, what: str, edge: str):
    environ = {**os.environ, VARIABLE: edge, "PYTHONPATH": "."}
    command = [sys.executable, "-c", _WRITER, place.kind, place.where, str(model_path), what]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "written\n"), ended.stderr
    store = place.open()
    there = store.versions()
    assert there == ((Version(1, 0), Version(1, 1)) if edge == Failpoint.VERSION_RENAMED else (Version(1, 0),))
    for version in there:
        store.verify(store.manifest(version))
    assert store.sweep(1, {Version(1, 0)}) in ((Version(1, 1),), ())
    left = {path.relative_to(place.where).parts[0] for path in Path(place.where).rglob("*")}
    assert {name for name in left if not name.startswith(("assets-", ".part-"))} == {"v1-0"}  # .part-: an object store of files clears them an hour later
    again = store.write(weights(1))
    store.verify(again)
    assert store.versions() == (Version(1, 0), Version(1, 1))
