"""Checkpoints on disk: whole or not there, and no pickle.

    <folder>/step-000123-2/          after step 123 of incarnation 2
        model/                       a Hugging Face model folder: config, tokenizer, model.safetensors; with [lora] a peft folder that holds the adapter alone
        optimizer.safetensors        exp_avg, exp_avg_sq and step by parameter name
        state.json                   step, incarnation, digest, random state, learning-rate schedule, stop criteria's counters
        journal.msgpack              the journal since the oldest kept checkpoint
    <folder>/.tmp-step-…             being written, or left by a kill: never read, removed at the next start

A folder gets its name by one rename, after its files and their directories are on disk; it is a checkpoint once the ledger has registered it (rule T5).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import orjson

from buffer.contract import CheckpointRef
from consumer.backend import Base, TrainingState
from consumer.journal import JournalTail
from protocol.durable import make_folder, sync_folder, write_file
from protocol.errors import ConfigError, RollstreamError
from protocol.failpoints import Failpoint, failpoint
from weightsync.lora import ADAPTER_FILE, ADAPTER_SETTINGS
from weightsync.safetensors_file import open_tensors, write_tensors
from weightsync.snapshot import TensorBytes, weights_digest

SCHEMA = 1
Incarnations: TypeAlias = "Mapping[int, tuple[int, int, str]]"
"""Incarnation → (parent, fork step, random id; "" where that is not known)."""
_NAME = re.compile(r"step-\d{6,}-\d+")
_TEMPORARY, _WHOLE = ".tmp-", "model.safetensors"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the stop criteria and the schedule count, over resumes."""

    step: int = 0
    tokens: int = 0
    """Entered the loss."""
    elapsed_s: float = 0.0
    rewards: tuple[float, ...] = ()
    """Mean sampled reward of the last steps, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything that resuming needs."""

    progress: Progress
    incarnation: int
    digest: str
    """Of the weights."""
    state: TrainingState
    journal: bytes
    incarnations: Incarnations = field(default_factory=dict)
    """The fork table as its trainer knew it, for a ledger that lost it (rule R1)."""
    schedule: Mapping[str, float]
    """For people: learning rate and warm-up it ran with; the schedule itself is a function of the step."""


class CheckpointDamaged(ConfigError):
    """A registered checkpoint cannot be read, today or on the next try. Going back to an older one is a decision for a person."""


def checkpoint_name(step: int, incarnation: int) -> str:
    return f"step-{step:06d}-{incarnation}"


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, model_path: Path) -> Path:
    """Write and return the final folder, durable. Blocks: call it in a thread. Written again, it replaces what an unregistered attempt left."""
    name = checkpoint_name(checkpoint.progress.step, checkpoint.incarnation)
    target, temporary = folder / name, folder / f"{_TEMPORARY}{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(folder)
    (temporary / "model").mkdir(parents=True)
    try:
        base = checkpoint.state.base
        if base is not None:
            write_file(temporary / "model" / ADAPTER_SETTINGS, base.settings)
        for source in sorted(model_path.iterdir()) if base is None else ():
            if source.is_file() and source.suffix not in _WEIGHT_SUFFIXES and not source.name.endswith(".index.json"):
                write_file(temporary / "model" / source.name, source.read_bytes())
        write_tensors(temporary / "model" / (_WHOLE if base is None else ADAPTER_FILE), checkpoint.state.weights, durable=True)
        write_tensors(temporary / "optimizer.safetensors", checkpoint.state.optimizer, durable=True)
        write_file(temporary / "journal.msgpack", checkpoint.journal)
        write_file(temporary / "state.json", _dump_state(checkpoint))
        sync_folder(temporary / "model")
        sync_folder(temporary)
        failpoint(Failpoint.CHECKPOINT_WRITTEN)
        if target.is_dir():
            shutil.rmtree(target)
        temporary.rename(target)
        sync_folder(folder)
        failpoint(Failpoint.CHECKPOINT_RENAMED)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def read_checkpoint(reference: CheckpointRef, *, folder: Path) -> Checkpoint:
    """The registered checkpoint, verified by the digest of its weights. A run folder may have moved since: `folder` is tried too.

    Raises: `CheckpointDamaged` naming the file.
    """
    path = Path(reference.path)
    if not path.is_dir():
        path = folder / checkpoint_name(reference.step, reference.incarnation)
    try:
        state = orjson.loads((path / "state.json").read_bytes())
        base = Base(**state["base"]) if state.get("base") else None
        weights = _read_tensors(path / "model" / (_WHOLE if base is None else ADAPTER_FILE))
        optimizer = _read_tensors(path / "optimizer.safetensors")
        journal = (path / "journal.msgpack").read_bytes()
        JournalTail.load(journal)
        rng = {name: base64.b64decode(text, validate=True) for name, text in state["rng"].items()}
        progress = Progress(step=state["step"], tokens=state["tokens"], elapsed_s=state["elapsed_s"], rewards=tuple(state["rewards"]))
        incarnation, schema, schedule = int(state["incarnation"]), int(state["schema"]), dict(state["schedule"])
        incarnations = {int(number): (int(parent), int(step), str(name)) for number, (parent, step, name) in state.get("incarnations", {}).items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, binascii.Error, RollstreamError) as problem:
        raise CheckpointDamaged(f"checkpoint of step {reference.step} in {path} cannot be read ({type(problem).__name__}: {problem})") from problem
    if schema > SCHEMA:
        raise CheckpointDamaged(f"checkpoint {path} was written with schema {schema}, this process reads up to {SCHEMA}: upgrade rollstream here")
    digest = weights_digest(weights)
    if digest != reference.digest or progress.step != reference.step:
        raise CheckpointDamaged(
            f"checkpoint {path} holds weights {digest} after step {progress.step}, registered were {reference.digest} after step {reference.step}"
        )
    return Checkpoint(
        progress=progress,
        incarnation=incarnation,
        digest=digest,
        state=TrainingState(weights=weights, optimizer=optimizer, rng=rng, base=base),
        journal=journal,
        incarnations=incarnations,
        schedule=schedule,
    )


