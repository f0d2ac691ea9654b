"""Checkpoints on disk: whole or not there, and no pickle.

    <folder>/step-000123-2/          after step 123 of incarnation 2
        model/                       a Hugging Face model folder: config, tokenizer; with one rank model.safetensors;
                                     with [lora] a peft folder that holds the adapter alone
        optimizer.safetensors        with one rank: exp_avg, exp_avg_sq and step by parameter name
        shards/                      with several: what each rank has of either
        index.json                   every file's size and checksum, and where every tensor lies (`consumer.shards`)
        state.json                   step, incarnation, digest, random states, learning-rate schedule, stop criteria's counters
        journal.msgpack              the journal since the oldest kept checkpoint
    <folder>/.tmp-step-…             being written, or left by a kill: never read, removed at the next start
    <folder>/SAVE                    made by a person: one is written after the next step, then it is removed

A folder gets its name by one rename, once all ranks have said that their files are on disk, and its own are; it is a checkpoint once the ledger has
registered it (rule T5).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from buffer.contract import CheckpointRef
from consumer.backend import Base, TrainingState
from consumer.journal import JournalTail
from consumer.shards import (
    INDEX,
    MODEL_FILE,
    OPTIMIZER,
    WEIGHTS,
    Index,
    SavedTensors,
    ShardsDamaged,
    Told,
    check_size,
    digest_of_index,
    in_words,
    index_of_files,
    merged,
    read_index,
    told_of,
    verify,
    write_shards,
)
from protocol.durable import make_folder, sync_folder, write_file
from protocol.errors import ConfigError, RollstreamError
from protocol.failpoints import Failpoint, failpoint
from weightsync.lora import ADAPTER_SETTINGS
from weightsync.safetensors_file import open_tensors
from weightsync.snapshot import weights_digest
from weightsync.version_files import asset_files

SCHEMA = 2
_JOURNAL = "journal.msgpack"
_WHOLE = {WEIGHTS: MODEL_FILE, OPTIMIZER: "optimizer.safetensors"}
"""All that checkpoints of schema 1 had; their digest is that of the weights."""
Incarnations: TypeAlias = "Mapping[int, tuple[int, int, str]]"
"""Incarnation → (parent, fork step, random id; "" where that is not known)."""
Others: TypeAlias = Callable[[Path], Callable[[], Sequence[Told]]]
"""Has the other ranks write their parts into a folder; what it returns waits for them."""
_NAME = re.compile(r"step-\d{6,}-\d+")
_TEMPORARY = ".tmp-"


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
    state: TrainingState
    """Of one that was read: still on disk, see `consumer.shards.SavedTensors`."""
    journal: bytes
    incarnations: Incarnations = field(default_factory=dict)
    """The fork table as its trainer knew it, for a ledger that lost it (rule R1)."""
    schedule: Mapping[str, float]
    """For people: learning rate and warm-up it ran with; the schedule itself is a function of the step."""


class CheckpointDamaged(ConfigError):
    """A registered checkpoint cannot be read, today or on the next try. Going back to an older one is a decision for a person."""


def checkpoint_name(step: int, incarnation: int) -> str:
    return f"step-{step:06d}-{incarnation}"


def nobody(_folder: Path) -> Callable[[], Sequence[Told]]:
    """`Others` where one rank has everything."""
    return lambda: ()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, *, model_path: Path, others: Others = nobody) -> CheckpointRef:
    """Write it, with what the other ranks have, and return what it is known by; it is durable. Blocks: call it in a thread. Written again, it replaces what an
    unregistered attempt left.

    Raises: `OSError`; what `others` raises; `ConfigError` for files of another rank that are not to be seen here. Nothing is left then.
    """
    name = checkpoint_name(checkpoint.progress.step, checkpoint.incarnation)
    target, temporary = folder / name, folder / f"{_TEMPORARY}{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(folder)
    (temporary / "model").mkdir(parents=True)
    try:
        waiting = others(temporary)
        base = checkpoint.state.base
        if base is not None:
            write_file(temporary / "model" / ADAPTER_SETTINGS, base.settings)
        for source in asset_files(model_path) if base is None else ():
            write_file(temporary / "model" / source.name, source.read_bytes())
        write_file(temporary / _JOURNAL, checkpoint.journal)
        told = [write_shards(temporary, checkpoint.state), *waiting()]
        index = merged([*told, told_of(_JOURNAL, checkpoint.journal)])
        _see_all(temporary, read_index(index))
        digest = digest_of_index(index)
        write_file(temporary / INDEX, index)
        write_file(temporary / "state.json", _dump_state(checkpoint, digest, told))
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
    return CheckpointRef(step=checkpoint.progress.step, incarnation=checkpoint.incarnation, digest=digest, path=str(target))


def _see_all(folder: Path, index: Index) -> None:
    """Raises: `ConfigError` for files that another rank has written elsewhere."""
    for name, (size, _) in index.files.items():
        try:
            check_size(folder, name, size)
        except (FileNotFoundError, ShardsDamaged) as problem:
            raise ConfigError(
                f"{folder / name}: another rank has written it, and rank 0 does not see it so ({problem}): set checkpoint.dir to a folder that the hosts "
                "of all ranks share"
            ) from problem


def read_checkpoint(reference: CheckpointRef, *, folder: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """The registered checkpoint, its files verified; its tensors stay on disk. A run folder may have moved since: `folder` is tried too.

    `share`: (r, n), where rank r of n verifies only every n-th file, since the others do the rest.
    Raises: `CheckpointDamaged` naming the file.
    """
    path = Path(reference.path)
    if not path.is_dir():
        path = folder / checkpoint_name(reference.step, reference.incarnation)
    try:
        return _read(path, reference, share)
    except CheckpointDamaged:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError, binascii.Error, RollstreamError) as problem:
        raise CheckpointDamaged(f"checkpoint of step {reference.step} in {path} cannot be read ({in_words(problem)})") from problem


def _read(path: Path, reference: CheckpointRef, share: tuple[int, int]) -> Checkpoint:
    state = orjson.loads((path / "state.json").read_bytes())
    if (schema := int(state["schema"])) > SCHEMA:
        raise CheckpointDamaged(f"checkpoint {path} was written with schema {schema}, this process reads up to {SCHEMA}: upgrade rollstream here")
    index, digest = open_index(path, schema)
    journal = (path / _JOURNAL).read_bytes()
    JournalTail.load(journal)
    progress = Progress(step=state["step"], tokens=state["tokens"], elapsed_s=state["elapsed_s"], rewards=tuple(state["rewards"]))
    found = Checkpoint(
        progress=progress,
        incarnation=int(state["incarnation"]),
        state=_state_in(path, index, state, share[0]),
        journal=journal,
        incarnations={int(number): (int(parent), int(step), str(name)) for number, (parent, step, name) in state.get("incarnations", {}).items()},
        schedule=dict(state["schedule"]),
    )
    if (digest, progress.step) != (reference.digest, reference.step):
        raise CheckpointDamaged(f"checkpoint {path} is {digest} after step {progress.step}, registered were {reference.digest} after step {reference.step}")
    verify(path, index, sorted(index.files)[share[0] :: share[1]])
    return found


def open_index(path: Path, schema: int) -> tuple[Index, str]:
    """Where the tensors of the checkpoint in `path` lie, and its digest. Of schema 1, whose files had no checksums, the weights are read for that.

    Raises: `RollstreamError`, `OSError`.
    """
    if schema == 1:
        with open_tensors(path / MODEL_FILE) as tensors:
            return index_of_files(path, _WHOLE), weights_digest(tensors)
    content = (path / INDEX).read_bytes()
    return read_index(content), digest_of_index(content)


def saved_state(path: Path, share: tuple[int, int]) -> TrainingState:
    """What rank `share[0]` of `share[1]` reads its part from, once rank 0 has found the checkpoint in `path`. Raises: `CheckpointDamaged`."""
    try:
        state = orjson.loads((path / "state.json").read_bytes())
        reference = CheckpointRef(step=int(state["step"]), incarnation=int(state["incarnation"]), digest=str(state["digest"]), path=str(path))
    except FileNotFoundError as problem:
        raise CheckpointDamaged(f"{path} is not to be seen here: set checkpoint.dir to a folder that the hosts of all ranks share") from problem
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise CheckpointDamaged(f"{path}/state.json cannot be read ({in_words(problem)})") from problem
    return read_checkpoint(reference, folder=path.parent, share=share).state


def saved_base(folder: Path) -> Base | None:
    """What the adapter of the checkpoint in `folder` belongs to; None: it holds a model. Raises: `CheckpointDamaged`."""
    try:
        told = orjson.loads((folder / "state.json").read_bytes()).get("base")
        return Base(**told) if told else None
    except (OSError, TypeError, ValueError, AttributeError) as problem:
        raise CheckpointDamaged(f"{folder}/state.json cannot be read ({type(problem).__name__}: {problem})") from problem


def saved_weights(reference: CheckpointRef) -> SavedTensors:
    """The weights of the checkpoint at `reference.path`, verified, and nothing else of it. Raises: `CheckpointDamaged`."""
    path = Path(reference.path)
    try:
        index, digest = open_index(path, int(orjson.loads((path / "state.json").read_bytes())["schema"]))
        verify(path, index, index.files_of(WEIGHTS) if index.files else ())
    except (OSError, KeyError, TypeError, ValueError, RollstreamError) as problem:
        raise CheckpointDamaged(f"its weights cannot be read ({in_words(problem)})") from problem
    if digest != reference.digest:
        raise CheckpointDamaged(f"it is {digest}, and was saved as {reference.digest}: it is damaged")
    return SavedTensors(path, index.groups[WEIGHTS])


def _state_in(path: Path, index: Index, state: Mapping[str, Any], rank: int) -> TrainingState:
    groups = {group: SavedTensors(path, entries) for group, entries in index.groups.items()}
    every = [state["rng"], *state.get("rank_rng", [])]
    rng = {name: base64.b64decode(text, validate=True) for name, text in every[rank if rank < len(every) else 0].items()}
    base = Base(**state["base"]) if state.get("base") else None
    return TrainingState(weights=groups.pop(WEIGHTS), optimizer=groups.pop(OPTIMIZER), rng=rng, base=base, others=groups)


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


def _dump_state(checkpoint: Checkpoint, digest: str, told: Sequence[Told]) -> bytes:
    progress, base = checkpoint.progress, checkpoint.state.base
    state = {
        "schema": SCHEMA,
        "step": progress.step,
        "incarnation": checkpoint.incarnation,
        "digest": digest,
        "tokens": progress.tokens,
        "elapsed_s": progress.elapsed_s,
        "rewards": list(progress.rewards),
        "incarnations": {str(number): list(fork) for number, fork in checkpoint.incarnations.items()},
        "schedule": dict(checkpoint.schedule),
        "rng": told[0]["rng"],
        "rank_rng": [one["rng"] for one in told[1:]],
    }
    if base is not None:
        state["base"] = {"path": base.path, "digest": base.digest, "scaling": base.scaling, "dtype": base.dtype}
    return orjson.dumps(state, option=orjson.OPT_INDENT_2)
