from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import buffer

MODULES = [f"buffer.{module.name}" for module in pkgutil.iter_modules(buffer.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_worked_examples_are_there() -> None:
    assert {name for name in MODULES if doctest.testmod(importlib.import_module(name)).attempted} >= {"buffer.bias", "buffer.replay", "buffer.shares"}
