"""`"stream": true`: the events of one call, in SGLang's shapes. Pure.

Each event has the tokens so far (cumulative), or those since the one before (incremental); what came while nobody read is one event. Spans come with the last.
"""

from __future__ import annotations

from typing import Any

import orjson
from tokenizers import Tokenizer

from producer.engine.embedded.answer import event, last_event
from producer.engine.embedded.request import Request
from producer.engine.embedded.text import Text

DONE = b"data: [DONE]\n\n"


def framed(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(message: str, code: int) -> bytes:
    """A request that cannot be served is told so in its stream, whose status was sent already; `code` is what that would have been."""
    kind = "invalid_request_error" if code == 400 else "server_error"
    return framed({"error": {"message": message, "type": kind, "code": code, "retryable": False}})


class Events:
    """The events of one request. `index`: its place among those of its call, if they are several."""

    def __init__(self, request: Request, tokenizer: Tokenizer, *, incremental: bool, index: int | None) -> None:
        self.request = request
        self._tokenizer, self._incremental = tokenizer, incremental
        self._extra = {} if index is None else {"index": index}
        self._text = Text(tokenizer, request.ids, skip_special_tokens=request.sampling.skip_special_tokens)
        self._sent = 0
        self._due: tuple[int, str] | None = None
        """(tokens that may be shown, what the engine said that it served then) and not yet sent."""
        self._over = False
        self.ended = False
        """Its last event was given out."""

    def over(self) -> None:
        """The request is finished."""
        self._over = True

    def reached(self, shown: int, version: str) -> None:
        if shown > self._sent:
            self._due = (shown, version)

    def next(self) -> bytes | None:
        """The event that is due, if there is one."""
        request, start = self.request, self._sent if self._incremental else 0
        if self._over and request.finish is not None:
            self.ended = True
            piece = self._text.end(request.output[self._sent :], request.finish.get("matched"), keep_stop=request.sampling.no_stop_trim)
            return framed(last_event(request, self._tokenizer, self._chosen(piece), start) | self._extra)
        if self._due is None:
            return None
        (end, version), self._due = self._due, None
        piece = self._text.plus(request.output[self._sent : end])
        self._sent = end
        return framed(event(request, self._tokenizer, self._chosen(piece), start=start, end=end, version=version) | self._extra)

    def _chosen(self, piece: str) -> str:
        return piece if self._incremental else self._text.shown
