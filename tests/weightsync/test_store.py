from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors

from protocol.errors import ConfigError, ManifestError, VersionGone
from protocol.versions import Version
from weightsync import store as store_module
from weightsync.config import WeightsConfig, relay_folder, store_folder
from weightsync.safetensors_file import open_tensors, write_tensors
from weightsync.snapshot import Snapshot, TensorBytes, weights_digest
from weightsync.store import DirectoryStore

multiprocessing.resource_tracker.ensure_running()  # it keeps a pipe open as long as this process lives


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_library_reads_what_we_write(tmp_path: Path, snapshot: Callable[[Version], Snapshot]):
    tensors = snapshot(Version(1, 4)).tensors
    write_tensors(tmp_path / "m.safetensors", tensors, durable=True)
    read = dict(safetensors.deserialize((tmp_path / "m.safetensors").read_bytes()))
    assert {name: (one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in read.items()} == {
        name: (one.dtype, one.shape, bytes(one.data)) for name, one in tensors.items()
    }


def test_we_read_what_the_library_writes(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(5), "c": torch.zeros(0, 2), "d": torch.tensor(True)}
    save_file(tensors, tmp_path / "m.safetensors")
    with open_tensors(tmp_path / "m.safetensors") as read:
        assert {name: (one.dtype, one.shape) for name, one in read.items()} == {
            "a": ("BF16", (2, 3)),
            "b": ("F32", (5,)),
            "c": ("F32", (0, 2)),
            "d": ("BOOL", ()),
        }
        assert bytes(read["b"].data) == tensors["b"].numpy().tobytes()


def test_a_version_folder_loads_like_a_model_folder(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(2, 7)))
    folder = Path(manifest.location)
    assert folder == store.folder / "v2-7"
    assert {path.name for path in folder.iterdir()} == {
        *("model.safetensors", "manifest.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    }
    assert all(path.read_bytes() for path in folder.iterdir())
    assert json.loads((folder / "manifest.json").read_text())["version"] == "2:7"


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 3000])
def test_transformers_loads_a_version_folder(tmp_path: Path, bucket_bytes: int):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=21,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    tensors = {
        name: TensorBytes(dtype="F32", shape=tuple(one.shape), data=one.detach().numpy().tobytes())
        for name, one in model.state_dict().items()
        if name != "lm_head.weight"
    }
    manifest = DirectoryStore(tmp_path / "store", tmp_path / "model", bucket_bytes=bucket_bytes).write(Snapshot(version=Version(1, 0), tensors=tensors))
    assert (len({entry.file for entry in manifest.tensors}) > 1) == (bucket_bytes == 3000)
    loaded = AutoModelForCausalLM.from_pretrained(manifest.location)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_verified_version_holds_exactly_the_snapshot(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    wanted = snapshot(Version(1, 3))
    manifest = store.write(wanted)
    DirectoryStore(store.folder).verify(manifest)
    with open_tensors(Path(manifest.location) / "model.safetensors") as tensors:
        assert weights_digest(tensors) == manifest.digest == weights_digest(wanted.tensors)
    assert manifest.total_bytes == sum(tensor.nbytes for tensor in wanted.tensors.values())


@pytest.mark.parametrize("tensor", ["model.embed.weight", "model.norm.weight", "model.steps"])
def test_a_flipped_bit_is_refused_by_the_name_of_its_tensor(store: DirectoryStore, snapshot: Callable[[Version], Snapshot], tensor: str):
    wanted = snapshot(Version(1, 3))
    manifest = store.write(wanted)
    path = Path(manifest.location) / "model.safetensors"
    content = bytearray(path.read_bytes())
    at = content.find(bytes(wanted.tensors[tensor].data))
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=rf"{tensor} has checksum .* damaged"):
        store.verify(manifest)


def test_a_torn_file_is_refused_by_the_name_of_a_tensor(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 3)))
    path = Path(manifest.location) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ManifestError, match=r"tensor model\.\S+ lies at bytes .* torn"):
        store.verify(manifest)
    for cut in (0, 7, 20):
        path.write_bytes(whole[:cut])
        with pytest.raises(ManifestError, match=r"too short|torn"):
            store.verify(manifest)


def test_hostile_headers_are_refused(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    for header in (
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "X", "shape": [], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}',
    ):
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ManifestError), open_tensors(path):
            pass
    path.write_bytes((1 << 60).to_bytes(8, "little"))
    with pytest.raises(ManifestError, match="torn"), open_tensors(path):
        pass


