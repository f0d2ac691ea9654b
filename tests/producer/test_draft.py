from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer.draft import Draft
from producer.engine.client import ABORTED, Generation, Sampling
from protocol.messages import Span
from protocol.versions import Version

LETTERS = "abcdefghijklmnopqrstuvwxyz"
D, EOS, MARK = 3, 26, 27
SPECIAL = {EOS: "</s>", MARK: "<x>"}


@dataclass(frozen=True)
class Letters:
    """One letter a token; a special token has text only where asked for."""

    eos_ids: frozenset[int] = frozenset({EOS})

    def __call__(self, ids: Sequence[int], *, special: bool = False) -> str:
        return "".join(LETTERS[token] if token < EOS else SPECIAL[token] if special else "" for token in ids)


decode = Letters()


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


def drafted(sampling: Sampling, *pieces: Generation, decode: Letters = decode) -> Draft:
    draft = Draft(sampling, decode)
    for one in pieces:
        assert not draft.ended
        draft = draft.plus(one)
    return draft


def spans_of(generation: Generation) -> list[tuple[str, int, int]]:
    return [(str(span.version), span.start, span.end) for span in generation.spans]


def test_what_one_engine_wrote_is_passed_on_as_it_is():
    only = piece("abc", finish="stop", matched="d")
    draft = drafted(Sampling(max_new_tokens=9), only)
    assert draft.ended
    assert draft.whole() is only


def test_the_next_engine_goes_on_from_the_tokens_so_far_and_may_write_the_rest():
    draft = drafted(Sampling(max_new_tokens=5, temperature=0.7, stop=("z",)), piece("ab", "1:3"), piece("c", "1:4"))
    assert not draft.ended
    assert draft.prompt([40, 41]) == [40, 41, 0, 1, 2]
    assert draft.rest() == Sampling(max_new_tokens=2, temperature=0.7, stop=("z",))


def test_ids_logprobs_and_versions_of_every_token_are_those_it_was_sampled_with():
    pieces = piece("ab", "1:3"), piece("cd", spans=[("1:3", 0, 1), ("1:5", 1, 2)]), piece("e", "1:4", "length")
    whole = drafted(Sampling(max_new_tokens=5), *pieces).whole()
    assert whole.output_ids.tolist() == [0, 1, 2, 3, 4]
    assert whole.logprobs.tolist() == pytest.approx([-0.01, -0.02, -0.03, -0.04, -0.05])
    assert spans_of(whole) == [("1:3", 0, 3), ("1:5", 3, 4), ("1:4", 4, 5)]
    assert (whole.text, whole.finish_reason) == ("abcde", "length")
    assert (whole.output_ids.dtype, whole.logprobs.dtype) == (np.int32, np.float32)


def test_one_that_was_ended_before_its_first_token_leaves_no_trace():
    sampling = Sampling(max_new_tokens=3)
    assert drafted(sampling, piece("")) == Draft(sampling, decode)


def test_one_that_was_ended_at_its_last_token_is_at_its_length():
    draft = drafted(Sampling(max_new_tokens=3), piece("abc"))
    assert draft.ended
    whole = draft.whole()
    assert (whole.finish_reason, whole.text, spans_of(whole)) == ("length", "abc", [("1:0", 0, 3)])


def test_text_is_without_what_stopped_it():
    sampling = Sampling(max_new_tokens=9, stop=("ef",))
    by_token = drafted(sampling, piece("ab"), piece([2, EOS], finish="stop", matched=EOS)).whole()
    assert (by_token.text, by_token.output_ids.tolist()) == ("abc", [0, 1, 2, EOS])
    by_string = drafted(sampling, piece("ab"), piece("cef", finish="stop", matched="ef")).whole()
    assert (by_string.text, decode(by_string.output_ids.tolist())) == ("abc", "abcef")


