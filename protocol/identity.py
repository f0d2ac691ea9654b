"""What makes a run the same run: fixed at creation, checked by every process that joins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from protocol.codec import SCHEMA
from protocol.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from protocol.errors import ConfigError, IdentityMismatch

_PIECE_BYTES = 1 << 20
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
    path, bracket, cut = data.path.partition("[")
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"data.path {path}: no such file")
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(f"model.path {model.path}: no such folder; give a folder with config.json, tokenizer.json and safetensors weights")
    if not (folder / _TOKENIZER_FILES[0]).is_file():
        raise ConfigError(f"model.path {model.path}: has no {_TOKENIZER_FILES[0]}; save a fast tokenizer there")
    tokenizer = xxhash.xxh3_128()
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            tokenizer.update((folder / name).read_bytes())
    return RunIdentity(
        schema_major=SCHEMA[0],
        seed=run.seed,
        group_size=rollout.group_size,
        dataset=_file_digest(source) + bracket + cut,
        tokenizer=tokenizer.hexdigest(),
    )


def _file_digest(path: Path) -> str:
    """In pieces: a data set may be larger than memory."""
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as problem:
        raise ConfigError(f"data.path {path}: cannot be read ({problem.strerror})") from problem
    return digest.hexdigest()
