from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import nursery


@pytest.fixture(scope="module")
def nest() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-nest-") as folder, nursery(Path(folder)) as path:
        yield path
