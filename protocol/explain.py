"""What is wrong with a configuration, said to the person who wrote it: the line or the override, the key, what was seen, what to do."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel


def explain(tree: type[BaseModel], error: Any, source: str, text: str, origins: Mapping[str, str]) -> str:
    """One error of pydantic's as a sentence. `origins` names the override that set a key, by "section.key"."""
    section, *rest = (str(part) for part in error["loc"]) if error["loc"] else ("",)
    key = rest[0] if rest else ""
    dotted = ".".join((section, *rest))
    place = where(source, text, origins, section, key)
    kind = error["type"]
    if kind == "missing" and not rest:
        required = [name for name, field in _fields(tree, section).items() if field.is_required()]
        return f"{place}: section [{section}] is missing: add it with {', '.join(required) or 'its keys'}"
    if kind == "missing":
        return f"{place}: {dotted} is missing: {_help(tree, section, key)}"
    if kind == "extra_forbidden":
        now = _moved(tree, section).get(key)
        return f"{place}: unknown key {dotted}{suggest(key, _fields(tree, section), section) if now is None else f': it is called {now} now'}"
    if kind == "value_error":
        return f"{place}: {dotted + ': ' if section else ''}{error['ctx']['error']}"
    seen = f"got {error['input']!r:.60} ({type(error['input']).__name__})"
    if kind in {"model_type", "model_attributes_type"}:
        return f"{place}: {dotted}: {seen}; expected a section: a line [{dotted}] with its keys below"
    message = f"{place}: {dotted}: {seen}; {error['msg'][0].lower()}{error['msg'][1:]}. {_help(tree, section, key)}".rstrip()
    if kind == "string_type" and dotted in origins:
        message += " Put the value in double quotes inside the shell's own quotes to keep it text."
    return message


def suggest(name: str, known: Iterable[str], section: str = "") -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    prefix = f"{section}." if section else ""
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; known here: {', '.join(prefix + item for item in names)}"


def where(source: str, text: str, origins: Mapping[str, str], section: str, key: str = "") -> str:
    """The override that set the key, else `source:line` of the key or of its section, else `source`."""
    if (origin := origins.get(f"{section}.{key}")) is not None:
        return origin
    line = (_line(text, section, key) if key else 0) or _line(text, section)
    if line:
        return f"{source}:{line}"
    overrides = [origin for dotted, origin in origins.items() if dotted.startswith(f"{section}.")]
    return overrides[0] if overrides and not key else source


def _line(text: str, *path: str) -> int:
    """The line on which `path` is first defined, 0 if it is not: where the shortest readable beginning of the file that holds it ends.

    Reading beginnings with the TOML parser itself is right for every way to write a key; it costs time only where there is an error to report.
    """
    lines = text.split("\n")
    start = 1
    for end in range(1, len(lines) + 1):
        try:
            found: object = tomllib.loads("\n".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if found is not None:
            return start
        start = end + 1
    return 0


def _fields(tree: type[BaseModel], section: str) -> Mapping[str, Any]:
    found = _section(tree, section)
    return {} if found is None else found.model_fields


def _moved(tree: type[BaseModel], section: str) -> Mapping[str, str]:
    return getattr(_section(tree, section), "moved", {})


def _section(tree: type[BaseModel], section: str) -> type[BaseModel] | None:
    field = tree.model_fields.get(section)
    annotation = field.annotation if field is not None else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _help(tree: type[BaseModel], section: str, key: str) -> str:
    field = _fields(tree, section).get(key)
    return str(field.description) if field is not None and field.description else ""
