"""The ledger's scripts are put together of the parts they name: no fewer, no more."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import buffer
from buffer import redis_ledger
from buffer.scripts import parts_of, requires
from protocol.connection import Script

_LUA = Path(buffer.__file__).parent / "lua"
_PARTS = {path.stem: path.read_text("utf-8") for path in sorted((_LUA / "parts").glob("*.lua"))}
SCRIPTS = sorted((one for one in vars(redis_ledger).values() if isinstance(one, Script)), key=lambda script: script.name)
_WORDS = {
    "and",
    "break",
    "do",
    "else",
    "elseif",
    "end",
    "false",
    "for",
    "function",
    "if",
    "in",
    "local",
    "nil",
    "not",
    "or",
    "repeat",
    "return",
    "then",
    "true",
}
_WORDS |= {
    "until",
    "while",
    "KEYS",
    "ARGV",
    "cjson",
    "cmsgpack",
    "error",
    "ipairs",
    "math",
    "next",
    "pairs",
    "redis",
    "string",
    "table",
    "tonumber",
    "tostring",
}
_WORDS |= {"unpack"}


def _code(source: str) -> str:
    """Without comments and the content of strings."""
    return re.sub(r"""--[^\n]*|^#!.*|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*\"""", "''", source)


def _used(code: str) -> set[str]:
    """Names that are read or called; neither fields of a table nor what is only assigned to."""
    return {name for name in re.findall(r"(?:(?<![\w.:])|(?<=\.\.))([A-Za-z_]\w*)\b(?!\s*=[^=])", code) if name not in _WORDS}


def _declared(code: str) -> set[str]:
    lists: Iterable[str] = (
        *re.findall(r"\blocal (?!function)([\w, ]+)", code),
        *re.findall(r"\bfor ([\w, ]+?) (?:in|=)", code),
        *re.findall(r"\bfunction ?\w*\(([\w, .]*)\)", code),
        *re.findall(r"\bfunction (\w+)", code),
    )
    return {name.strip() for names in lists for name in names.split(",")}


def _offers(part: str) -> set[str]:
    """What a part has for others."""
    code = _code(_PARTS[part])
    lists = (*re.findall(r"^local (?!function)([\w, ]+?) =", code, re.MULTILINE), *re.findall(r"^local function (\w+)", code, re.MULTILINE))
    return {name.strip() for names in lists for name in names.split(",")}


def test_every_script_of_the_ledger_is_looked_at() -> None:
    files = {path.name for path in _LUA.glob("*.lua")} - {"answer.lua", "count.lua", "fence.lua", "mark.lua", "fork_read.lua", "fork_write.lua"}
    assert {Path(script.name).name for script in SCRIPTS} == files


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: Path(script.name).stem)
def test_a_script_uses_no_name_that_none_of_its_parts_declares(script: Script) -> None:
    code = _code(script.source)
    assert _used(code) - _declared(code) == set()


@pytest.mark.parametrize("file", sorted(str(path.relative_to(_LUA.parent)) for path in _LUA.rglob("*.lua")))
def test_a_file_requires_the_parts_it_uses_and_no_others(file: str) -> None:
    source = (_LUA.parent / file).read_text("utf-8")
    used = _used(_code(source))
    owners = {part for part in _PARTS if part not in ("state", Path(file).stem if "/parts/" in file else "") and _offers(part) & used}
    assert set(requires(file)) == owners


def test_parts_come_after_what_they_require_themselves_and_once() -> None:
    assert parts_of("lua/put.lua") == ["state", "groups", "lineage", "ready"]
    for script in SCRIPTS:
        order = parts_of(script.name)
        assert len(order) == len(set(order))
        for at, part in enumerate(order):
            assert set(requires(f"lua/parts/{part}.lua")) <= set(order[:at])


def test_a_name_that_no_part_declares_is_seen() -> None:
    (put,) = (script for script in SCRIPTS if script.name == "lua/put.lua")
    without = put.source.replace(_PARTS["ready"], "")
    assert _used(_code(without)) - _declared(_code(without)) == {"count_versions", "sum_versions"}