def test_a_stop_string_that_no_engine_saw_whole_stops_it():
    sampling = Sampling(max_new_tokens=20, stop=("cde", "zz"))
    whole = drafted(sampling, piece("abc", "1:3"), piece("d", "1:4"), piece("efgh", "1:5", "length")).whole()
    assert decode(whole.output_ids.tolist()) == "abcde"
    assert (whole.text, whole.finish_reason, whole.matched) == ("ab", "stop", "cde")
    assert spans_of(whole) == [("1:3", 0, 3), ("1:4", 3, 4), ("1:5", 4, 5)]
    assert len(whole.logprobs) == 5


def test_a_stop_string_that_an_engine_saw_is_left_to_that_engine():
    whole = drafted(Sampling(max_new_tokens=20, stop=("cde",)), piece("ab"), piece("xcde", finish="stop", matched="cde")).whole()
    assert (whole.text, len(whole.output_ids)) == ("abx", 6)


@pytest.mark.parametrize("most", [3, 9])
@pytest.mark.parametrize(
    ("ids", "sampling", "text", "matched"),
    [
        ([0, 1, EOS], {}, "ab", EOS),
        ([0, 1, D], {"stop_token_ids": (D,)}, "ab", D),
        ([0, 1, 2], {"stop": ("bc",)}, "a", "bc"),
        ([0, 1, MARK], {"stop": ("<x>",)}, "ab", "<x>"),
        ([0, 1, D], {"stop": ("bd",), "stop_token_ids": (D,)}, "a", "bd"),
        ([0, 1, 2], {"stop": ("bc",), "ignore_eos": True}, "a", "bc"),
    ],
)
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_what_is_complete_where_it_was_cut_ends_there(cut: int, ids: list[int], sampling: dict[str, Any], text: str, matched: Any, most: int):
    draft = drafted(Sampling(max_new_tokens=most, **sampling), piece(ids[:cut], "1:1"), piece(ids[cut:], "1:2"))
    assert draft.ended
    whole = draft.whole()
    assert (whole.output_ids.tolist(), whole.text, whole.finish_reason, whole.matched) == (ids, text, "stop", matched)
    assert spans_of(whole) == [span for span in [("1:1", 0, cut), ("1:2", cut, 3)] if span[1] < span[2]]


def test_what_came_after_the_end_in_one_step_is_no_part_of_it():
    whole = drafted(Sampling(max_new_tokens=9, stop=("bc",)), piece([0, EOS, 1, 2])).whole()
    assert (whole.output_ids.tolist(), whole.text, whole.matched, spans_of(whole)) == ([0, EOS], "a", EOS, [("1:0", 0, 2)])


def test_where_the_end_of_a_sequence_is_to_be_ignored_nothing_ends_at_a_token():
    """As in engines, where it is said of `stop_token_ids` too."""
    draft = drafted(Sampling(max_new_tokens=9, ignore_eos=True, stop_token_ids=(D,)), piece([0, EOS]), piece([D]))
    assert not draft.ended
    assert draft.prompt([]) == [0, EOS, D]


def test_where_the_end_of_sequence_tokens_are_not_known_the_last_token_is_sampled_again():
    unknown = Letters(frozenset())
    sampling = Sampling(max_new_tokens=4, stop=("xy",))
    draft = drafted(sampling, piece([0, 1, EOS], spans=[("1:1", 0, 2), ("1:2", 2, 3)]), piece([5], "1:3"), decode=unknown)
    assert (draft.prompt([]), draft.rest().max_new_tokens) == ([0, 1], 2)
    whole = draft.plus(piece([EOS], "1:4", "stop", EOS)).whole()
    assert (whole.output_ids.tolist(), len(whole.logprobs)) == ([0, 1, EOS], 3)
    assert spans_of(whole) == [("1:1", 0, 2), ("1:4", 2, 3)]
    assert drafted(sampling, piece("abcd"), decode=unknown).whole().finish_reason == "length"
    assert drafted(sampling, piece("axy"), decode=unknown).whole().text == "a"
    assert drafted(dataclasses.replace(sampling, ignore_eos=True), piece("abc"), decode=unknown).prompt([]) == [0, 1, 2]


