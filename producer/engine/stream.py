"""A response as its events arrive: what there is of it at any moment, should nothing more come. Pure.

    data: {json}            one event: SGLang sends all tokens so far (cumulative), or those since the event before (`--incremental-streaming-output`)
    data: [DONE]

Which of the two a server does is told by `completion_tokens`. An incremental event costs what it brings. Of cumulative ones, which are as long as the response,
few are parsed: the next is when it is longer by an eighth, and the last one there is.

Only the last event has version spans; the others name the version that the engine served when it sent them. The tokens of an event whose version is not that of
the event before it may have been sampled by either, so they count as the older one's: what is cut off is never called fresher than it is, as long as the engine
sends what it has sampled before it names the version that an update brought.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from producer.engine.generation import ABORTED, Generation, Sampling, checked, field_of, parsed, unversioned
from protocol.errors import DecodeError, SampleFailed
from protocol.versions import Version

_PREFIX = b"data:"
_DONE = b"[DONE]"
_EVENT_BYTES, _TOKEN_BYTES = 1 << 20, 1 << 10
"""No event is longer than this and so much for each token that may come; whoever sends more sends no event."""


_GROWTH = 1.125


class Lines:
    """Bytes in, the contents of `data:` lines out."""

    def __init__(self, max_new_tokens: int) -> None:
        self._most = _EVENT_BYTES + _TOKEN_BYTES * max_new_tokens
        self._rest = bytearray()

    def plus(self, data: bytes) -> Iterator[bytes]:
        """Raises: `DecodeError` for a line without end."""
        seen = len(self._rest)
        self._rest += data
        start = 0
        while (end := self._rest.find(b"\n", max(start, seen))) >= 0:
            line = bytes(self._rest[start:end]).strip()
            start = end + 1
            if line.startswith(_PREFIX):
                yield line[len(_PREFIX) :].lstrip()
        del self._rest[:start]
        if len(self._rest) > self._most:
            raise DecodeError("event", f"{len(self._rest)} bytes without an end, expected {self._most} at most")


class EngineError(Exception):
    """An event that says that the request failed; `code` is the status it would have had as an answer."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Growing:
    """A response under way. `assumed`: the version its engine had acked before the request."""

    def __init__(self, assumed: Version | None, *, adapter: bool = False) -> None:
        """`adapter`: `assumed` is one, and writes the whole response."""
        self._assumed, self._adapter = assumed, adapter
        self._ids: list[Any] = []
        self._logprobs: list[Any] = []
        self._texts: list[str] = []
        self._marks: list[tuple[int, Version]] = []
        """Versions and the tokens they begin at, of events before the last."""
        self._named: tuple[str, Version] | None = None
        self._began_at: Version | None = None
        """What the first event with tokens named."""
        self._cached: Any = None
        self._parsed_bytes = 0
        """Length of the event that was parsed last, if events repeat what came before; else 0."""
        self._pending: bytes | None = None
        """A later one, not parsed yet."""
        self.whole: dict[str, Any] | None = None
        """The answer, once its last event is there: as if it had not been streamed."""

    def __len__(self) -> int:
        return len(self._ids)

    def plus(self, raw: bytes) -> None:
        """Take one event in. Raises: `DecodeError`, also for what comes after the end; `EngineError`."""
        if raw == _DONE:
            self.settle()
        elif self._parsed_bytes <= len(raw) < _GROWTH * self._parsed_bytes and (self._pending is None or len(self._pending) <= len(raw)):
            self._pending = raw
        else:
            if self._pending is not None and len(raw) < len(self._pending):
                self.settle()
            self._pending = None
            self._parse(raw)

    def settle(self) -> None:
        """Take in what has not been parsed; call it when nothing more comes. Raises: as `plus`."""
        if (raw := self._pending) is not None:
            self._pending = None
            self._parse(raw)

    def _parse(self, raw: bytes) -> None:
        body = parsed(raw)
        if "error" in body:
            raise _error(body["error"])
        if self.whole is not None:
            raise DecodeError("event", "came after the last one of the response")
        body = unversioned(body) if self._adapter else body
        meta = field_of(body, "meta_info", dict)
        ids, logprobs = field_of(body, "output_ids", list), meta.get("output_token_logprobs")
        if type(logprobs) is not list:
            if ids:
                raise DecodeError("output_token_logprobs", f"expected list, got {'nothing' if logprobs is None else type(logprobs).__name__}")
            logprobs = []
        had, finish, text = len(self._ids), meta.get("finish_reason"), body.get("text")
        self._take(ids, logprobs, text if type(text) is str else "", field_of(meta, "completion_tokens", int))
        if had and len(ids) == len(self._ids):
            self._parsed_bytes = len(raw)
        if finish is not None:
            self.whole = body | {"output_ids": self._ids, "text": "".join(self._texts), "meta_info": meta | {"output_token_logprobs": self._logprobs}}
        elif len(self._ids) > had:
            self._mark(had, meta)

    def _take(self, ids: list[Any], logprobs: list[Any], text: str, total: int) -> None:
        have = len(self._ids)
        if total == have:
            self._texts = [text] if len(ids) == total else [*self._texts, text]
        elif len(ids) == len(logprobs) == total > have:
            self._ids, self._logprobs, self._texts = ids, logprobs, [text]
        elif have + len(ids) == total and len(logprobs) == len(ids):
            self._ids += ids
            self._logprobs += logprobs
            self._texts.append(text)
        elif len(logprobs) == total > have:
            # an incremental SGLang that ends a request which waits to go on sends its last token again, and all logprobs
            self._ids, self._logprobs, self._texts = [_token(entry) for entry in logprobs], logprobs, [text]
        else:
            raise DecodeError("completion_tokens", f"{total} after {have} tokens, in an event of {len(ids)} with {len(logprobs)} logprobs")

    def _mark(self, start: int, meta: dict[str, Any]) -> None:
        """The tokens from `start` on came with what `meta` names."""
        text = meta.get("weight_version")
        if type(text) is not str:
            if self._assumed is None:
                raise DecodeError("weight_version", "an event names none, and no version was acked before the request")
            before = named = self._assumed
        else:
            last = self._named
            named = last[1] if last is not None and last[0] == text else Version.parse(text)
            before = last[1] if last is not None else self._assumed or named
            self._named = (text, named)
        if self._began_at is None:
            self._began_at, self._cached = named, meta.get("cached_tokens")
        older = min(before, named)
        if not self._marks or self._marks[-1][1] != older:
            self._marks.append((start, older))

    def cut(self, sampling: Sampling, *, span_lag: int, prefix_cache: bool) -> Generation | None:
        """What arrived before nothing more came, to be gone on from; None: nothing that may be trained on."""
        try:
            self.settle()
        except (DecodeError, EngineError):
            return None
        if self._began_at is None:
            return None
        if prefix_cache and self._assumed is not None and self._began_at > self._assumed and self._cached != 0:
            return None  # its first tokens may rest on keys and values older than its salt
        length = len(self._ids)
        ends = [start for start, _ in self._marks[1:]] + [length]
        spans = [{"version": str(version), "start": start, "end": end} for (start, version), end in zip(self._marks, ends, strict=True)]
        meta = {"finish_reason": {"type": ABORTED}, "output_token_logprobs": self._logprobs, "weight_versions": spans, "cached_tokens": self._cached}
        try:
            return checked({"text": "", "output_ids": self._ids, "meta_info": meta}, sampling, self._assumed, span_lag=span_lag, prefix_cache=prefix_cache)
        except (DecodeError, SampleFailed):
            return None


def _token(entry: Any) -> Any:
    return entry[1] if type(entry) is list and len(entry) > 1 else None


def _error(error: Any) -> EngineError:
    error = error if type(error) is dict else {"message": error}
    code = error.get("code")
    return EngineError(code if type(code) is int else 500, str(error.get("message", "")))
