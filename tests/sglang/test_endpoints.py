"""What is never asked of an engine: calls that end requests, fail in a pause, or end the server, each by default."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWERING = ("embedded", "pair.py")
"""What others ask as they ask SGLang."""
ASKERS = [path for folder in ("weightsync", "producer") for path in sorted((ROOT / folder).rglob("*.py")) if not set(ANSWERING) & set(path.parts)]
NEVER = {
    "/health": "takes a second and fails in every pause",
    "/health_generate": "likewise",
    "/get_weights_by_name": "is there for a few models only",
    "/get_weight_version": "is gone",
    "/weight_version": "is gone",
    "/get_model_info": "is a name that goes",
    "/update_weights_from_ipc": "needs a further package on the server",
    "/add_worker": "is not in any router",
    "/v1/chat/completions": "answers no token ids",
    "/v1/completions": "answers no token ids",
}


@functools.cache
def constants(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_the_askers_are_found():
    asked = {text for path in ASKERS for text in constants(path)}
    assert {"/pause_generation", "/update_weights_from_disk", "/begin_weight_update"} <= asked


@pytest.mark.parametrize("endpoint", sorted(NEVER))
def test_it_is_never_asked(endpoint: str):
    assert [str(path) for path in ASKERS if any(text.partition("?")[0].rstrip("/").endswith(endpoint) for text in constants(path))] == [], NEVER[endpoint]
