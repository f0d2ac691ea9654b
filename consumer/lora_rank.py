"""Whether an adapter's rank is one: below the width of the model that it is added to."""

from __future__ import annotations

import json
from pathlib import Path

from protocol.errors import ConfigError
from weightsync.lora import LoraConfig


def check_rank(lora: LoraConfig, folder: Path) -> None:
    """Of a model whose config.json has been found good. Raises: `ConfigError` for a rank that its matrices do not have."""
    told = json.loads((folder / "config.json").read_text("utf-8"))
    width = told.get("hidden_size", (told.get("text_config") or {}).get("hidden_size"))
    if isinstance(width, int) and lora.rank > width:
        raise ConfigError(
            f"lora.rank {lora.rank} with model.path {folder}: its hidden size is {width}, and no product of such matrices has a higher rank; set lora.rank to "
            "at most that (8 to 64 are usual), or 0 to train all weights"
        )
