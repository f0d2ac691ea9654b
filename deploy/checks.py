"""All that can be known wrong before a process starts. Opens no socket, writes nothing.

The rules are the daemons' own: each checks its part again when it starts; here they meet, so that `rollstream up` fails before it has made anything.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from deploy.config import UpConfig
from protocol.errors import ConfigError
from protocol.keys import Keys


def check_all(config: UpConfig) -> None:
    """Cross-field rules, model folder and whether its weight files are whole, every row of the data set and of the held-out set, reward function.

    Raises: `ConfigError` naming file, line or key and what to do.
    """
    from consumer.config import TrainerDaemonConfig
    from producer.config import ProducerDaemonConfig
    from producer.main import prepare

    Keys(config.run.name)
    trainer = TrainerDaemonConfig(**{name: getattr(config, name) for name in TrainerDaemonConfig.model_fields})
    trainer.check()
    check_weights(trainer.model_folder)
    prepare(ProducerDaemonConfig(**{name: getattr(config, name) for name in ProducerDaemonConfig.model_fields}))


def check_weights(folder: Path) -> None:
    """Whether every safetensors file has all the bytes its header speaks of; a copy that broke off has not. Raises: `ConfigError` naming the file."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size - 8 - length
                header = orjson.loads(file.read(length) if size >= 0 else b"")
            whole = all(entry["data_offsets"][1] <= size for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
            whole = False
        if not whole:
            raise ConfigError(f"model.path {folder}: {path.name} is no whole safetensors file; copy or save the weights again")
