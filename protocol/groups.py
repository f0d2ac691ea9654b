"""The payload of a rollout group: ragged, its rollouts concatenated and cut by `lengths`, so decoding parses no token and pads nothing.

Layout of the frame, G rollouts of T tokens together and S spans: `lengths` [G], `tokens` [T], `mask` [T], `logprobs` [T], `rewards` [G],
`spans` [S, 5] rows of (rollout, incarnation, n, start, end), `rollouts` G maps, `extras` named arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast, get_type_hints, overload

import numpy as np

from protocol.arrays import Array, FloatArray, IntArray, MaskArray, pack, unpack, unpack_as
from protocol.errors import DecodeError
from protocol.fields import reader
from protocol.frames import MAX_FRAME_BYTES, compress_frame, decompress_frame, open_frame, write_frame
from protocol.group_frame import read_in_place
from protocol.messages import JsonValue, Rollout, RolloutGroup, Span
from protocol.span_checks import check_spans, spans_hold
from protocol.versions import Version

TEACHER_LOGPROBS = "teacher_logprobs"
"""An extra: [T] float32, nats, of all tokens of the group end to end: what the teacher says of each that the policy sampled, 0 elsewhere."""
TEACHER_BYTES = 4
"""What it adds to a payload for each token."""
_KIND = "rollout_group"
_TOKEN_BYTES, _SPAN_BYTES = 4 + 1 + 4, 5 * 4
_ROLLOUT_BYTES = 256
"""Upper bound of what a rollout adds to the payload beside its arrays: reward, finish reason, engine id (bounded), map keys."""
_GROUP_BYTES = 1024
_TOGETHER = 16
"""From so many groups on, checking all of them at once costs less than one after the other."""
_ARRAYS = {"lengths": ("<i4", 1), "tokens": ("<i4", 1), "mask": ("|u1", 1), "logprobs": ("<f4", 1), "rewards": ("<f8", 1), "spans": ("<i4", 2)}
"""Dtype and dimensions."""
_TEXT = reader(str)
_METADATA = reader(get_type_hints(Rollout)["metadata"])
_NOTHING: dict[str, JsonValue] = {}
_STR, _DICT = {str}, {dict}
_Facts: TypeAlias = tuple[Sequence[str], Sequence[str], Sequence[Mapping[str, JsonValue]]]
"""Finish reason, engine id and metadata of all rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """The rollouts of a group end to end, as its payload has them.

    Shapes: T tokens of G rollouts together, S spans. Every invariant of `Rollout` holds.
    """

    lengths: Sequence[int]
    """[G]"""
    tokens: IntArray
    """[T] int32"""
    mask: MaskArray
    """[T] uint8"""
    logprobs: FloatArray
    """[T] float32"""
    spans: IntArray
    """[S, 5] int32 rows of (rollout, incarnation, n, start, end); those of one rollout ascend."""
    rewards: Sequence[float]
    """[G]"""


def columns(group: RolloutGroup) -> Columns:
    """The group's rollouts end to end. Of a decoded group no rollout is made and nothing is copied: the arrays are views of its payload, at any address.

    Raises: `ValueError` for arrays of one rollout that differ in length (a bug in the caller).
    """
    rollouts = group.rollouts
    if isinstance(rollouts, _Rollouts):
        return rollouts.columns
    for i, r in enumerate(rollouts):
        if not len(r.tokens) == len(r.mask) == len(r.logprobs):
            raise ValueError(f"rollout {i} has {len(r.tokens)} tokens, {len(r.mask)} mask values and {len(r.logprobs)} logprobs: they must be one each")
    spans = [(i, s.version.incarnation, s.version.n, s.start, s.end) for i, r in enumerate(rollouts) for s in r.spans]
    return Columns(
        lengths=[len(r.tokens) for r in rollouts],
        tokens=_concatenate([r.tokens for r in rollouts], "<i4"),
        mask=_concatenate([r.mask for r in rollouts], "|u1"),
        logprobs=_concatenate([r.logprobs for r in rollouts], "<f4"),
        spans=np.array(spans, dtype="<i4").reshape(-1, 5),
        rewards=[r.reward for r in rollouts],
    )


def payload_bound(*, group_size: int, prompt_tokens: int, new_tokens: int, extra_bytes: int = 0) -> int:
    """Bytes that no payload of a group exceeds (rule P3): every token in arrays, every sampled token in a span of its own, `extra_bytes` of extras a token."""
    rollout = (prompt_tokens + new_tokens) * (_TOKEN_BYTES + extra_bytes) + new_tokens * _SPAN_BYTES + _ROLLOUT_BYTES
    return _GROUP_BYTES + group_size * rollout


def encode_group(group: RolloutGroup, *, compress: bool = False) -> bytes:
    """The payload of a group, ragged. `compress` trades about 0.15 ms of CPU per 200 kB for about half the bytes.

    Raises: `ValueError` for arrays of one rollout that differ in length (a bug in the caller).
    """
    laid = columns(group)
    frame = write_frame(
        _KIND,
        {
            "lengths": pack(np.array(laid.lengths, dtype="<i4")),
            "tokens": pack(laid.tokens),
            "mask": pack(laid.mask),
            "logprobs": pack(laid.logprobs),
            "spans": pack(laid.spans),
            "rewards": pack(np.array(laid.rewards, dtype="<f8")),
            "rollouts": [{"finish_reason": r.finish_reason, "engine_id": r.engine_id, "metadata": dict(r.metadata)} for r in group.rollouts],
            "extras": {name: pack(array) for name, array in group.extras.items()},
        },
    )
    return compress_frame(frame) if compress else frame


def decode_group(data: bytes | memoryview, *, max_bytes: int = MAX_FRAME_BYTES) -> RolloutGroup:
    """The group in `data`; its arrays are read-only views, and every invariant of `Rollout` holds, though rollouts and spans become objects only when they
    are first asked for.

    Raises: `DecodeError` naming the field, `SchemaTooNew` for a newer major.
    """
    group = _read(data, max_bytes)
    check_spans(columns(group))
    return group


def decode_groups(payloads: Iterable[bytes | memoryview], *, max_bytes: int = MAX_FRAME_BYTES) -> list[RolloutGroup | DecodeError]:
    """Each payload as `decode_group` has it, or the error in its place. What groups have in common is checked of all at once, which costs a fraction of one
    after the other.

    Raises: `SchemaTooNew` for a newer major.
    """
    found: list[RolloutGroup | DecodeError] = []
    for data in payloads:
        try:
            found.append(_read(data, max_bytes))
        except DecodeError as problem:
            found.append(problem)
    if len(found) < _TOGETHER or not spans_hold([columns(one) for one in found if isinstance(one, RolloutGroup)]):
        for i, one in enumerate(found):
            if isinstance(one, RolloutGroup):
                try:
                    check_spans(columns(one))
                except DecodeError as problem:
                    found[i] = problem
    return found


def _read(data: bytes | memoryview, max_bytes: int) -> RolloutGroup:
    """The group in `data`, whose spans and mask are not checked yet."""
    arrays, rest = _entries(decompress_frame(_KIND, data, max_bytes), max_bytes)
    laid = Columns(
        lengths=arrays["lengths"].tolist(),
        tokens=cast("IntArray", arrays["tokens"]),
        mask=cast("MaskArray", arrays["mask"]),
        logprobs=cast("FloatArray", arrays["logprobs"]),
        spans=cast("IntArray", arrays["spans"]),
        rewards=arrays["rewards"].tolist(),
    )
    lengths = laid.lengths
    if lengths and min(lengths) < 0:
        raise DecodeError("lengths", "a negative length")
    total = sum(lengths)
    if not len(laid.tokens) == len(laid.mask) == len(laid.logprobs) == total:
        wrong = next(name for name in ("tokens", "mask", "logprobs") if len(arrays[name]) != total)
        raise DecodeError(wrong, f"{len(arrays[wrong])} entries, expected {total} by lengths")
    metas = rest.get("rollouts")
    if not isinstance(metas, list) or len(metas) != len(lengths) or len(laid.rewards) != len(lengths):
        raise DecodeError("rollouts", f"expected {len(lengths)} rollouts and rewards by lengths")
    return RolloutGroup(rollouts=_Rollouts(laid, _facts(metas)), extras=_extras(rest.get("extras", {})))


