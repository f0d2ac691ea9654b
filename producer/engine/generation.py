"""One response of an engine, checked before anybody trains on it: what SGLang's native `/generate` answers, as arrays and version spans. Pure.

Where an answer has no `weight_versions` spans, all of its tokens count as the version that was acked before the request was sent (rule W4).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from protocol.arrays import FloatArray, IntArray
from protocol.errors import DecodeError, SampleAborted, SampleFailed
from protocol.messages import Span
from protocol.versions import Version

ABORTED = "abort"
"""How a generation finishes that its engine ended on purpose, or that was cut off; what it has is sound, and goes on elsewhere."""
_LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by this much, from rounding."""
_LEAST_LOGPROB = -1e6
"""No sampled token is less likely than this; SGLang clamps log 0 to the smallest float instead of -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a response is sampled. Temperature 0 is greedy; top_k -1 samples among all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """One response as sampled.

    Invariant: spans are contiguous from 0 and cover every output token; logprobs are finite. There is a token unless it was aborted.
    """

    output_ids: IntArray
    """[N] int32"""
    logprobs: FloatArray
    """[N] float32, nats, after temperature."""
    spans: tuple[Span, ...]
    """Indices into `output_ids`."""
    finish_reason: str
    """stop, length or abort"""
    text: str
    """As the engine decoded it, without what stopped it."""
    matched: int | str | None = None
    """The token or string that stopped it."""

    @property
    def weight_version(self) -> Version:
        """Of the last token."""
        return self.spans[-1].version


def checked(body: dict[str, Any], sampling: Sampling, assumed: Version | None, *, span_lag: int, prefix_cache: bool) -> Generation:
    """The response in a whole answer.

    `assumed`: the version the engine had acked before the request. `span_lag`: so many tokens after an update are the older version's, whatever the spans say.
    `prefix_cache`: requests there use keys and values of others.

    Raises: `DecodeError` naming the field; `SampleFailed` for an abort that has a fault's status code; `SampleAborted` for one that rests on old keys.
    """
    meta = field_of(body, "meta_info", dict)
    ids = field_of(body, "output_ids", list)
    finish = field_of(meta, "finish_reason", dict)
    reason = field_of(finish, "type", str)
    if reason not in ("stop", "length", ABORTED):
        raise DecodeError("finish_reason.type", f"got {reason!r:.40}, expected stop, length or abort")
    if reason == ABORTED:
        if finish.get("status_code") is not None:
            raise SampleFailed(f"the engine aborted it after {len(ids)} tokens: {finish.get('message', '')}")
        if not ids:
            return Generation(output_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32), spans=(), finish_reason=reason, text="")
    if not 0 < len(ids) <= sampling.max_new_tokens:
        raise DecodeError("output_ids", f"{len(ids)} tokens, expected 1 to {sampling.max_new_tokens}")
    tokens = _token_ids(ids)
    logprobs = _logprobs(field_of(meta, "output_token_logprobs", list), ids)
    spans = _spans(meta, len(ids), assumed)
    if prefix_cache and assumed is not None and spans[0].version > assumed and meta.get("cached_tokens") != 0:
        raise SampleAborted(f"it began at {spans[0].version} with {meta.get('cached_tokens')} tokens of keys and values that may be older: salted {assumed}")
    matched = finish.get("matched")
    return Generation(
        output_ids=tokens,
        logprobs=logprobs,
        spans=_lagged(spans, span_lag),
        finish_reason=reason,
        text=field_of(body, "text", str),
        matched=matched if type(matched) in (int, str) else None,
    )


def parsed(raw: bytes) -> dict[str, Any]:
    """Raises: `DecodeError`."""
    try:
        return field_of({"answer": orjson.loads(raw)}, "answer", dict)  # type: ignore[no-any-return]
    except orjson.JSONDecodeError as problem:
        raise DecodeError("answer", f"not JSON ({problem}): {raw[:80]!r}") from problem


def unversioned(body: dict[str, Any]) -> dict[str, Any]:
    """An answer of an adapter: what it says of versions is said of the weights under it, and one adapter wrote it all."""
    meta = body.get("meta_info")
    if type(meta) is not dict:
        return body
    return body | {"meta_info": {key: value for key, value in meta.items() if key not in ("weight_version", "weight_versions")}}


def field_of(container: dict[str, Any], key: str, kind: type[Any]) -> Any:
    """Raises: `DecodeError` where it is missing or of another type."""
    value = container.get(key)
    if type(value) is not kind:
        raise DecodeError(key, f"expected {kind.__name__}, got {'nothing' if value is None else type(value).__name__}")
    return value


def _token_ids(ids: list[Any]) -> IntArray:
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 1 << 31:
        raise DecodeError("output_ids", "expected token ids of 0 or more")
    return np.array(ids, dtype=np.int32)


def _logprobs(entries: list[Any], ids: list[int]) -> FloatArray:
    """[logprob, token, text] for every output token. A NaN arrives as null or is not JSON at all."""
    if len(entries) != len(ids):
        raise DecodeError("output_token_logprobs", f"{len(entries)} entries for {len(ids)} tokens")
    try:
        values, tokens = [entry[0] for entry in entries], [entry[1] for entry in entries]
        sound = tokens == ids and set(map(type, entries)) == {list} and set(map(type, values)) <= {float, int}
    except (TypeError, LookupError):
        sound = False
    if not sound:
        raise _unsound(entries, ids)
    if not (min(values) >= _LEAST_LOGPROB and max(values) <= _LOGPROB_SLACK):
        raise DecodeError("output_token_logprobs", f"outside ({_LEAST_LOGPROB:g}, 0]: {min(values)} … {max(values)}")
    return np.minimum(np.array(values, dtype=np.float32), np.float32(0.0))


def _unsound(entries: list[Any], ids: list[int]) -> DecodeError:
    """The first entry that is not as it should be; looked for only when there is one."""
    for at, (entry, token) in enumerate(zip(entries, ids, strict=True)):
        if type(entry) is not list or len(entry) < 2 or type(entry[0]) not in (float, int) or entry[1] != token:
            return DecodeError(f"output_token_logprobs[{at}]", f"got {entry!r:.60}, expected [logprob, {token}, …]")
    raise AssertionError


def _spans(meta: dict[str, Any], length: int, assumed: Version | None) -> tuple[Span, ...]:
    if meta.get("weight_versions") is None:
        if assumed is None:
            raise DecodeError("weight_versions", "the engine sends no spans, and no version was acked before the request")
        return (Span(version=assumed, start=0, end=length),)
    spans: list[Span] = []
    for at, wire in enumerate(field_of(meta, "weight_versions", list)):
        if type(wire) is not dict:
            raise DecodeError(f"weight_versions[{at}]", f"expected an object, got {type(wire).__name__}")
        start, end = field_of(wire, "start", int), field_of(wire, "end", int)
        expected = spans[-1].end if spans else 0
        if start != expected or end <= start:
            raise DecodeError(f"weight_versions[{at}]", f"covers [{start}, {end}), expected to go on from {expected}")
        spans.append(Span(version=Version.parse(field_of(wire, "version", str)), start=start, end=end))
    if not spans or spans[-1].end != length:
        raise DecodeError("weight_versions", f"cover {spans[-1].end if spans else 0} of {length} tokens")
    return tuple(spans)


def _lagged(spans: tuple[Span, ...], lag: int) -> tuple[Span, ...]:
    """Every boundary so many tokens later: an engine that works ahead gives the tokens of the step under way to the version that came during it."""
    if not lag or len(spans) == 1:
        return spans
    length = spans[-1].end
    starts = [0, *(min(span.start + lag, length) for span in spans[1:]), length]
    return tuple(Span(version=span.version, start=start, end=end) for span, (start, end) in zip(spans, pairwise(starts), strict=True) if start < end)
