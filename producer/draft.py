"""A response that several engines wrote one after the other: what an engine ended on purpose goes on from its last token, here or elsewhere.

    Draft(sampling, decode) ── plus(piece that was aborted) ──► … ── plus(piece that ended, or is complete where it was aborted) ──► whole()

Pure. Invariant: every token keeps the logprob and the version it was sampled with, and nothing is tokenised again. Nothing that is kept is sampled twice.
Sampling the rest from prompt and tokens so far draws from the same distribution as never having stopped, so that updates do not favour short responses.

An engine that is told to end a response may sample once more and then looks for nothing in what it got: the end of the response may be there already.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from producer.engine.client import ABORTED, Generation, Sampling
from protocol.messages import Span


class Decode(Protocol):
    """Token ids to text as engines do it, and the tokens that end a response."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence tokens of the model; none: they are not known."""

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text, without the special tokens unless asked for."""


@dataclass(frozen=True, slots=True)
class _End:
    """Where a response is over, and why."""

    tokens: int
    finish_reason: str
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What there is of one response."""

    sampling: Sampling
    decode: Decode
    pieces: tuple[Generation, ...] = ()
    _end: _End | None = None

    @property
    def tokens(self) -> int:
        return sum(len(piece.output_ids) for piece in self.pieces)

    @property
    def ended(self) -> bool:
        """Nothing more is to be sampled: an engine said so, or ended it on purpose where it was complete."""
        return self._end is not None

    def prompt(self, prompt: Sequence[int]) -> list[int]:
        """What the next engine is asked with."""
        return [*prompt, *self._ids()]

    def rest(self) -> Sampling:
        """How the next engine samples."""
        return dataclasses.replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - self.tokens)

    def plus(self, piece: Generation) -> Draft:
        """With what the next engine wrote.

        Where the model's end-of-sequence tokens are not known, the last token of what was aborted may be one, so it is left for the next engine to sample.
        """
        aborted = piece.finish_reason == ABORTED
        end = _end(self._ids(), piece, self.sampling, self.decode)
        if aborted and end is None and not self.decode.eos_ids and not self.sampling.ignore_eos:
            piece = _without_last(piece)
        return self if aborted and not len(piece.output_ids) else dataclasses.replace(self, pieces=(*self.pieces, piece), _end=end)

    def whole(self) -> Generation:
        """The response, as if one engine had written it. Call it once it has `ended`."""
        assert self._end is not None
        if len(self.pieces) == 1 and self.pieces[0].finish_reason != ABORTED:
            return self.pieces[0]
        count, matched = self._end.tokens, self._end.matched
        ids = np.concatenate([piece.output_ids for piece in self.pieces])[:count]
        starts = np.cumsum([0, *(len(piece.output_ids) for piece in self.pieces)]).tolist()
        return Generation(
            output_ids=ids,
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces])[:count],
            spans=_joined([(span, start) for piece, start in zip(self.pieces, starts, strict=False) for span in piece.spans], count),
            finish_reason=self._end.finish_reason,
            matched=matched,
            text=_text(ids.tolist(), matched, self.decode),
        )

    def _ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.output_ids.tolist()]


def _end(before: list[int], piece: Generation, sampling: Sampling, decode: Decode) -> _End | None:
    """Where the response ends within `piece`, which was written after `before`; None: it does not.

    Of what one engine wrote and ended itself, it has seen all but stop strings that began earlier. What it was told to end, nobody has looked at. A stop string
    goes before a token that ends the response at the same place, as in SGLang: the text is then without the whole string.
    """
    ids, aborted = [*before, *piece.output_ids.tolist()], piece.finish_reason == ABORTED
    ends: list[_End] = []
    if sampling.stop and ids and (aborted or before):
        ends += [end for special in (False, True) if (end := _string_end(ids, len(before), sampling.stop, decode, special=special, whole=aborted))]
    if aborted and not sampling.ignore_eos:  # which has engines ignore stop_token_ids as well
        ending = decode.eos_ids | set(sampling.stop_token_ids)
        ends += [_End(count, "stop", token) for count, token in enumerate(ids, 1) if count > len(before) and token in ending][:1]
    if ends:
        return min(ends, key=lambda end: end.tokens)
    if not aborted:
        return _End(len(ids), piece.finish_reason, piece.matched)
    return _End(len(ids), "length") if len(ids) >= sampling.max_new_tokens else None


def _string_end(ids: list[int], start: int, stops: Sequence[str], decode: Decode, *, special: bool, whole: bool) -> _End | None:
    """The first token after `start` with which a stop string is there, if one is: `whole`, or else of those that began before `start`.

    `special`: among the text of special tokens too, where SGLang looks for them.
    """
    before = len(decode(ids[:start], special=special))

    def found(count: int) -> str | None:
        text = decode(ids[:count], special=special)
        latest = len(text) if whole else before
        return next((stop for stop in stops if 0 <= text.find(stop) < latest), None)

    if found(len(ids)) is None:
        return None
    count = start + 1 + bisect_left(range(start + 1, len(ids)), True, key=lambda count: found(count) is not None)
    return _End(count, "stop", found(count))


def _without_last(piece: Generation) -> Generation:
    """All but the last token of a piece, if it has one."""
    count = max(0, len(piece.output_ids) - 1)
    spans = _joined([(span, 0) for span in piece.spans], count)
    return dataclasses.replace(piece, output_ids=piece.output_ids[:count], logprobs=piece.logprobs[:count], spans=spans)


def _joined(spans: Sequence[tuple[Span, int]], length: int) -> tuple[Span, ...]:
    """Spans of pieces that begin at these tokens, as spans of the whole; those of one version that meet are one."""
    joined: list[Span] = []
    for span, offset in spans:
        start, end = span.start + offset, min(span.end + offset, length)
        if start >= end:
            continue
        if joined and joined[-1].version == span.version:
            joined[-1] = dataclasses.replace(joined[-1], end=end)
        else:
            joined.append(Span(version=span.version, start=start, end=end))
    return tuple(joined)


def _text(ids: list[int], matched: int | str | None, decode: Decode) -> str:
    """As an engine decodes it, without what stopped it."""
    if isinstance(matched, int):
        return decode(ids[:-1] if ids[-1] == matched else ids)
    text = decode(ids)
    return text[: text.find(matched)] if matched is not None and matched in text else text
