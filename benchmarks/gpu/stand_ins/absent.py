"""Names of a package that is not installed and never used: they can be imported, and calling one says so.

SGLang imports a few packages without asking whether they are there, also where its flags choose other code. A stand-in serves exactly those modules;
others stay missing, so that guarded imports fall back as if nothing were installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable


def served(package: str, base: type = object) -> Callable[[str], object]:
    """The `__getattr__` of a stand-in: a class for a capitalised name, for any other a function that raises when it is called."""
    made: dict[str, object] = {}

    def attribute(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in made:
            made[name] = type(name, (base,), {"__module__": package}) if name[:1].isupper() else _refusal(f"{package}.{name}")
        return made[name]

    return attribute


def _refusal(name: str) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise NotImplementedError(f"{name} is not installed here: start the server with flags that do without it")

    return call


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves `names` as packages whose attributes come from `attribute`."""

    def __init__(self, names: set[str], attribute: Callable[[str], Callable[[str], object]]) -> None:
        self._names = names
        self._attribute = attribute

    def install(self) -> None:
        sys.meta_path.append(self)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname in self._names else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = self._attribute(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass
