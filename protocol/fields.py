"""Message fields to MessagePack values and back, by the type hints of `protocol.messages`: every field is checked, and an error names its path."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache, lru_cache
from typing import Any, TypeAlias, cast

from protocol.errors import DecodeError
from protocol.frames import brief
from protocol.versions import Version

Reader: TypeAlias = Callable[[object, str], object]
"""`reader(wire value, path)` gives the checked value or raises `DecodeError(path, …)`."""
_MISSING = object()
_JSON_SCALARS = frozenset({type(None), bool, int, float, str})


def to_wire(value: object) -> object:  # noqa: PLR0911 - one line a kind of value
    """Plain MessagePack (and JSON) values: versions and enums as strings, tuples as lists, dataclasses as maps."""
    kind = type(value)
    if kind in _JSON_SCALARS:
        return value
    if kind is tuple or kind is list:
        return [item if type(item) in _JSON_SCALARS else to_wire(item) for item in cast("list[object]", value)]
    if kind is dict:
        return {key if type(key) is str else str(key): to_wire(item) for key, item in cast("dict[object, object]", value).items()}
    if kind is Version:
        return str(value)
    if (names := _names(cast("Any", kind))) is not None:
        return {name: to_wire(getattr(value, name)) for name in names}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_wire(item) for key, item in value.items()}
    return value


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Of a dataclass's fields; None for any other type."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@cache
def reader(hint: Any) -> Reader:  # noqa: PLR0911 - one line a kind of type
    """The reader for a type hint; built once."""
    hint = getattr(hint, "__supertype__", hint)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _json if any(typing.get_origin(part) in (list, dict) for part in parts) else _optional(parts)
    if hint is Version:
        return _version
    if origin is tuple:
        return _sequence(parts[0])
    if origin is Mapping:
        return _mapping(reader(parts[0]), reader(parts[1]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint)
    if dataclasses.is_dataclass(hint):
        return _message(cast("type[object]", hint))
    return _scalar(hint)


def _message(message_type: type[object]) -> Reader:
    hints = typing.get_type_hints(message_type)
    fields = [
        (f.name, _exact(hints[f.name]), reader(hints[f.name]), f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
        for f in dataclasses.fields(cast("Any", message_type))
    ]

    def read(wire: object, path: str) -> object:
        if not isinstance(wire, dict):
            raise DecodeError(path, f"expected a map, got {type(wire).__name__}")
        values = {}
        for name, exact, read_field, required in fields:
            value = wire.get(name, _MISSING)
            if type(value) is exact:  # the usual case costs no path and no call
                values[name] = value
            elif value is not _MISSING:
                values[name] = read_field(value, f"{path}.{name}")
            elif required:
                raise DecodeError(f"{path}.{name}", "is missing")
        return message_type(**values)

    return read


def _exact(hint: Any) -> type | None:
    """The type that a value of this hint may have without further checks; None where there are some."""
    hint = getattr(hint, "__supertype__", hint)
    return hint if hint in (bool, int, float, str) else None


def _optional(parts: tuple[Any, ...]) -> Reader:
    inner = reader(next(part for part in parts if part is not type(None)))
    return lambda wire, path: None if wire is None else inner(wire, path)


def _sequence(hint: Any) -> Reader:
    item, plain = reader(hint), {_exact(hint)}

    def read(wire: object, path: str) -> object:
        if not isinstance(wire, list):
            raise DecodeError(path, f"expected a list, got {type(wire).__name__}")
        if {*map(type, wire)} <= plain:
            return tuple(wire)
        return tuple(item(value, f"{path}[{i}]") for i, value in enumerate(wire))

    return read


def _mapping(key_reader: Reader, value_reader: Reader) -> Reader:
    def read(wire: object, path: str) -> object:
        if not isinstance(wire, dict):
            raise DecodeError(path, f"expected a map, got {type(wire).__name__}")
        if value_reader is _json:
            return _json(wire, path)
        return {key_reader(key, f"{path} key"): value_reader(value, f"{path}[{key[:40]}]") for key, value in wire.items()}

    return read


def _enum(kind: type[StrEnum]) -> Reader:
    known = {item.value: item for item in kind}

    def read(wire: object, path: str) -> object:
        if isinstance(wire, str) and (found := known.get(wire)) is not None:
            return found
        raise DecodeError(path, f"got {brief(wire)}, expected one of {list(known)}")

    return read


def _scalar(hint: Any) -> Reader:
    def read(wire: object, path: str) -> object:
        if type(wire) is hint:
            return wire
        if hint is float and type(wire) is int:
            return float(wire)
        raise DecodeError(path, f"expected {getattr(hint, '__name__', hint)}, got {type(wire).__name__}")

    return read


_parsed = lru_cache(maxsize=1024)(Version.parse)
"""A header names a version twice, and a lease many headers of few versions."""


def _version(wire: object, path: str) -> object:
    if not isinstance(wire, str):
        raise DecodeError(path, f"expected a version string, got {type(wire).__name__}")
    try:
        return _parsed(wire)
    except DecodeError as problem:
        raise DecodeError(path, str(problem)) from problem


def _json(wire: object, path: str) -> object:
    """`wire` itself, once it holds nothing that JSON has no word for (MessagePack also knows bytes, timestamps and extensions)."""
    left = [wire]
    while left:
        value = left.pop()
        kind = type(value)
        if kind is dict:
            items = cast("dict[object, object]", value)
            left.extend(items.values())
            if not all(type(key) is str for key in items):
                raise DecodeError(path, "a key that is not a string")
        elif kind is list:
            left.extend(cast("list[object]", value))
        elif kind not in _JSON_SCALARS:
            raise DecodeError(path, f"expected JSON values, got {kind.__name__}")
    return wire
