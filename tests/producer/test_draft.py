from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer.draft import Draft
from producer.engine.client import ABORTED, Generation, Sampling
from protocol.messages import Span
from protocol.versions import Version

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = 26


def decode(ids: Sequence[int]) -> str:
    """One letter a token; a special token has no text."""
    return "".join(LETTERS[token] for token in ids if token < EOS)


def piece(text: str | list[int], version: str = "1:0", finish: str = ABORTED, matched: Any = None, spans: Any = None) -> Generation:
    ids = [LETTERS.index(letter) for letter in text] if isinstance(text, str) else text
    spans = [(version, 0, len(ids))] if spans is None else spans
    return Generation(
        output_ids=np.array(ids, np.int32),
        logprobs=np.array([-0.01 * (token + 1) for token in ids], np.float32),
        spans=tuple(Span(version=Version.parse(name), start=start, end=end) for name, start, end in spans if end > start),
        finish_reason=finish,
        text="the engine's own",
        matched=matched,
    )


def drafted(*pieces: Generation) -> Draft:
    draft = Draft()
    for one in pieces:
        draft = draft.plus(one)
    return draft


def spans_of(generation: Generation) -> list[tuple[str, int, int]]:
    return [(str(span.version), span.start, span.end) for span in generation.spans]


def test_what_one_engine_wrote_is_passed_on_as_it_is():
    only = piece("abc", finish="stop", matched="d")
    draft = drafted(only)
    assert draft.ended(Sampling(max_new_tokens=9))
    assert draft.whole(Sampling(max_new_tokens=9), decode) is only


def test_the_next_engine_goes_on_from_the_tokens_so_far_and_may_write_the_rest():
    draft = drafted(piece("ab", "1:3"), piece("c", "1:4"))
    sampling = Sampling(max_new_tokens=5, temperature=0.7, stop=("z",))
    assert not draft.ended(sampling)
    assert draft.prompt([40, 41]) == [40, 41, 0, 1, 2]
    assert draft.rest(sampling) == Sampling(max_new_tokens=2, temperature=0.7, stop=("z",))


def test_ids_logprobs_and_versions_of_every_token_are_those_it_was_sampled_with():
    draft = drafted(piece("ab", "1:3"), piece("cd", spans=[("1:3", 0, 1), ("1:5", 1, 2)]), piece("e", "1:4", "length"))
    whole = draft.whole(Sampling(max_new_tokens=5), decode)
    assert whole.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert whole.logprobs.tolist() == pytest.approx([-0.01, -0.02, -0.03, -0.04, -0.05])
    assert spans_of(whole) == [("1:3", 0, 3), ("1:5", 3, 4), ("1:4", 4, 5)]
    assert (whole.text, whole.finish_reason) == ("abcde", "length")
    assert (whole.output_ids.dtype, whole.logprobs.dtype) == (np.int32, np.float32)


def test_one_that_was_ended_before_its_first_token_leaves_no_trace():
    assert drafted(piece("")) == Draft()


def test_one_that_was_ended_at_its_last_token_is_at_its_length():
    draft = drafted(piece("abc"))
    sampling = Sampling(max_new_tokens=3)
    assert draft.ended(sampling)
    whole = draft.whole(sampling, decode)
    assert (whole.finish_reason, whole.text, spans_of(whole)) == ("length", "abc", [("1:0", 0, 3)])


def test_text_is_without_what_stopped_it():
    sampling = Sampling(max_new_tokens=9, stop=("ef",))
    by_token = drafted(piece("ab"), piece([2, EOS], finish="stop", matched=EOS)).whole(sampling, decode)
    assert (by_token.text, by_token.output_ids.tolist()) == ("abc", [0, 1, 2, EOS])
    by_string = drafted(piece("ab"), piece("cef", finish="stop", matched="ef")).whole(sampling, decode)
    assert (by_string.text, decode(by_string.output_ids.tolist())) == ("abc", "abcef")


def test_a_stop_string_that_no_engine_saw_whole_stops_it():
    sampling = Sampling(max_new_tokens=20, stop=("cde", "zz"))
    whole = drafted(piece("abc", "1:3"), piece("d", "1:4"), piece("efgh", "1:5", "length")).whole(sampling, decode)
    assert decode(whole.output_ids.tolist()) == "abcde"
    assert (whole.text, whole.finish_reason, whole.matched) == ("ab", "stop", "cde")
    assert spans_of(whole) == [("1:3", 0, 3), ("1:4", 3, 4), ("1:5", 4, 5)]
    assert len(whole.logprobs) == 5


def test_a_stop_string_that_an_engine_saw_is_left_to_that_engine():
    whole = drafted(piece("ab"), piece("xcde", finish="stop", matched="cde")).whole(Sampling(max_new_tokens=20, stop=("cde",)), decode)
    assert (whole.text, len(whole.output_ids)) == ("abx", 6)


@given(st.text("abc", min_size=1, max_size=24), st.lists(st.integers(0, 24), max_size=4), st.sampled_from([(), ("ab",), ("cab", "bb"), ("abcabc",)]))
def test_however_it_is_cut_the_whole_is_what_one_engine_would_have_written(text: str, cuts: list[int], stops: tuple[str, ...]):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    uncut = text[: min(ends)] if ends else text
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    parts = [text[start:end] for start, end in pairwise(places)]
    draft, sampling = Draft(), Sampling(max_new_tokens=len(text), stop=stops)
    for at, part in enumerate(parts):
        seen = [part.find(stop) + len(stop) for stop in stops if stop in part]
        stopped = part[: min(seen)] if seen else part
        last = at == len(parts) - 1
        matched = next((stop for stop in stops if stopped.endswith(stop)), None) if seen else None
        draft = draft.plus(piece(stopped, f"1:{at}", "stop" if seen else "length" if last else ABORTED, matched))
        if draft.ended(sampling):
            break
    whole = draft.whole(sampling, decode)
    assert decode(whole.output_ids.tolist()) == uncut
    assert spans_of(whole)[0][1] == 0
    assert spans_of(whole)[-1][2] == len(whole.output_ids) == len(whole.logprobs)
    assert all(before[2] == after[1] for before, after in pairwise(spans_of(whole)))
