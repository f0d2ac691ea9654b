"""The client of an engine: one generation over SGLang's native `/generate`, checked before anybody trains on it. Torch-free.

Drives SGLang and the embedded engine alike. Where an answer has no `weight_versions` spans, all of its tokens count as the version that was acked before the
request was sent (rule W4); the caller passes it. That version also salts the engine's prefix cache (`extra_key`, which every SGLang of ours knows): a request
never meets keys and values that were computed for one sent after another ack.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import numpy as np
import orjson

from protocol.arrays import FloatArray, IntArray
from protocol.errors import DecodeError, EngineUnavailable, SampleAborted, SampleFailed
from protocol.messages import Span
from protocol.versions import Version

ABORTED = "abort"
"""How a generation finishes that its engine ended on purpose; what it has is sound, and goes on elsewhere."""
KEEP_ALIVE_S = 4.0
"""For the session's connector: uvicorn closes a connection that was idle for 5 s, and a request on its way then would look like a dead engine."""
_ABORT_S = 1.0
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


class EngineClient:
    """Share one; it keeps connections alive through its session and has no state of its own."""

    def __init__(self, session: aiohttp.ClientSession, api_key: str = "") -> None:
        self._session = session
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def generate(
        self,
        url: str,
        input_ids: list[int],
        *,
        sampling: Sampling,
        rid: str,
        deadline_s: float,
        assumed: Version | None = None,
        span_lag: int = 0,
        prefix_cache: bool = False,
    ) -> Generation:
        """One response to `input_ids` by the engine at `url`; one that the engine ended on purpose is returned as far as it came.

        `assumed`: the version the engine had acked before this call: its salt, and what wrote the tokens of engines without spans. `span_lag`: so many tokens
        after an update are the older version's, whatever the spans say. `prefix_cache`: requests there use keys and values of others.

        Raises: `EngineUnavailable` when the engine cannot be reached, breaks the connection or is full: leave it alone for a while. `SampleAborted` when an
        update came between salt and start, so that it rests on older keys and values: ask again, also the same engine. `SampleFailed` when it answers with
        anything else that must not be trained on, or not within `deadline_s` (the request is aborted there): ask another engine.
        """
        body = orjson.dumps(_request(input_ids, sampling, _whole(rid), assumed))
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session.post(f"{url}/generate", data=body, headers=self._headers, timeout=_NO_TIMEOUT) as reply:
                    raw = await reply.read()
                    status = reply.status
        except TimeoutError as problem:
            await self.abort(url, rid)
            raise SampleFailed(f"engine {url} gave no answer within {deadline_s:g} s") from problem
        except (aiohttp.ClientConnectionError, OSError) as problem:
            raise EngineUnavailable(f"engine {url}: {type(problem).__name__}: {problem}") from problem
        except aiohttp.ClientError as problem:
            raise SampleFailed(f"engine {url}: not an HTTP answer ({type(problem).__name__}: {problem})") from problem
        if status == 503:
            raise EngineUnavailable(f"engine {url} answered 503: {raw[:200].decode(errors='replace')}")
        if status != 200:
            raise SampleFailed(f"engine {url} answered {status}: {raw[:500].decode(errors='replace')}")
        try:
            return _generation(raw, sampling, assumed, span_lag=span_lag, prefix_cache=prefix_cache)
        except DecodeError as problem:
            raise SampleFailed(f"engine {url}: unusable answer: {problem}") from problem

    async def abort(self, url: str, rid: str) -> None:
        """End the request `rid` there, if the engine answers within a second."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_ABORT_S):
                async with self._session.post(f"{url}/abort_request", data=orjson.dumps({"rid": _whole(rid)}), headers=self._headers) as reply:
                    await reply.read()


_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""The caller's deadline bounds the whole; connecting has a bound of its own so that a dead host is told from a slow engine."""


def _whole(rid: str) -> str:
    """SGLang aborts every request whose id begins with the one it is given: with an end of its own, no id begins with another."""
    return rid + "."


def _request(input_ids: list[int], sampling: Sampling, rid: str, salt: Version | None) -> dict[str, Any]:
    params: dict[str, Any] = {"max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.top_p < 1:
        params["top_p"] = sampling.top_p
    if sampling.top_k != -1:
        params["top_k"] = sampling.top_k
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    body = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True, "rid": rid}
    return body if salt is None else body | {"extra_key": str(salt)}


def _generation(raw: bytes, sampling: Sampling, assumed: Version | None, *, span_lag: int, prefix_cache: bool) -> Generation:
    """Raises: `DecodeError` naming the field; `SampleFailed` for an abort that has a fault's status code; `SampleAborted` for one that rests on old keys."""
    body = _field({"answer": _parse(raw)}, "answer", dict)
    meta = _field(body, "meta_info", dict)
    ids = _field(body, "output_ids", list)
    finish = _field(meta, "finish_reason", dict)
    reason = _field(finish, "type", str)
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
    logprobs = _logprobs(_field(meta, "output_token_logprobs", list), ids)
    spans = _spans(meta, len(ids), assumed)
    if prefix_cache and assumed is not None and spans[0].version > assumed and meta.get("cached_tokens") != 0:
        raise SampleAborted(f"it began at {spans[0].version} with {meta.get('cached_tokens')} tokens of keys and values that may be older: salted {assumed}")
    matched = finish.get("matched")
    return Generation(
        output_ids=tokens,
        logprobs=logprobs,
        spans=_lagged(spans, span_lag),
        finish_reason=reason,
        text=_field(body, "text", str),
        matched=matched if type(matched) in (int, str) else None,
    )


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        raise DecodeError("answer", f"not JSON ({problem}): {raw[:80]!r}") from problem


def _field(container: dict[str, Any], key: str, kind: type[Any]) -> Any:
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
    for at, wire in enumerate(_field(meta, "weight_versions", list)):
        if type(wire) is not dict:
            raise DecodeError(f"weight_versions[{at}]", f"expected an object, got {type(wire).__name__}")
        start, end = _field(wire, "start", int), _field(wire, "end", int)
        expected = spans[-1].end if spans else 0
        if start != expected or end <= start:
            raise DecodeError(f"weight_versions[{at}]", f"covers [{start}, {end}), expected to go on from {expected}")
        spans.append(Span(version=Version.parse(_field(wire, "version", str)), start=start, end=end))
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
