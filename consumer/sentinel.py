"""A person's wish for a checkpoint: a file that anybody makes, and the trainer removes once the checkpoint is registered."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

_LOG = logging.getLogger(__name__)
NAME = "SAVE"


class Sentinel:
    """`SAVE` in the folder of checkpoints. Made again while one is written, it asks for another; a trainer that is killed finds it when it comes back."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def there(self) -> bool:
        return self._path.exists()

    def asked(self) -> int:
        """When it was made or touched last, in ns; 0: not there."""
        with contextlib.suppress(OSError):
            return self._path.stat().st_mtime_ns
        return 0

    def answered(self, asked: int) -> None:
        """Remove the wish of that time; a later one stays."""
        if asked and self.asked() == asked:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def ask(self) -> None:
        """As a person does."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
        except OSError as problem:
            _LOG.warning("no checkpoint is asked for: %s cannot be made (%s)", self._path, problem)
