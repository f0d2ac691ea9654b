"""TensorBoard's event files, written by tensorboardX, which needs neither TensorFlow nor TensorBoard itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter


class TensorBoard:
    """See `consumer.trackers.aside.Tracker`. What an earlier life wrote of `first_step` and after is not shown any more."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        # Files are named by the second, and a later writer of the same name takes the place of an earlier one's.
        self._writer = SummaryWriter(str(folder), purge_step=first_step, filename_suffix=f".{time.time_ns()}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
