"""`ChunkFigures` from rank to rank, and the union of what the ranks tell.

Each number is a sum over groups and each mapping counts something, so the union of shares is their sum. Groups
and their rewards come in the chunk's order again, whoever had them.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

from consumer.batch import ChunkFigures
from protocol.errors import DecodeError
from protocol.messages import GroupHeader, JsonValue, Seq


def told(figures: ChunkFigures) -> dict[str, JsonValue]:
    """For the wire."""
    found: dict[str, JsonValue] = {}
    for name in _kinds():
        value = getattr(figures, name)
        if isinstance(value, Mapping):
            found[name] = {str(key): count for key, count in value.items()}
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def heard(figures: Mapping[str, JsonValue]) -> ChunkFigures:
    """What was told. Raises: `DecodeError`."""
    values: dict[str, Any] = {}
    try:
        for name, kind in _kinds().items():
            value: Any = figures[name]
            if kind is Mapping:
                values[name] = {int(key): count for key, count in value.items()}
            else:
                values[name] = kind(value)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise DecodeError("figures", f"{type(problem).__name__}: {problem}") from problem
    return ChunkFigures(**values)


def union(headers: Sequence[GroupHeader], parts: Sequence[ChunkFigures]) -> ChunkFigures:
    """Of all shares of a chunk together; `headers` is the chunk's order."""
    sizes = {header.seq: len(header.lengths) for header in headers}
    rewards: dict[Seq, tuple[float, ...]] = {}
    for part in parts:
        ends = list(itertools.accumulate((sizes[seq] for seq in part.seqs), initial=0))
        for seq, (start, end) in zip(part.seqs, itertools.pairwise(ends), strict=True):
            rewards[seq] = part.rewards[start:end]
    order = [header.seq for header in headers if header.seq in rewards]
    values: dict[str, Any] = {"seqs": tuple(order), "rewards": tuple(reward for seq in order for reward in rewards[seq])}
    for name, kind in _kinds().items():
        if name in values:
            continue
        if kind is Mapping:
            total: Counter[int] = Counter()
            for part in parts:
                total.update(getattr(part, name))
            values[name] = dict(sorted(total.items()))
        else:
            values[name] = sum(getattr(part, name) for part in parts)
    return ChunkFigures(**values)


@cache
def _kinds() -> dict[str, type]:
    """Of every field: tuple, Mapping, int or float."""
    hints = typing.get_type_hints(ChunkFigures)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(ChunkFigures)}
    found = {name: cast("type", typing.get_origin(hint) or hint) for name, hint in kinds.items()}
    assert set(found.values()) <= {tuple, Mapping, int, float}, f"a figure of another kind: {found}"
    return found