def ending(ids: list[int], sampling: Sampling) -> tuple[str, Any] | None:
    """How an engine that looks at `ids` after their last token ends them."""
    texts = decode(ids), decode(ids, special=True)
    if (stop := next((stop for stop in sampling.stop if any(stop in text for text in texts)), None)) is not None:
        return "stop", stop
    if not sampling.ignore_eos and ids[-1] in {EOS, *sampling.stop_token_ids}:
        return "stop", ids[-1]
    return ("length", None) if len(ids) == sampling.max_new_tokens else None


def generated(ids: list[int], sampling: Sampling, version: str, cut: int | None = None, unseen: int = 0) -> Generation:
    """What an engine whose model writes `ids` answers: it is told to end after `cut` tokens, the last `unseen` of which it has not looked at."""
    for count in range(1, sampling.max_new_tokens + 1):
        if cut is not None and count > cut - unseen:
            break
        if (found := ending(ids[:count], sampling)) is not None:
            finish, matched = found
            text = decode(ids[: count - 1] if isinstance(matched, int) else ids[:count])
            text = text[: text.find(matched)] if isinstance(matched, str) and matched in text else text
            return dataclasses.replace(piece(ids[:count], version, finish, matched), text=text)
    assert cut is not None
    return piece(ids[: min(cut, sampling.max_new_tokens)], version)


CLOSE = st.integers(0, 2).map(lambda tokens: -1 - tokens)
"""-1: a cut at the end of the uncut response, -2: one token later, and so on. By chance that is rare."""


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(st.sampled_from([0, 1, 2, 0, 1, 2, D, EOS, MARK]), min_size=1, max_size=16),
    cuts=st.lists(st.tuples(CLOSE | st.integers(0, 8), st.integers(0, 3)), max_size=4),
    stops=st.sampled_from([(), ("ab",), ("cab", "bb"), ("abcabc",), ("<x>", "ca"), ("bd",)]),
    stop_token_ids=st.sampled_from([(), (D,)]),
    ignore_eos=st.booleans(),
    known=st.booleans(),
)
def test_however_it_is_cut_the_whole_is_what_one_engine_would_have_written(
    ids: list[int], cuts: list[tuple[int, int]], stops: tuple[str, ...], stop_token_ids: tuple[int, ...], ignore_eos: bool, known: bool
):
    """Also right after what ends it, and where an engine does not look at its last tokens; where end-of-sequence is not known, at one of them."""
    sampling = Sampling(max_new_tokens=len(ids), stop=stops, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    uncut = generated(ids, sampling, "1:0")
    draft = Draft(sampling, decode if known else Letters(frozenset()))
    for at, (cut, unseen) in enumerate(cuts):
        if not draft.ended:
            cut = cut if cut >= 0 else len(uncut.output_ids) - draft.tokens - 1 - cut  # noqa: PLW2901
            draft = draft.plus(generated(ids[draft.tokens :], draft.rest(), f"1:{at}", cut, min(unseen, cut, 3 if known else 1)))
    if not draft.ended:
        draft = draft.plus(generated(ids[draft.tokens :], draft.rest(), f"1:{len(cuts)}"))
    whole = draft.whole()
    assert whole.output_ids.tolist() == uncut.output_ids.tolist()
    assert whole.logprobs.tolist() == uncut.logprobs.tolist()
    assert whole.text == uncut.text
    told = (uncut.finish_reason, uncut.matched)
    if not known and told == ("stop", EOS) and len(whole.output_ids) == len(ids):
        assert (whole.finish_reason, whole.matched) in {told, ("length", None)}
    else:
        assert (whole.finish_reason, whole.matched) == told
    assert spans_of(whole)[0][1] == 0
    assert spans_of(whole)[-1][2] == len(whole.output_ids)
    assert all(before[2] == after[1] for before, after in pairwise(spans_of(whole)))
