"""How many tokens a server of a model has room for, by the model's config.json. Pure but for that file."""

from __future__ import annotations

from pathlib import Path

import orjson


def known_context(model: str) -> int:
    """0 where the file alone does not say: SGLang multiplies what it says by a factor there."""
    try:
        found = orjson.loads((Path(model) / "config.json").read_bytes())
        scaling = found.get("rope_scaling") or found.get("rope_parameters") or {}
        stretched = "factor" in scaling and "original_max_position_embeddings" not in scaling
        length = found.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
    return length if type(length) is int and not stretched else 0
