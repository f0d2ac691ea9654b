"""Which model `rollstream eval --checkpoint` means, and what it says where there is none."""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumer.backend import Base, TrainingState
from consumer.checkpoint import Checkpoint, Progress, write_checkpoint
from consumer.config import CheckpointConfig
from consumer.merging import files_digest
from consumer.parts import Place as At
from consumer.shards import write_shards
from deploy.cli import main
from deploy.saved import Saved, saved_model
from protocol.config import ModelConfig, RunConfig
from protocol.errors import ConfigError, ManifestError, Unavailable
from protocol.versions import Version
from tests.producer.engine.conftest import write_model
from weightsync.adapter_store import AdapterStore
from weightsync.cast import cast
from weightsync.config import WeightsConfig
from weightsync.lora import LoraConfig
from weightsync.mirror import Mirror
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import Snapshot, TensorBytes, weights_digest
from weightsync.store import DirectoryStore, open_store


def weights_of(model: Path) -> dict[str, TensorBytes]:
    with open_tensors(model / "model.safetensors") as tensors:
        return {name: TensorBytes(dtype=one.dtype, shape=one.shape, data=bytes(one.data)) for name, one in tensors.items()}


class Place:
    """A run's folder with models of different seeds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model", seed=1)
        self.run = RunConfig(name="r", dir=str(folder / "run"))
        self.weights = WeightsConfig(store=str(folder / "store"))
        self.checkpoint = CheckpointConfig()

    @property
    def checkpoints(self) -> Path:
        return self.checkpoint.folder(self.run)

    @property
    def store(self) -> DirectoryStore:
        store = open_store(self.weights, self.run, self.model)
        assert isinstance(store, DirectoryStore)
        return store

    def save(self, step: int, incarnation: int, *, weights: dict[str, TensorBytes]) -> Path:
        checkpoint = Checkpoint(
            progress=Progress(step=step),
            incarnation=incarnation,
            state=TrainingState(weights=weights, optimizer={}, rng={}),
            journal=b"",
            schedule={},
        )
        return Path(write_checkpoint(self.checkpoints, checkpoint, model_path=self.model).path)

    def find(self, what: str) -> Any:
        return saved_model(what, run=self.run, model=ModelConfig(path=str(self.model)), checkpoint=self.checkpoint, weights=self.weights)

    async def found(self, what: str) -> tuple[Saved, str]:
        """What it is, and the digest of its weights."""
        async with self.find(what) as saved:
            assert (saved.folder / "tokenizer.json").is_file()
            return saved, weights_digest(weights_of(saved.folder))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, TensorBytes]]:
    folder = tmp_path_factory.mktemp("others")
    return [weights_of(write_model(folder / str(seed), seed=seed)) for seed in (2, 3, 4)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_step_a_version_and_latest_name_checkpoints_of_the_newest_incarnation_first(place: Place, others: list[dict[str, TensorBytes]]):
    digests = [weights_digest(weights) for weights in others]
    place.save(20, 1, weights=others[0])
    place.save(10, 1, weights=others[1])
    place.save(10, 2, weights=others[2])
    for what, version, digest in (("10", "2:10", digests[2]), ("1:10", "1:10", digests[1]), ("20", "1:20", digests[0]), ("latest", "2:10", digests[2])):
        saved, seen = await place.found(what)
        assert (str(saved.version), saved.digest, seen, saved.label) == (version, digest, digest, f"checkpoint {version}"), what


async def test_a_published_version_is_found_where_there_is_no_checkpoint_of_it(place: Place, others: list[dict[str, TensorBytes]]):
    for n, weights in enumerate(others):
        place.store.write(Snapshot(version=Version(1, n), tensors=weights))
    saved, digest = await place.found("latest")
    assert (saved.label, saved.version, digest) == ("version 1:2", Version(1, 2), weights_digest(others[2]))
    saved, digest = await place.found("1")
    assert (saved.version, digest) == (Version(1, 1), weights_digest(others[1]))
    place.save(1, 1, weights=others[0])
    assert (await place.found("latest"))[0].label == "checkpoint 1:1"
    assert (await place.found("1:2"))[0].label == "version 1:2"


async def test_a_version_that_holds_only_what_changed_is_made_whole_for_as_long_as_it_is_needed(place: Place, others: list[dict[str, TensorBytes]]):
    base = others[0]
    name = max(base, key=lambda one: len(base[one].data))
    raw = bytearray(base[name].data)
    raw[:4] = b"\x00\x00\x00\x3f"
    changed = base | {name: TensorBytes(dtype=base[name].dtype, shape=base[name].shape, data=bytes(raw))}
    parent = place.store.write(Snapshot(version=Version(1, 0), tensors=base))
    assert place.store.write_delta(Snapshot(version=Version(1, 1), tensors=changed), parent, base).kind == "delta"
    for what in ("1:1", str(place.store.path(Version(1, 1)))):
        async with place.find(what) as saved:
            folder = saved.folder
            assert weights_digest(weights_of(folder)) == weights_digest(changed) == saved.digest
        assert not folder.exists()


@pytest.mark.parametrize(
    ("problem", "error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ConfigError, "make room, or set TMPDIR"),
        (OSError(errno.EIO, "Input/output error"), Unavailable, "Input/output error; try again"),
        (TimeoutError(), Unavailable, "no whole model came of it within"),
    ],
)
async def test_a_copy_that_cannot_be_made_says_why_and_leaves_nothing(
    place: Place, others: list[dict[str, TensorBytes]], monkeypatch: pytest.MonkeyPatch, problem: OSError, error: type[Exception], message: str
):
    base = others[0]
    name = min(base, key=lambda one: len(base[one].data))
    parent = place.store.write(Snapshot(version=Version(1, 0), tensors=base))
    place.store.write_delta(Snapshot(version=Version(1, 1), tensors=base | {name: others[1][name]}), parent, base)
    scratch = place.folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    async def refuse(mirror: Mirror, *_: object, **__: object) -> Path:
        (mirror.folder / "half").touch()
        raise problem

    monkeypatch.setattr(Mirror, "ensure", refuse)
    with pytest.raises(error, match=message):
        await place.found("1:1")
    assert list(scratch.iterdir()) == []


async def test_folders_are_checkpoints_versions_or_models_by_what_is_in_them(place: Place, others: list[dict[str, TensorBytes]]):
    checkpoint = place.save(5, 1, weights=others[0])
    place.store.write(Snapshot(version=Version(1, 7), tensors=others[1]))
    saved, digest = await place.found(str(checkpoint))
    assert (saved.version, digest) == (Version(1, 5), weights_digest(others[0]))
    saved, digest = await place.found(str(place.store.path(Version(1, 7))))
    assert (saved.version, digest) == (Version(1, 7), weights_digest(others[1]))
    for what in ("", str(place.model)):
        saved, digest = await place.found(what)
        assert (saved.version, saved.folder, digest) == (None, place.model, weights_digest(weights_of(place.model)))


@pytest.mark.parametrize("what", ["7", "1:7", "latest"])
async def test_what_is_not_there_is_told_with_what_is(place: Place, others: list[dict[str, TensorBytes]], what: str):
    with pytest.raises(ConfigError, match=f"--checkpoint {what}: no such checkpoint in .*there is none.*nor a version in .*there is none"):
        await place.found(what)
    if what != "latest":
        place.save(5, 1, weights=others[0])
        with pytest.raises(ConfigError, match=re.escape("(there are 1:5)")):
            await place.found(what)


async def test_a_folder_that_is_no_model_is_refused_with_what_it_lacks(place: Place):
    for path, message in ((place.folder / "nowhere", "no such folder"), (place.folder, "has no config.json")):
        with pytest.raises(ConfigError, match=message):
            await place.found(str(path))
    for name, message in (("tokenizer.json", "has no tokenizer.json"), ("model.safetensors", "has no \\*.safetensors file")):
        broken = Path(shutil.copytree(place.model, place.folder / f"without-{name}"))
        (broken / name).unlink()
        with pytest.raises(ConfigError, match=message):
            await place.found(str(broken))


def sharded(place: Place, weights: dict[str, TensorBytes]) -> Path:
    """A checkpoint of step 5 whose weights two ranks have written, every other tensor each."""
    halves = [{name: weights[name] for name in sorted(weights)[rank::2]} for rank in range(2)]
    states = [TrainingState(weights=half, optimizer={}, rng={}, part=(rank, 2)) for rank, half in enumerate(halves)]
    checkpoint = Checkpoint(progress=Progress(step=5), incarnation=1, state=states[0], journal=b"", schedule={})
    found = write_checkpoint(place.checkpoints, checkpoint, model_path=place.model, others=lambda folder: lambda: [write_shards(folder, states[1])])
    return Path(found.path)


async def test_a_checkpoint_of_several_ranks_is_made_whole_while_it_is_looked_at(place: Place, others: list[dict[str, TensorBytes]]):
    path = sharded(place, others[0])
    saved, digest = await place.found("latest")
    assert (saved.label, saved.version, saved.digest, digest) == ("checkpoint 1:5", Version(1, 5), *2 * [weights_digest(others[0])])
    assert not saved.folder.exists()
    assert not list((path / "model").glob("*.safetensors"))
    file = path / "shards" / "weights-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match=r"weights-00002-of-00002\.safetensors has checksum .*choose another"):
        await place.found("5")


def test_an_exported_model_loads_with_transformers_in_the_type_that_was_asked_for(
    place: Place, others: list[dict[str, TensorBytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Of two ranks' parts, in files of one tensor each, since there is no room for two."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("consumer.model_folder.FILE_BYTES", 1)
    sharded(place, others[0])
    file, out = tmp_path / "run.toml", tmp_path / "exported"
    sections = {"run": {"name": "r", "dir": place.run.dir}, "model": {"path": str(place.model)}, "weights": {"store": place.weights.store}}
    file.write_text("".join(f"[{name}]\n" + "".join(f'{key} = "{value}"\n' for key, value in one.items()) for name, one in sections.items()))
    command = ["export-model", "-c", str(file), "--checkpoint", "5", "--out", str(out), "--dtype", "bfloat16"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"checkpoint 1:5 in {out}\n"
    assert len(list(out.glob("model-*.safetensors"))) == len(others[0])
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    expected = cast(others[0], "bfloat16")
    for name, tensor in model.named_parameters():
        assert str(tensor.dtype) == "torch.bfloat16"
        assert tensor.detach().float().numpy().astype("<f4").tobytes() == bytes(cast({name: expected[name]}, "float32")[name].data), name
    assert main(command) == 2, "it is there already"
    assert "give a new folder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")) == []


async def test_a_damaged_checkpoint_and_a_damaged_version_are_refused(place: Place, others: list[dict[str, TensorBytes]]):
    checkpoint = place.save(5, 1, weights=others[0])
    place.store.write(Snapshot(version=Version(1, 7), tensors=others[1]))
    for path in (checkpoint / "model" / "model.safetensors", place.store.path(Version(1, 7)) / "model.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    with pytest.raises(ConfigError, match="it is damaged"):
        await place.found("5")
    with pytest.raises(ManifestError, match="1:7"):
        await place.found("7")
    (checkpoint / "model" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ConfigError, match="it is torn"):
        await place.found("5")
    (checkpoint / "state.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        await place.found(str(checkpoint))


async def test_a_published_adapter_is_no_model_and_is_told_so(place: Place, others: list[dict[str, TensorBytes]]):
    AdapterStore(place.store.folder, LoraConfig(rank=2).settings("/base")).write(Snapshot(version=Version(1, 3), tensors=others[0]))
    with pytest.raises(ConfigError, match=r"version 1:3 .* holds an adapter, not a model: name the checkpoint of its step"):
        await place.found("1:3")
    with pytest.raises(ConfigError, match="holds an adapter"):
        await place.found(str(place.store.path(Version(1, 3))))


async def test_a_checkpoint_of_an_adapter_that_two_ranks_wrote_is_merged_into_the_model_while_it_is_looked_at(place: Place):
    """The product by hand, and every other weight as it is."""
    layer, rng = "model.layers.0.self_attn.q_proj", np.random.default_rng(0)
    before = weights_of(place.model)
    rows, columns = before[f"{layer}.weight"].shape
    a, b = rng.standard_normal((2, columns), np.float32), rng.standard_normal((rows, 2), np.float32)
    base = Base(path="/elsewhere", digest=files_digest(place.model), scaling=1.5, settings=b"{}")
    states = [
        TrainingState(
            weights={
                f"base_model.model.{layer}.lora_{side}.weight": TensorBytes(dtype="F32", shape=part.shape, data=part.tobytes())
                for side, part in (("A", a[rank : rank + 1]), ("B", b[rank * rows // 2 : (rank + 1) * rows // 2]))
            },
            optimizer={},
            rng={},
            base=base,
            part=(rank, 2),
            places={
                "weights": {
                    f"base_model.model.{layer}.lora_A.weight": At(start=(rank, 0), whole=a.shape),
                    f"base_model.model.{layer}.lora_B.weight": At(start=(rank * rows // 2, 0), whole=b.shape),
                }
            },
        )
        for rank in range(2)
    ]
    checkpoint = Checkpoint(progress=Progress(step=9), incarnation=1, state=states[0], journal=b"", schedule={})
    path = Path(write_checkpoint(place.checkpoints, checkpoint, model_path=place.model, others=lambda to: lambda: [write_shards(to, states[1])]).path)
    assert sorted(file.name for file in path.glob("*/*")) == ["adapter_config.json", *(f"weights-0000{rank}-of-00002.safetensors" for rank in (1, 2))]
    async with place.find("9") as saved:
        after = weights_of(saved.folder)
        assert (saved.label, saved.version, (saved.folder / "tokenizer.json").is_file()) == ("checkpoint 1:9", Version(1, 9), True)
    was, found = (np.frombuffer(one.pop(f"{layer}.weight").data, np.float32).reshape(rows, columns) for one in (before, after))
    np.testing.assert_allclose(found, was + 1.5 * (b @ a), rtol=1e-6, atol=1e-6)
    assert weights_digest(after) == weights_digest(before)
    assert not saved.folder.exists()
    write_model(place.folder / "other", seed=7)
    place.model = place.folder / "other"
    with pytest.raises(ConfigError, match=r"were in /elsewhere, and model\.path .*other has .*: correct model\.path"):
        await place.found("9")