def test_a_manifest_that_names_other_tensors_than_the_file_is_refused(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 3)))
    entry = manifest.tensors[0]
    for wrong, words in ((dataclasses.replace(entry, name="model.ghost"), "model.ghost is not in"), (dataclasses.replace(entry, shape=(3, 4)), "expected F32")):
        with pytest.raises(ManifestError, match=words):
            store.verify(dataclasses.replace(manifest, tensors=(wrong, *manifest.tensors[1:])))


def test_links_that_lead_nowhere_are_refused(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 3)))
    path = store.path(Version(1, 3)) / manifest.tensors[0].file
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ManifestError):
        store.verify(manifest)


def test_leftovers_of_a_life_with_the_same_number_are_swept(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    """In a container every life of a process may have the number of the one before."""
    store.write(snapshot(Version(1, 3)))
    left = store.folder / f".tmp-{socket.gethostname()}-{os.getpid()}-deadbeef0000"
    odd = store.folder / ".tmp-odd"
    left.mkdir()
    odd.mkdir()
    store.sweep(1, [Version(1, 3)])
    assert not left.exists()
    assert odd.exists(), "nobody knows whose it is, and it is young"


def test_a_place_outside_the_store_is_refused(store: DirectoryStore, snapshot: Callable[[Version], Snapshot], tmp_path: Path):
    manifest = store.write(snapshot(Version(1, 3)))
    for location in (str(tmp_path), str(store.folder), f"{store.folder}/../model", "/etc"):
        with pytest.raises(ManifestError, match="outside the store"):
            store.verify(dataclasses.replace(manifest, location=location))
    outside = dataclasses.replace(manifest.tensors[0], file="../../model/model.safetensors")
    with pytest.raises(ManifestError, match="outside the version's folder"):
        store.verify(dataclasses.replace(manifest, tensors=(outside,)))
    (Path(manifest.location) / "link.safetensors").symlink_to(tmp_path / "model" / "model.safetensors")
    linked = dataclasses.replace(manifest.tensors[0], file="link.safetensors")
    with pytest.raises(ManifestError, match="outside the version's folder"):
        store.verify(dataclasses.replace(manifest, tensors=(linked,)))


def test_what_no_engine_can_load_is_not_located(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 3)))
    assert store.locate(manifest) == Path(manifest.location)
    for wrong, words in (({"kind": "delta"}, "delta by store"), ({"transport": "carrier pigeon"}, "full by carrier pigeon")):
        with pytest.raises(ManifestError, match=words):
            store.locate(dataclasses.replace(manifest, **wrong))
    with pytest.raises(ManifestError, match=r"delta of tensor model\.\S+ is .* no delta"):
        store.verify(dataclasses.replace(manifest, kind="delta"))


def test_a_deleted_version_is_gone_which_is_not_damage(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 3)))
    store.delete(Version(1, 3))
    store.delete(Version(1, 3))
    with pytest.raises(VersionGone):
        store.verify(manifest)
    assert store.versions() == ()
    missing = store.write(snapshot(Version(1, 4)))
    (Path(missing.location) / "model.safetensors").unlink()
    with pytest.raises(VersionGone, match=r"model\.embed\.weight"):
        store.verify(missing)


