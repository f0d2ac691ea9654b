"""The client of an engine: one generation over SGLang's native `/generate`, checked before anybody trains on it. Torch-free.

Drives SGLang and the embedded engine alike. Responses are streamed, so that what arrived is kept when an engine goes away in the middle; an engine that answers
whole although it was asked for a stream is taken at its word. The version that was acked before the request salts the engine's prefix cache (`extra_key`, which
every SGLang of ours knows): a request never meets keys and values that were computed for one sent after another ack.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from producer.engine.generation import ABORTED, Generation, Sampling, checked, parsed, unversioned
from producer.engine.progress import Held, Look, Progress, Stall, look_at
from producer.engine.stream import EngineError, Growing, Lines
from protocol.errors import DecodeError, EngineUnavailable, SampleAborted, SampleFailed
from protocol.versions import Version

__all__ = ["ABORTED", "KEEP_ALIVE_S", "EngineClient", "Fault", "Generation", "Outcome", "Sampling", "open_session"]

KEEP_ALIVE_S = 4.0
"""For the session's connector: uvicorn closes a connection that was idle for 5 s, and a request on its way then would look like a dead engine."""
PROGRESS_S = 30.0
_ABORT_S = 1.0
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
"""The caller's deadline bounds the whole; connecting has a bound of its own so that a dead host is told from a slow engine."""
_STREAM = "text/event-stream"


class Fault(StrEnum):
    """How a request at an engine went wrong."""

    GONE = "gone"
    """Nobody listens there."""
    AWAY = "away"
    """It broke the connection, or is full."""
    SILENT = "silent"
    """It answers nothing at all any more: stopped, or cut off."""
    WEDGED = "wedged"
    """It answers, is not paused, and generates nothing."""
    SLOW = "slow"
    """It gets on, but not within the deadline."""
    REFUSED = "refused"
    """It takes no request of ours: a wrong key, or no engine."""
    REJECTED = "rejected"
    """It does not take this request."""
    BROKEN = "broken"
    """It failed, or its answer must not be trained on."""
    FOREIGN = "foreign"
    """Its version is none of a run's, such as a fresh boot's."""
    OLD_KEYS = "old keys"
    """An update came between salt and start, so that it rests on older keys and values. Nobody's fault: ask again."""
    ENDED = "ended"
    """It was aborted before the engine took it up, which SGLang 0.5.17 says by a status instead of an empty response. Nobody's fault: ask again."""

    @property
    def nobodys(self) -> bool:
        """It says nothing against the engine nor the request."""
        return self in (Fault.OLD_KEYS, Fault.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one request. Invariant: a piece, a fault, or both: a piece with a fault was cut off, and is as good as one that was aborted."""

    piece: Generation | None = None
    fault: Fault | None = None
    problem: str = ""


def open_session() -> aiohttp.ClientSession:
    """A session for engines: it tells requests on connections that had been idle, which a server may have closed, from those on fresh ones."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=KEEP_ALIVE_S)
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_reused)
    return aiohttp.ClientSession(connector=connector, trace_configs=[trace])


async def _reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    if isinstance(sent := context.trace_request_ctx, _Sent):
        sent.reused = True


@dataclass(slots=True)
class _Sent:
    """One try of a request."""

    reused: bool = False
    """It went over a connection that had been idle."""
    answered: bool = False