def checkpoints_on_disk(folder: Path) -> list[CheckpointRef]:
    """Every whole checkpoint in `folder`, by step and incarnation, whether the ledger knows it or not. One whose state cannot be read is passed over."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (_NAME.fullmatch(path.name) and path.is_dir()):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = orjson.loads((path / "state.json").read_bytes())
            found.append(CheckpointRef(step=int(state["step"]), incarnation=int(state["incarnation"]), digest=str(state["digest"]), path=str(path)))
    return sorted(found, key=lambda one: (one.step, one.incarnation))


def sweep(folder: Path, kept: Collection[CheckpointRef], *, incarnation: int, below: tuple[int, int] | None = None) -> list[str]:
    """Delete half-written folders and checkpoints that the ledger does not keep; returns their names. Nothing else in `folder` is touched.

    `incarnation`: the caller's. What a later one wrote stays: a trainer that was replaced, and does not know it yet, must not delete its successor's.
    `below`: only checkpoints older than this (step, incarnation), so that a newer one that is just being registered stays.
    """
    names = {checkpoint_name(reference.step, reference.incarnation) for reference in kept} | {Path(reference.path).name for reference in kept}
    removed: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = path.name.removeprefix(_TEMPORARY)
        if not (_NAME.fullmatch(name) and path.is_dir()) or _order(name)[1] > incarnation:
            continue
        half = name != path.name and below is None
        stale = name == path.name and name not in names and (below is None or _order(name) < below)
        if half or stale:
            shutil.rmtree(path, ignore_errors=True)  # another trainer of the run may be sweeping too
            removed.append(path.name)
    return removed


def _order(name: str) -> tuple[int, int]:
    _, step, incarnation = name.split("-")
    return int(step), int(incarnation)


def _dump_state(checkpoint: Checkpoint) -> bytes:
    progress, base = checkpoint.progress, checkpoint.state.base
    state = {
        "schema": SCHEMA,
        "step": progress.step,
        "incarnation": checkpoint.incarnation,
        "digest": checkpoint.digest,
        "tokens": progress.tokens,
        "elapsed_s": progress.elapsed_s,
        "rewards": list(progress.rewards),
        "incarnations": {str(number): list(fork) for number, fork in checkpoint.incarnations.items()},
        "schedule": dict(checkpoint.schedule),
        "rng": {name: base64.b64encode(value).decode() for name, value in checkpoint.state.rng.items()},
    }
    if base is not None:
        state["base"] = {"path": base.path, "digest": base.digest, "scaling": base.scaling}
    return orjson.dumps(state, option=orjson.OPT_INDENT_2)


def _read_tensors(path: Path) -> dict[str, TensorBytes]:
    with open_tensors(path) as tensors:
        return {name: TensorBytes(dtype=tensor.dtype, shape=tensor.shape, data=bytes(tensor.data)) for name, tensor in tensors.items()}