def test_a_version_is_written_once(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    first = store.write(snapshot(Version(1, 3)))
    again = store.write(snapshot(Version(1, 3)))
    assert again.digest == first.digest
    other = Snapshot(version=Version(1, 3), tensors=snapshot(Version(1, 8)).tensors)
    with pytest.raises(ManifestError, match="other weights"):
        store.write(other)
    store.verify(first)
    assert not list(store.folder.glob(".tmp-*"))


def test_concurrent_writers_of_one_version_agree(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    with ThreadPoolExecutor(8) as pool:
        manifests = list(pool.map(lambda _: store.write(snapshot(Version(1, 5))), range(16)))
    assert len({manifest.digest for manifest in manifests}) == 1
    store.verify(manifests[0])
    assert store.versions() == (Version(1, 5),)
    assert not list(store.folder.glob(".tmp-*"))


def test_a_failed_write_leaves_nothing_visible(store: DirectoryStore, snapshot: Callable[[Version], Snapshot], monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        store.write(snapshot(Version(1, 5)))
    assert store.versions() == ()
    assert not list(store.folder.glob(".tmp-*"))


def _die_while_writing(folder: str, stage: str) -> None:
    from weightsync import store as module

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    real = module.write_tensors
    if stage == "before":
        module.write_tensors = die
    else:

        def write_then_die(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            die()

        module.write_tensors = write_then_die
    tensors = {"w": TensorBytes(dtype="F32", shape=(2,), data=bytes(8))}
    DirectoryStore(folder).write(Snapshot(version=Version(1, 9), tensors=tensors))


@pytest.mark.faults
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", ["before", "after"])
def test_a_kill_in_the_middle_of_a_write_leaves_nothing_visible_and_is_swept(store: DirectoryStore, snapshot: Callable[[Version], Snapshot], stage: str):
    published = store.write(snapshot(Version(1, 8)))
    process = multiprocessing.get_context("spawn").Process(target=_die_while_writing, args=(str(store.folder), stage))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    assert store.versions() == (Version(1, 8),)
    assert len(list(store.folder.glob(".tmp-*"))) == 1
    assert store.sweep(1, {Version(1, 8)}) == ()
    assert not list(store.folder.glob(".tmp-*"))
    store.verify(published)


def test_a_sweep_leaves_live_writers_and_other_hosts_alone(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    store.write(snapshot(Version(1, 1)))
    store.write(snapshot(Version(1, 2)))
    ours, theirs = store.folder / f".tmp-{os.uname().nodename}-{os.getppid()}-abc", store.folder / ".tmp-other-host-1-abc"
    ours.mkdir()
    theirs.mkdir()
    assert store.sweep(1, {Version(1, 2)}) == (Version(1, 1),)
    assert store.versions() == (Version(1, 2),)
    assert ours.is_dir()
    assert theirs.is_dir()


def test_a_sweep_leaves_what_a_later_incarnation_wrote(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    for version in (Version(1, 9), Version(2, 7), Version(3, 7)):
        store.write(snapshot(version))
    assert store.sweep(2, ()) == (Version(1, 9), Version(2, 7))
    assert store.versions() == (Version(3, 7),)


def test_no_descriptor_is_left_open(store: DirectoryStore, snapshot: Callable[[Version], Snapshot]):
    manifest = store.write(snapshot(Version(1, 1)))
    before = _descriptors()
    for n in range(2, 6):
        store.verify(store.write(snapshot(Version(1, n))))
        with pytest.raises(ManifestError):
            store.verify(dataclasses.replace(manifest, tensors=(dataclasses.replace(manifest.tensors[0], checksum="0"), *manifest.tensors[1:])))
    assert _descriptors() == before


def test_the_digest_tells_names_shapes_types_and_bytes_apart():
    one = TensorBytes(dtype="F32", shape=(2, 1), data=bytes(8))
    base = weights_digest({"w": one, "x": one})
    assert weights_digest({"x": one, "w": one}) == base
    others = [
        {"w": one},
        {"w": one, "y": one},
        {"w": one, "x": TensorBytes(dtype="F32", shape=(1, 2), data=bytes(8))},
        {"w": one, "x": TensorBytes(dtype="I32", shape=(2, 1), data=bytes(8))},
        {"w": one, "x": TensorBytes(dtype="F32", shape=(2, 1), data=b"1" + bytes(7))},
    ]
    assert len({base, *(weights_digest(tensors) for tensors in others)}) == len(others) + 1
    with pytest.raises(ValueError, match="expected 12 for F32"):
        TensorBytes(dtype="F32", shape=(3,), data=bytes(8))


def test_two_runs_never_share_a_store_folder(tmp_path: Path):
    from protocol.config import RunConfig

    one, two = RunConfig(name="a", dir=str(tmp_path / "1")), RunConfig(name="a", dir=str(tmp_path / "2"))
    assert store_folder(WeightsConfig(), one) != store_folder(WeightsConfig(), two)
    assert store_folder(WeightsConfig(), one) == store_folder(WeightsConfig(), one)
    assert store_folder(WeightsConfig(store=str(tmp_path)), RunConfig(name="b")) == tmp_path / "b"
    assert relay_folder(WeightsConfig(), one) != relay_folder(WeightsConfig(), two)
    same = WeightsConfig(store=str(tmp_path), relay=str(tmp_path))
    assert relay_folder(same, one) != store_folder(same, one)
    with pytest.raises(ConfigError, match="has no folder"):
        store_folder(WeightsConfig(store="s3://bucket"), one)
