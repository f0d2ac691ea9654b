"""One rule for every number of a configuration: it is finite. Each field of each section of each daemon's tree, found by itself."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from consumer.config import TrainerDaemonConfig
from protocol.config import Section, Tree, load
from protocol.errors import ConfigError

_PACKAGES = ("protocol", "buffer", "weightsync", "producer", "consumer", "deploy")
_PLAIN = (int, str, bool, type(None))


def kinds(base: type[BaseModel]) -> set[type[BaseModel]]:
    """All of the packages that derive from it; a module that defines one is imported, whether it is much or little."""
    for package in _PACKAGES:
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            source = Path(getattr(found.module_finder, "path", "")) / f"{found.name.rpartition('.')[2]}.py"
            if source.is_file() and ("(Section)" in (text := source.read_text()) or "(Tree)" in text):
                importlib.import_module(found.name)
    return {one for one in base.__subclasses__() if one.__module__.partition(".")[0] in _PACKAGES}


def spoilt(annotation: Any, bad: float) -> Any:
    """A value with `bad` where the annotation has a float; None: it has none. An annotation of a new kind fails here, and is to be added."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is float:
        return bad
    if annotation in _PLAIN or origin is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return None
    if origin is Annotated:
        return spoilt(inner[0], bad)
    if origin in {Union, UnionType}:
        return next((value for one in inner if (value := spoilt(one, bad)) is not None), None)
    if origin is tuple:
        values = [spoilt(one, bad) for one in inner if one is not Ellipsis]
        return None if all(value is None for value in values) else values
    if origin is dict:
        value = spoilt(inner[1], bad)
        return None if value is None else {"key": value}
    raise AssertionError(f"no rule for {annotation!r}")


def floats() -> Iterator[tuple[type[BaseModel], str, Any]]:
    for section in sorted(kinds(Section), key=lambda one: one.__name__):
        for name, field in section.model_fields.items():
            if spoilt(field.annotation, math.inf) is not None:
                yield section, name, field.annotation


def test_no_section_takes_a_number_that_is_not_finite():
    taken, seen = [], 0
    for section, name, annotation in floats():
        for bad in (math.inf, -math.inf, math.nan):
            seen += 1
            with pytest.raises(ValidationError) as raised:
                section.model_validate({name: spoilt(annotation, bad)})
            if not any(error["loc"][0] == name and error["type"] == "finite_number" for error in raised.value.errors()):
                taken.append(f"{section.__name__}.{name} = {bad}")
    assert not taken
    assert seen > 3 * 40


def test_trees_are_made_of_sections_alone():
    """A number that stood in a tree itself would be under no rule."""
    for tree in kinds(Tree):
        for name, field in tree.model_fields.items():
            assert isinstance(field.annotation, type), (tree, name)
            assert issubclass(field.annotation, Section), (tree, name)


def test_the_key_is_named(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "r"\n[model]\npath = "m"\n[data]\npath = "d"\n[critic]\nlr = inf\n')
    with pytest.raises(ConfigError, match=r"run\.toml:8: critic\.lr: got inf \(float\); input should be a finite number"):
        load(TrainerDaemonConfig, path, sets=["trainer.betas=[nan, 0.9]"], environ={})
    with pytest.raises(ConfigError, match=r"--set trainer\.betas=\[nan, 0\.9\]: trainer\.betas\.0: got nan"):
        load(TrainerDaemonConfig, path, sets=["trainer.betas=[nan, 0.9]", "critic.lr=1e-5"], environ={})