class EngineClient:
    """Share one; it keeps connections alive through its session."""

    def __init__(self, session: aiohttp.ClientSession, api_key: str = "", *, admin_key: str = "", stream: bool = False, progress_s: float = PROGRESS_S) -> None:
        """`admin_key`: an engine that has one takes only that for an abort. `stream`: ask for responses as they are written. `progress_s`: an engine that is
        quiet for so long is looked at, while `progress.watch` runs.
        """
        self._session = session
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {"Content-Type": "application/json"} | self._key
        self._abort_headers = self._headers | ({"Authorization": f"Bearer {admin_key}"} if admin_key else {})
        self._stream = stream
        self.progress = Progress(self._look, progress_s=progress_s, sees_tokens=stream)

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
        """As `attempt`, for who wants a whole response or none; one that the engine ended on purpose is returned as far as it came.

        Raises: `EngineUnavailable` when the engine cannot be reached, breaks the connection, is full or does not get on: leave it alone for a while.
        `SampleAborted` when an update came between salt and start, or an abort before it: ask again, also the same engine. `SampleFailed` when it answers with
        anything else that must not be trained on, or not within `deadline_s`: ask another engine.
        """
        outcome = await self.attempt(
            url, input_ids, sampling=sampling, rid=rid, deadline_s=deadline_s, assumed=assumed, span_lag=span_lag, prefix_cache=prefix_cache
        )
        if outcome.fault is None and outcome.piece is not None:
            return outcome.piece
        if outcome.fault is not None and outcome.fault.nobodys:
            raise SampleAborted(outcome.problem)
        if outcome.fault in (Fault.GONE, Fault.AWAY, Fault.SILENT, Fault.WEDGED):
            raise EngineUnavailable(outcome.problem)
        raise SampleFailed(outcome.problem)

    async def attempt(
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
        salt: str = "",
        adapter: str = "",
        on_sign: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """One response to `input_ids` by the engine at `url`, or what there is of it, and what went wrong.

        `assumed`: the version the engine had acked before this call: its salt, and what wrote the tokens of engines without spans. `span_lag`: so many tokens
        after an update are the older version's, whatever the spans say. `prefix_cache`: requests there use keys and values of others, of
        those with the same `salt` (empty: the version acked). `adapter`: the name of `assumed` at an engine whose versions are adapters; it writes the whole
        response, whatever the weights under it are called. `on_sign` is called once the engine has begun to answer soundly. A request whose
        deadline passes is aborted there.
        """
        growing = Growing(assumed, adapter=bool(adapter))
        salt = salt or ("" if assumed is None else str(assumed))
        asked = _request(input_ids, sampling, _whole(rid), salt) | ({"stream": True} if self._stream else {}) | ({"lora_path": adapter} if adapter else {})
        held: Held | None = None
        try:
            async with asyncio.timeout(deadline_s) as scope:
                with self.progress.request(url, scope) as held:
                    answer = await self._receive(url, orjson.dumps(asked), growing, Lines(sampling.max_new_tokens), on_sign)
            if answer is not None:
                answer = unversioned(answer) if adapter else answer
                return Outcome(piece=checked(answer, sampling, assumed, span_lag=span_lag, prefix_cache=prefix_cache))
            fault, problem = Fault.AWAY, "ended the stream before the response was whole"
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            fault, problem = _network_fault(error, None if held is None else held.stall, deadline_s)
        except EngineError as error:
            unknown = bool(adapter) and error.code == _BAD_REQUEST and adapter in str(error)
            fault, problem = Fault.FOREIGN if unknown else _status_fault(error.code), f"answered {error.code}: {error}"
        except (DecodeError, SampleFailed) as error:
            fault, problem = _answer_fault(error), f"gave an answer that is of no use: {error}"
        if fault in (Fault.SLOW, Fault.WEDGED):
            await self.abort(url, rid)
        piece = growing.cut(sampling, span_lag=span_lag, prefix_cache=prefix_cache) if fault in _KEEPS else None
        return Outcome(piece=piece, fault=fault, problem=f"engine {url} {problem}")

    async def _receive(self, url: str, asked: bytes, growing: Growing, lines: Lines, on_sign: Callable[[], None]) -> dict[str, Any] | None:
        """The whole answer; None: its stream ended before. A connection that had been idle and was closed meanwhile is no failure: asked once more, at once."""
        for last in (False, True):
            sent = _Sent()
            try:
                async with self._session.post(f"{url}/generate", data=asked, headers=self._headers, timeout=_NO_TIMEOUT, trace_request_ctx=sent) as reply:
                    sent.answered = True
                    if reply.status != 200:
                        raise EngineError(reply.status, (await reply.read())[:500].decode(errors="replace"))
                    if reply.content_type != _STREAM:
                        return parsed(await reply.read())
                    await self._follow(url, reply.content, growing, lines, on_sign)
                    return growing.whole
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if last or sent.answered or not sent.reused:
                    raise
        raise AssertionError

    async def _follow(self, url: str, content: aiohttp.StreamReader, growing: Growing, lines: Lines, on_sign: Callable[[], None]) -> None:
        """Take in events to the end of the stream; what breaks after the last event of the response does not matter."""
        told = False
        try:
            async for data in content.iter_any():
                for event in lines.plus(data):
                    growing.plus(event)
                    self.progress.moved(url)
                if not told and len(growing):
                    told = True
                    on_sign()
        except (aiohttp.ClientError, OSError):
            growing.settle()
            if growing.whole is None:
                raise
        growing.settle()

    async def abort(self, url: str, rid: str) -> None:
        """End the request `rid` there, if the engine answers within a second."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_ABORT_S):
                async with self._session.post(f"{url}/abort_request", data=orjson.dumps({"rid": _whole(rid)}), headers=self._abort_headers) as reply:
                    await reply.read()

    async def _look(self, url: str, deadline_s: float) -> Look:
        return await look_at(self._session, url, self._key, deadline_s)


_KEEPS = frozenset({Fault.GONE, Fault.AWAY, Fault.SILENT, Fault.WEDGED, Fault.SLOW, Fault.ENDED})
"""Faults that say nothing against what had arrived."""
_BAD_REQUEST = 400
_REFUSALS = frozenset({401, 403, 404, 405})
_BUSY = frozenset({408, 429, 502, 503, 504})
_CLOSED_REQUEST = 499


def _network_fault(error: Exception, stall: Stall | None, deadline_s: float) -> tuple[Fault, str]:
    if isinstance(error, aiohttp.ServerTimeoutError | aiohttp.ClientConnectorError):
        return Fault.GONE, f"cannot be reached: {type(error).__name__}: {error}"
    if isinstance(error, TimeoutError):
        if stall is Stall.SILENT:
            return Fault.SILENT, "answers nothing any more"
        if stall is Stall.WEDGED:
            return Fault.WEDGED, "answers and is not paused, but generates nothing"
        return Fault.SLOW, f"gave no answer within {deadline_s:g} s"
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return Fault.AWAY, f"broke the connection: {type(error).__name__}: {error}"
    return Fault.BROKEN, f"gave no HTTP answer ({type(error).__name__}: {error})"


def _status_fault(code: int) -> Fault:
    if code in _REFUSALS:
        return Fault.REFUSED
    if code in _BUSY:
        return Fault.AWAY
    if code == _CLOSED_REQUEST:
        return Fault.ENDED
    return Fault.REJECTED if 400 <= code < 500 else Fault.BROKEN


def _answer_fault(error: DecodeError | SampleFailed) -> Fault:
    if isinstance(error, SampleAborted):
        return Fault.OLD_KEYS
    return Fault.FOREIGN if isinstance(error, DecodeError) and error.field == "version" else Fault.BROKEN


def _whole(rid: str) -> str:
    """SGLang aborts every request whose id begins with the one it is given: with an end of its own, no id begins with another."""
    return rid + "."


def _request(input_ids: list[int], sampling: Sampling, rid: str, salt: str) -> dict[str, Any]:
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
    return body | {"extra_key": salt} if salt else body
