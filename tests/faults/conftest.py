from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import nursery
from tests.faults.weight_stand import PRELOADED


@pytest.fixture(scope="module")
def nest() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-nest-") as folder, nursery(Path(folder)) as path:
        yield path


@pytest.fixture(scope="module")
def weight_nest() -> Iterator[Path]:
    """Of the processes around the weight channel."""
    with tempfile.TemporaryDirectory(prefix="rs-nest-") as folder, nursery(Path(folder), PRELOADED) as path:
        yield path
