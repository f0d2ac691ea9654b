"""Prompts from a JSONL file, validated whole before anything else happens.

    {"prompt": "2+2=", "label": "4"}
    {"prompt": [{"role": "user", "content": "Sort 3142."}], "label": "1234", "metadata": {"level": 2}}

`data.path` may end in a slice of the rows, as in Python: `train.jsonl[:1000]`, `train.jsonl[100:200]`, `train.jsonl[::2]`. Empty lines are not rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from producer.order import PromptOrder
from producer.template import Prompt, PromptEncoder
from protocol.arrays import IntArray
from protocol.config import DataConfig
from protocol.data_path import split_data_path
from protocol.errors import ConfigError, DecodeError
from protocol.messages import JsonValue

_REPORTED = 10
"""Faulty lines named in one error; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of the file."""

    line: int
    """1-based line of the file."""
    prompt: Prompt
    label: JsonValue
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)


Problem: TypeAlias = tuple[int, str]
LabelFault: TypeAlias = Callable[[JsonValue], str]


def read_rows(key: str, spec: str, data: DataConfig, *, label_fault: LabelFault, limit: int = 0) -> list[Row]:
    """The rows that `spec`, the value of the configuration's `key`, selects.

    `label_fault` says what is wrong with a label for the reward in use ("": nothing). `limit` keeps the first rows only.
    Raises: `ConfigError` naming file, line and key of everything that is wrong.
    """
    source = split_data_path(key, spec)
    path = source.file
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as problem:
        raise ConfigError(f"{key} {path}: cannot be read ({problem.strerror or problem}); give the path of a JSONL file") from problem
    chosen = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][source.rows]
    if not chosen:
        why = "the slice selects no row" if any(line.strip() for line in lines) else "the file has no rows"
        raise ConfigError(
            f"{key} {spec}: {why}; give a JSONL file with one object a line, such as " + f'{{"{data.prompt_key}": "2+2=", "{data.label_key}": "4"}}'
        )
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, line in chosen[:limit] if limit else chosen:
        parsed = _parse(line, data, label_fault)
        if isinstance(parsed, str):
            problems.append((number, parsed))
        else:
            rows.append(Row(number, *parsed))
    _refuse(path, problems)
    return rows


def _parse(line: bytes, data: DataConfig, label_fault: LabelFault) -> tuple[Prompt, JsonValue, dict[str, JsonValue]] | str:
    """Prompt, label and metadata of one line, or what is wrong with it."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        return f"not valid JSON ({problem}): correct or remove the line"
    return _fields(row, data, label_fault) if isinstance(row, dict) else f"expected a JSON object, got {type(row).__name__}: correct or remove the line"


def _fields(row: dict[str, Any], data: DataConfig, label_fault: LabelFault) -> tuple[Prompt, JsonValue, dict[str, JsonValue]] | str:
    if data.prompt_key not in row:
        return f'has no "{data.prompt_key}": add it, or set data.prompt_key to one of {", ".join(list(row)[:5]) or "its keys"}'
    if fault := _prompt_fault(row[data.prompt_key]):
        return f'"{data.prompt_key}" {fault}'
    label = row.get(data.label_key)
    if fault := label_fault(label):
        return f'"{data.label_key}" {fault}: correct it, set data.label_key, or choose another reward.kind'
    metadata = row.get(data.metadata_key) or {}
    if not isinstance(metadata, dict):
        return f'"{data.metadata_key}" must be an object, got {type(metadata).__name__}'
    return row[data.prompt_key], label, metadata


def _prompt_fault(prompt: object) -> str:
    if isinstance(prompt, str):
        return "" if prompt else "is empty: give text or chat messages"
    if not isinstance(prompt, list) or not prompt:
        return f"must be text or a list of chat messages, got {type(prompt).__name__ if prompt != [] else 'an empty list'}"
    for place, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f'message {place} must be an object with "role" and "content"'
    return ""


def _refuse(path: Path, problems: Sequence[Problem]) -> None:
    if problems:
        more = f"\n… and {len(problems) - _REPORTED} more lines" if len(problems) > _REPORTED else ""
        raise ConfigError("\n".join(f"{path}:{line}: {what}" for line, what in problems[:_REPORTED]) + more)


class PromptSet:
    """Rows with their encoded prompts, all in one array.

    Raises: `ConfigError` naming the line of a prompt that cannot be rendered, is empty, or is longer than `max_tokens`.
    """

    def __init__(self, key: str, spec: str, rows: Sequence[Row], encoder: PromptEncoder, *, max_tokens: int) -> None:
        self.path = split_data_path(key, spec).file
        self.rows = rows
        problems: list[Problem] = []
        pieces: list[IntArray] = []
        for row, ids in zip(rows, _encoded(rows, encoder, problems), strict=True):
            if ids is not None and not ids:
                problems.append((row.line, "the prompt encodes to no token at all: give a longer prompt"))
            elif ids is not None and len(ids) > max_tokens:
                problems.append((row.line, f"the prompt has {len(ids)} tokens, over {max_tokens}: shorten it or raise rollout.max_prompt_tokens"))
            pieces.append(np.array(ids or (), dtype=np.int32))
        _refuse(self.path, problems)
        self._ids: IntArray = np.concatenate(pieces)
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self.longest = max(len(piece) for piece in pieces)
        """Tokens of the longest prompt."""

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, index: int) -> IntArray:
        """[P] int32: the encoded prompt of a row; a view."""
        return self._ids[self._ends[index - 1] if index else 0 : self._ends[index]]


def _encoded(rows: Sequence[Row], encoder: PromptEncoder, problems: list[Problem]) -> Iterator[list[int] | None]:
    for row in rows:
        try:
            yield encoder.encode(row.prompt)
        except ConfigError as problem:
            problems.append((row.line, str(problem)))
            yield None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The prompt of one group."""

    prompt_id: str
    """Names the row: `file:line`."""
    row: Row
    ids: IntArray
    """[P] int32"""


class PromptSource:
    """Which prompt a `seq` gets: seeded epoch shuffle over the rows; pure, so that any number of producers agree without talking."""

    def __init__(self, prompts: PromptSet, *, seed: int) -> None:
        self.prompts = prompts
        self._order = PromptOrder(rows=len(prompts), seed=seed)

    def choose(self, seq: int, bound: str | None = None) -> Chosen:
        """The prompt of `seq`; `bound` is the prompt_id that an earlier attempt bound, which then decides.

        Raises: `DecodeError` if `bound` names no row of this file.
        """
        index = self._order.row(seq) if bound is None else self._bound(bound)
        row = self.prompts.rows[index]
        return Chosen(f"{self.prompts.path.name}:{row.line}", row, self.prompts.ids(index))

    @cached_property
    def _by_line(self) -> dict[int, int]:
        return {row.line: index for index, row in enumerate(self.prompts.rows)}

    def _bound(self, prompt_id: str) -> int:
        name, _, line = prompt_id.rpartition(":")
        index = self._by_line.get(int(line)) if line.isdigit() and name == self.prompts.path.name else None
        if index is None:
            raise DecodeError("prompt_id", f"{prompt_id!r} names no row of {self.prompts.path}")
        return index
