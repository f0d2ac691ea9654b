"""The secret that engines ask of whoever asks them, if there is one: in the environment, so that no file, registry or list of processes shows it.

ROLLSTREAM_ENGINE_KEY=…     of every engine host, producer and `rollstream weights check` of the run
"""

from __future__ import annotations

import os

VARIABLE = "ROLLSTREAM_ENGINE_KEY"


def engine_key() -> str:
    """Empty: engines answer everybody who reaches them."""
    return os.environ.get(VARIABLE, "")
