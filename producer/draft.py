"""A response that several engines wrote one after the other: what an engine ended on purpose goes on from its last token, here or elsewhere.

    Draft() ── plus(piece that was aborted) ──► … ── plus(piece that ended) ──► whole()

Pure. Invariant: every token keeps the logprob and the version it was sampled with; nothing is sampled twice and nothing is tokenised again. Sampling the rest
from prompt and tokens so far draws from the same distribution as never having stopped, so that updates do not favour short responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from producer.engine.client import ABORTED, Generation, Sampling
from protocol.messages import Span

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text without special tokens, as engines do it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What there is of one response."""

    pieces: tuple[Generation, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(piece.output_ids) for piece in self.pieces)

    def prompt(self, prompt: Sequence[int]) -> list[int]:
        """What the next engine is asked with."""
        return [*prompt, *(token for piece in self.pieces for token in piece.output_ids.tolist())]

    def rest(self, sampling: Sampling) -> Sampling:
        """How the next engine samples."""
        return dataclasses.replace(sampling, max_new_tokens=sampling.max_new_tokens - self.tokens)

    def plus(self, piece: Generation) -> Draft:
        return Draft((*self.pieces, piece)) if len(piece.output_ids) or piece.finish_reason != ABORTED else self

    def ended(self, sampling: Sampling) -> bool:
        """Nothing more is to be sampled: an engine said so, or ended it on purpose at its very last token."""
        return bool(self.pieces) and (self.pieces[-1].finish_reason != ABORTED or self.tokens >= sampling.max_new_tokens)

    def whole(self, sampling: Sampling, decode: Decode) -> Generation:
        """The response, as if one engine had written it. Call it once it has `ended`.

        A stop string that begins in one piece and ends in the next was seen by no engine: the response ends with the token that completes it.
        """
        last = self.pieces[-1]
        if len(self.pieces) == 1 and last.finish_reason != ABORTED:
            return last
        ids = np.concatenate([piece.output_ids for piece in self.pieces])
        finish, matched = ("length", None) if last.finish_reason == ABORTED else (last.finish_reason, last.matched)
        starts = [0, *np.cumsum([len(piece.output_ids) for piece in self.pieces]).tolist()]
        for start, end in pairwise(starts[1:]):
            if found := _completed(ids[:end].tolist(), start, sampling.stop, decode):
                ids, finish, matched = ids[: found[0]], "stop", found[1]
                break
        spans = _joined([(span, start) for piece, start in zip(self.pieces, starts, strict=False) for span in piece.spans], len(ids))
        logprobs = np.concatenate([piece.logprobs for piece in self.pieces])[: len(ids)]
        return Generation(output_ids=ids, logprobs=logprobs, spans=spans, finish_reason=finish, matched=matched, text=_text(ids.tolist(), matched, decode))


def _completed(ids: list[int], start: int, stops: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """How many tokens it takes until a stop string is there that began before token `start`, and which."""
    if not stops or not start:
        return None
    before, longest = decode(ids[:start]), max(map(len, stops))
    for count in range(start + 1, len(ids) + 1):
        text = decode(ids[:count])
        for stop in stops:
            at = text.find(stop, max(0, len(before) - len(stop) + 1))
            if 0 <= at < len(before):
                return count, stop
        if len(text) >= len(before) + longest:
            return None
    return None


def _joined(spans: Sequence[tuple[Span, int]], length: int) -> tuple[Span, ...]:
    """Spans of pieces that begin at these tokens, as spans of the whole; those of one version that meet are one."""
    joined: list[Span] = []
    for span, offset in spans:
        start, end = span.start + offset, min(span.end + offset, length)
        if joined and joined[-1].version == span.version:
            joined[-1] = dataclasses.replace(joined[-1], end=max(joined[-1].end, end))
        elif start < end:
            joined.append(Span(version=span.version, start=start, end=end))
    return tuple(joined)


def _text(ids: list[int], matched: int | str | None, decode: Decode) -> str:
    """As an engine decodes it, without what stopped it."""
    if isinstance(matched, int):
        return decode(ids[:-1] if ids[-1] == matched else ids)
    text = decode(ids)
    return text[: text.find(matched)] if matched is not None and matched in text else text
