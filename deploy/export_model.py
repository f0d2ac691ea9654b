"""`rollstream export-model`: a checkpoint, a published version or a model folder as one Hugging Face model folder, whatever the ranks that wrote it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from consumer.config import CheckpointConfig
from consumer.model_folder import write_model_atomically
from deploy.saved import saved_model
from protocol.config import ModelConfig, RunConfig, Tree, load
from protocol.daemon import run_daemon
from protocol.errors import ConfigError, WeightError
from weightsync.config import WeightsConfig
from weightsync.safetensors_file import open_model


class ExportModelConfig(Tree):
    """The sections that tell where models are."""

    run: RunConfig
    model: ModelConfig
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def export_model(options: argparse.Namespace) -> int:
    """The command. Raises: `ConfigError` for a file that cannot be read as the configuration, and a folder that is not empty."""
    config = load(ExportModelConfig, options.config, sets=options.set)
    out = Path(options.out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; give a new folder, or an empty one")
    return run_daemon("rollstream export-model", lambda _stop: _export(config, options.checkpoint, out, options.dtype))


async def _export(config: ExportModelConfig, what: str, out: Path, dtype: str) -> None:
    """Raises: `ConfigError`; `Unavailable`; `ManifestError`."""
    async with saved_model(what, run=config.run, model=config.model, checkpoint=config.checkpoint, weights=config.weights) as saved:
        try:
            await asyncio.to_thread(_write, out, saved.folder, dtype)
        except WeightError as problem:
            raise ConfigError(f"--dtype {dtype}: {problem}") from problem
        except OSError as problem:
            raise ConfigError(f"--out {out}: cannot be written ({problem}); make room there, or choose another folder") from problem
    sys.stdout.write(f"{saved.label} in {out}\n")


def _write(out: Path, folder: Path, dtype: str) -> None:
    with open_model(folder) as tensors:
        write_model_atomically(out, tensors, folder, dtype=dtype)