def _entries(frame: bytes | memoryview, max_bytes: int) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """The arrays of a frame and its other entries, whoever wrote it."""
    if len(frame) <= max_bytes and (read := read_in_place(frame)):
        return read
    body = open_frame(_KIND, frame, max_bytes)
    return {name: unpack_as(body.get(name), name, dtype, dimensions) for name, (dtype, dimensions) in _ARRAYS.items()}, body


class _Rollouts(Sequence[Rollout]):
    """A tuple of rollouts that is made when somebody first looks into it: half of decoding a group would be making its objects."""

    def __init__(self, laid: Columns, facts: _Facts) -> None:
        self.columns, self._facts = laid, facts

    @cached_property
    def _made(self) -> tuple[Rollout, ...]:
        return tuple(self._make())

    def _make(self) -> Iterator[Rollout]:
        laid, end = self.columns, 0
        spans_of = _spans(laid.spans, len(laid.lengths))
        for length, reward, spans, finish_reason, engine_id, metadata in zip(laid.lengths, laid.rewards, spans_of, *self._facts, strict=True):
            start, end = end, end + length
            yield Rollout(
                tokens=laid.tokens[start:end],
                mask=laid.mask[start:end],
                logprobs=laid.logprobs[start:end],
                spans=tuple(spans),
                reward=reward,
                finish_reason=finish_reason,
                engine_id=engine_id,
                metadata=metadata,
            )

    def __len__(self) -> int:
        return len(self.columns.lengths)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._made)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Rollout, ...]: ...
    def __getitem__(self, index: int | slice) -> Rollout | tuple[Rollout, ...]:
        return self._made[index]

    def __reduce__(self) -> tuple[object, ...]:
        return tuple, (self._made,)


def _concatenate(arrays: list[Any], dtype: str) -> Any:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


def _facts(metas: list[Any]) -> _Facts:
    """Of all rollouts at once: a column is checked by the types in it, and only where there are others, or metadata, one by one."""
    if not {*map(type, metas)} <= _DICT:
        rollout, odd = next((i, meta) for i, meta in enumerate(metas) if type(meta) is not dict)
        raise DecodeError(f"rollouts[{rollout}]", f"expected a map, got {type(odd).__name__}")
    finish_reasons = [meta.get("finish_reason", "stop") for meta in metas]
    engine_ids = [meta.get("engine_id", "") for meta in metas]
    metadata = [meta.get("metadata", _NOTHING) for meta in metas]
    for name, column in (("finish_reason", finish_reasons), ("engine_id", engine_ids)):
        if not {*map(type, column)} <= _STR:
            for rollout, value in enumerate(column):
                _TEXT(value, f"rollouts[{rollout}].{name}")
    if any(metadata) or not {*map(type, metadata)} <= _DICT:
        for rollout, value in enumerate(metadata):
            _METADATA(value, f"rollouts[{rollout}].metadata")
        return finish_reasons, engine_ids, metadata
    return finish_reasons, engine_ids, [_NOTHING] * len(metas)


def _extras(wire: object) -> dict[str, Array]:
    if not isinstance(wire, dict):
        raise DecodeError("extras", f"expected a map, got {type(wire).__name__}")
    return {cast("str", _TEXT(name, "extras key")): unpack(array, f"extras.{name}") for name, array in wire.items()}


def _spans(table: IntArray, rollouts: int) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in range(rollouts)]
    versions: dict[tuple[int, int], Version] = {}  # a group has few, and many spans
    for rollout, incarnation, n, start, end in table.tolist():
        version = versions.get((incarnation, n)) or versions.setdefault((incarnation, n), Version(incarnation, n))
        spans[rollout].append(Span(version=version, start=start, end=end))
    return spans
