"""The secrets that engines ask of whoever asks them, if there are any: in the environment, so that no file, registry or list of processes shows them.

ROLLSTREAM_ENGINE_KEY=…          of every engine host, producer and `rollstream weights check` of the run
ROLLSTREAM_ENGINE_ADMIN_KEY=…    of the same: what pauses SGLang, changes its weights or aborts a request takes this one alone
"""

from __future__ import annotations

import os

VARIABLE = "ROLLSTREAM_ENGINE_KEY"
ADMIN_VARIABLE = "ROLLSTREAM_ENGINE_ADMIN_KEY"


def engine_key() -> str:
    """Empty: engines answer everybody who reaches them."""
    return os.environ.get(VARIABLE, "")


def admin_key() -> str:
    """Empty: one key opens everything."""
    return os.environ.get(ADMIN_VARIABLE, "")
