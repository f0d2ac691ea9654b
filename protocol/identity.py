"""What makes a run the same run: fixed at creation, checked by every process that joins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson
import xxhash

from protocol.codec import SCHEMA
from protocol.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from protocol.data_path import split_data_path
from protocol.errors import ConfigError, DecodeError, IdentityMismatch, SchemaTooNew
from protocol.fields import reader

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Everything that must agree between the processes of a run, for the prompts and rewards of a `seq` to be the same everywhere."""

    schema_major: int
    seed: int
    group_size: int
    dataset: str
    """xxh3-128 of the file's bytes, and the slice."""
    tokenizer: str
    """xxh3-128 of the tokenizer's files."""

    @classmethod
    def read(cls, raw: bytes | str, *, run: str) -> RunIdentity:
        """The identity a run was created with. Fields this process does not know are a newer minor schema's, and ignored.

        Raises: `SchemaTooNew` for a run of a newer major; `DecodeError` naming the field.
        """
        try:
            facts = orjson.loads(raw)
            major = facts["schema_major"]
        except (ValueError, TypeError, KeyError) as problem:
            raise DecodeError(f"identity of run {run!r}", f"not what a run is created with ({problem})") from problem
        if type(major) is int and major > SCHEMA[0]:
            raise SchemaTooNew(f"run {run!r} was created with schema {major}.x, this process reads up to {SCHEMA[0]}.x: upgrade rollstream here")
        return cast("RunIdentity", reader(cast("Any", cls))(facts, f"identity of run {run!r}"))

    def check(self, joining: RunIdentity, *, run: str) -> None:
        """Raises: `IdentityMismatch` naming every difference."""
        names = {
            "dataset": "data.path",
            "tokenizer": "model.path (tokenizer)",
            "seed": "run.seed",
            "group_size": "rollout.group_size",
            "schema_major": "schema",
        }
        wrong = [
            f"{key}: the run has {getattr(self, name)}, this process {getattr(joining, name)}"
            for name, key in names.items()
            if getattr(self, name) != getattr(joining, name)
        ]
        if wrong:
            raise IdentityMismatch(f"run {run!r} was created with other settings; use another run.name, or correct: " + "; ".join(wrong))


def identify(run: RunConfig, model: ModelConfig, data: DataConfig, rollout: RolloutConfig) -> RunIdentity:
    """The identity this configuration stands for; reads the data set and the tokenizer.

    Raises: `ConfigError` naming the key whose file is missing.
    """
    source = split_data_path("data.path", data.path)
    if not source.file.is_file():
        raise ConfigError(f"data.path {source.file}: no such file")
    tokenizer = tokenizer_digest(model)
    return RunIdentity(
        schema_major=SCHEMA[0],
        seed=run.seed,
        group_size=rollout.group_size,
        dataset=_file_digest(source.file) + source.written,
        tokenizer=tokenizer,
    )


def tokenizer_digest(model: ModelConfig) -> str:
    """xxh3-128 of the tokenizer's files. Raises: `ConfigError`."""
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path {model.path}: no such folder; give a folder with config.json, tokenizer.json and safetensors weights")
    if not (folder / _TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"model.path {model.path}: has no {_TOKENIZER_FILES[0]}; save a fast tokenizer there")
    total = xxhash.xxh3_128()
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            total.update((folder / name).read_bytes())
    return total.hexdigest()


def _file_digest(path: Path) -> str:
    """Line by line: a data set may be larger than memory. A run is never created for a file that no producer could read; what a row must hold, they check."""
    digest, rows = xxhash.xxh3_128(), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if line.strip():
                    rows += 1
                    _check_row(path, number, line)
    except OSError as problem:
        raise ConfigError(f"data.path {path}: cannot be read ({problem.strerror})") from problem
    if not rows:
        raise ConfigError(f"data.path {path}: is empty; give one JSON object a line")
    return digest.hexdigest()


def _check_row(path: Path, number: int, line: bytes) -> None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        raise ConfigError(f"{path}:{number}: not valid JSON ({problem}); correct or remove the line") from problem
    if not isinstance(row, dict):
        raise ConfigError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}; correct or remove the line")
