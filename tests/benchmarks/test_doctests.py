from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["streams", "difference", "device_memory"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"benchmarks.gpu.{name}"))
    assert found.attempted
    assert not found.failed
