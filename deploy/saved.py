"""A saved model, found by what people call it: a step, a version, `latest`, or a folder.

| what is given | what is meant |
| --- | --- |
| nothing | model.path as it is |
| `latest` | the run's newest checkpoint; without one, its newest published version |
| `120` | its checkpoint after step 120, of the newest incarnation; without one, the published version with that n |
| `2:120` | exactly that version, as a checkpoint or as published |
| a folder | a checkpoint, a version of a store, or a Hugging Face model folder |
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import orjson

from buffer.contract import CheckpointRef
from consumer.backend import Base
from consumer.checkpoint import CheckpointDamaged, checkpoints_on_disk, saved_base, saved_weights
from consumer.config import CheckpointConfig
from consumer.model_folder import write_model
from consumer.shards import MODEL_FILE, SavedTensors
from protocol.config import ModelConfig, RunConfig
from protocol.errors import ConfigError, DecodeError, Unavailable
from protocol.messages import Manifest
from protocol.versions import Version
from weightsync.adapter_store import KIND as ADAPTER
from weightsync.config import WeightsConfig
from weightsync.lora import ADAPTER_SETTINGS
from weightsync.mirror import Mirror
from weightsync.safetensors_file import open_model
from weightsync.snapshot import weights_digest
from weightsync.store import DirectoryStore, VersionStore, open_store
from weightsync.version_files import MANIFEST_FILE

LATEST = "latest"
_COPY_S = 3600.0
_REMOVE_S = 10.0
_LOOK_S = 0.1
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
_NUMBER = re.compile(r"\d+")
_NAMED = 8
"""Steps and versions named in one error; the rest are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A model folder that an engine loads."""

    label: str
    """What it is, for people and for the name of a file."""
    folder: Path
    version: Version | None = None
    """None: it is no version of a run, as far as can be seen."""
    digest: str = ""
    """Of its weights, where something recorded it; checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharded:
    """A checkpoint of several ranks: its weights are in parts."""

    saved: Saved
    weights: SavedTensors

    def write(self, folder: Path) -> None:
        """Raises: as `write_model`."""
        write_model(folder, self.weights, self.saved.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapter(_Sharded):
    """A checkpoint whose weights are an adapter's; `saved` is, but for its label and version, the model it belongs to."""

    base: Base

    def write(self, folder: Path) -> None:
        """Raises: as `write_model`; `ConfigError` where the weights it belongs to are not there."""
        from consumer.merging import MergedFiles, base_in  # torch

        base = base_in(self.saved.folder, self.base)
        with open_model(self.saved.folder) as weights:
            write_model(folder, MergedFiles(weights, self.weights, base), self.saved.folder)


_Found: TypeAlias = Saved | _Sharded | tuple[Manifest, VersionStore]


@contextlib.asynccontextmanager
async def saved_model(what: str, *, run: RunConfig, model: ModelConfig, checkpoint: CheckpointConfig, weights: WeightsConfig) -> AsyncIterator[Saved]:
    """The model that `what` names, whole and checked against its digest, for as long as the context is open: a version behind a URL, one that holds what
    changed only, and a checkpoint of several ranks or of an adapter, are made whole in a temporary folder.

    Raises: `ConfigError` naming what there is, or that there is no room for it; `ManifestError` for a damaged version; `Unavailable`: the store does not
    answer.
    """
    if not what:
        yield await asyncio.to_thread(_plain, Path(model.path))
        return
    store = open_store(weights, run)
    with _asking(store):
        found = await asyncio.to_thread(_find, what, checkpoint.folder(run), store, Path(model.path))
    if isinstance(found, Saved):
        yield found
        return
    if isinstance(found, _Sharded):
        async with _scratch() as folder:
            with _asking(store):
                await asyncio.to_thread(found.write, folder / "model")
            yield dataclasses.replace(found.saved, folder=folder / "model")
        return
    manifest, store = found
    if manifest.kind == ADAPTER:
        raise _adapter(f"--checkpoint: version {manifest.version} in {manifest.location}")
    if isinstance(store, DirectoryStore) and manifest.kind == "full":
        with _asking(store):
            await asyncio.to_thread(store.verify, manifest)
        yield _version(manifest, store.locate(manifest))
        return
    async with _scratch() as folder:
        with _asking(store):
            whole = await Mirror(folder, store).ensure(manifest, deadline_s=_COPY_S)
        yield _version(manifest, whole)


@contextlib.contextmanager
def _asking(store: VersionStore) -> Iterator[None]:
    """Raises: `ConfigError` for a disk without room, `Unavailable` for whatever else a store or a disk refuses."""
    try:
        yield
    except OSError as problem:
        if problem.errno in _NO_ROOM:
            raise ConfigError(
                f"{store.location}: cannot be read, or not be copied to {tempfile.gettempdir()} ({problem}); make it readable, make room, or set TMPDIR"
            ) from problem
        why = str(problem) or f"no whole model came of it within {_COPY_S:.0f} s"  # of `TimeoutError`
        raise Unavailable(f"{store.location}: {why}; try again once it answers") from problem


@contextlib.asynccontextmanager
async def _scratch() -> AsyncIterator[Path]:
    """A temporary folder that is gone afterwards, also where a copy into it is given up, which ends only at its next file or slab."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="rollstream-eval-"))
    except OSError as problem:
        raise ConfigError(f"a temporary folder for the model cannot be made ({problem}); make room, or set TMPDIR") from problem
    try:
        yield folder
    finally:
        await asyncio.to_thread(_remove, folder)


def _remove(folder: Path) -> None:
    end = time.monotonic() + _REMOVE_S
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(_LOOK_S)


def _find(what: str, checkpoints: Path, store: VersionStore, model: Path) -> _Found:
    version = _version_of(what)
    if what != LATEST and version is None and not _NUMBER.fullmatch(what):
        return _folder(Path(what), model)
    saved, published = checkpoints_on_disk(checkpoints), store.versions()
    if what == LATEST:
        chosen = max(saved, key=lambda one: (one.incarnation, one.step), default=None)
        number = max(published, default=None)
    elif version is not None:
        chosen = next((one for one in saved if (one.incarnation, one.step) == version), None)
        number = version if version in published else None
    else:
        step = int(what)
        chosen = max((one for one in saved if one.step == step), key=lambda one: one.incarnation, default=None)
        number = max((one for one in published if one.n == step), default=None)
    if chosen is not None:
        return _checkpoint(chosen, model)
    if number is not None:
        return store.manifest(number), store
    raise ConfigError(f"--checkpoint {what}: no such checkpoint in {checkpoints} ({_listed(saved)}), nor a version in {store.location} ({_named(published)})")


def _version_of(text: str) -> Version | None:
    try:
        return Version.parse(text)
    except DecodeError:
        return None


def _listed(saved: Sequence[CheckpointRef]) -> str:
    return _named([Version(one.incarnation, one.step) for one in saved])


def _named(versions: Sequence[Version]) -> str:
    if not versions:
        return "there is none"
    left = len(versions) - _NAMED
    return "there are " + ", ".join(str(one) for one in versions[-_NAMED:]) + (f" and {left} older" if left > 0 else "")


def _folder(path: Path, model: Path) -> _Found:
    if not path.is_dir():
        raise ConfigError(f"--checkpoint {path}: no such folder; give one, a step, a version such as 1:20, or {LATEST}")
    if (path / "state.json").is_file():
        try:
            state = orjson.loads((path / "state.json").read_bytes())
            reference = CheckpointRef(step=int(state["step"]), incarnation=int(state["incarnation"]), digest=str(state["digest"]), path=str(path))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(f"--checkpoint {path}: state.json cannot be read ({type(problem).__name__}: {problem}); choose another checkpoint") from problem
        return _checkpoint(reference, model)
    if (path / MANIFEST_FILE).is_file() and (version := _of_folder(path.name)) is not None:
        store = DirectoryStore(path.absolute().parent)
        return store.manifest(version), store
    return _plain(path, key="--checkpoint")


def _of_folder(name: str) -> Version | None:
    match = re.fullmatch(r"v(\d+)-(\d+)", name)
    return Version(int(match[1]), int(match[2])) if match else None


def _plain(path: Path, *, key: str = "model.path") -> Saved:
    """A Hugging Face model folder."""
    _check_beside(path, key)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{key} {path}: has no *.safetensors file; save the weights of the model there")
    return Saved(label=path.absolute().name, folder=path.absolute())


def _adapter(what: str) -> ConfigError:
    return ConfigError(
        f"{what} holds an adapter, not a model: name the checkpoint of its step, or merge it into the weights that its adapter_config.json names "
        "(peft: merge_and_unload), save that, and name its folder"
    )


def _check_beside(path: Path, key: str) -> None:
    if (path / ADAPTER_SETTINGS).is_file():
        raise _adapter(f"{key} {path}")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigError(f"{key} {path}: has no {name}; give a folder with config.json, tokenizer.json and safetensors weights")


def _checkpoint(reference: CheckpointRef, model: Path) -> Saved | _Sharded:
    """`model`: what an adapter belongs to. Raises: `ConfigError` for weights that are not those the checkpoint was registered with."""
    folder, version = Path(reference.path) / "model", Version(reference.incarnation, reference.step)
    try:
        base = saved_base(Path(reference.path))
        if base is None:
            _check_beside(folder, f"--checkpoint {reference.path}: its model folder")
        weights = saved_weights(reference)
        if base is not None:
            return _Adapter(saved=dataclasses.replace(_plain(model), label=f"checkpoint {version}", version=version), weights=weights, base=base)
        digest = weights_digest(weights)
    except (OSError, CheckpointDamaged) as problem:
        raise ConfigError(f"--checkpoint {reference.path}: {problem}; choose another checkpoint") from problem
    saved = Saved(label=f"checkpoint {version}", folder=folder.absolute(), version=version, digest=digest)
    return saved if (Path(reference.path) / MODEL_FILE).is_file() else _Sharded(saved=saved, weights=weights)


def _version(manifest: Manifest, folder: Path) -> Saved:
    return Saved(label=f"version {manifest.version}", folder=folder, version=manifest.version, digest=manifest.digest)
