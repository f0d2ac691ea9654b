"""The table of what SGLang does to the careless names guards and tests that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "sglang.md"
_CODE = re.compile(r"`([^`]+)`")
_GUARD = re.compile(r"[\w/.-]+\.(?:py|lua|sh)(?::[\w.]+)?")


def rows() -> list[tuple[str, str, str]]:
    """What bites, its guards, its tests; one a line of every table."""
    found = []
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and not line.startswith(("| what bites", "| ---")):
            assert len(cells) == 3, line
            found.append((cells[0], cells[1], cells[2]))
    return found


@functools.cache
def names(path: Path) -> frozenset[str]:
    """Functions, classes and methods (`Class.method`) of a file."""
    found: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(f"{prefix}{child.name}")
                if isinstance(child, ast.ClassDef):
                    walk(child, f"{prefix}{child.name}.")

    walk(ast.parse(path.read_text()), "")
    return frozenset(found)


def missing(reference: str, separator: str) -> str:
    """Empty if it is there."""
    file, _, name = reference.partition(separator)
    path = ROOT / file
    if not path.is_file():
        return f"{reference}: there is no such file"
    return f"{reference}: {file} has no {name}" if name and name not in names(path) else ""


def test_the_table_is_read():
    assert len(rows()) > 50


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_every_guard_and_every_test_of_a_row_is_there(row: tuple[str, str, str]):
    bites, guard, test = row
    guards = [code for code in _CODE.findall(guard) if _GUARD.fullmatch(code)]
    tests = [code for code in _CODE.findall(test) if "::" in code]
    assert guards, f"{bites}: no guard"
    assert tests, f"{bites}: no test"
    assert [problem for one in guards if (problem := missing(one, ":"))] == []
    assert [problem for one in tests if (problem := missing(one, "::"))] == []
    assert all(one.startswith("tests/") and one.partition("::")[2].startswith("test_") for one in tests)


@pytest.mark.parametrize(
    ("reference", "separator"),
    [("weightsync/control.py:EngineControl.no_such", ":"), ("weightsync/nowhere.py", ":"), ("tests/sglang/test_document.py::test_nothing", "::")],
)
def test_what_is_not_there_is_found(reference: str, separator: str):
    assert missing(reference, separator)
