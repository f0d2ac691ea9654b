"""Text as it is written: property tests against the tokenizer's own decoding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models

from producer.engine.embedded.text import Text, whole_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of bytes, so that tokens cut characters; two of its tokens are special."""
    raw = Tokenizer(tokenizer_models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([], trainers.BpeTrainer(vocab_size=258, special_tokens=["<a>", "<b>"], initial_alphabet=alphabet))
    return raw


def pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 40), max_size=8), special=st.lists(st.integers(0, 30), max_size=3))
def test_however_it_is_cut_the_pieces_add_up_to_the_whole(tokenizer: Tokenizer, text: str, cuts: list[int], special: list[int]):
    ids = pieces(tokenizer, text)
    for at in special:
        ids.insert(min(at, len(ids)), at % 2)
    marks = sorted({min(cut, len(ids)) for cut in cuts})
    written, shown, before = Text(tokenizer, [5, 6], skip_special_tokens=True), "", 0
    for mark in marks:
        shown += written.plus(ids[before:mark])
        assert shown == written.shown
        assert not shown.endswith("\ufffd") or "\ufffd" in text
        before = mark
    shown += written.end(ids[before:], None, keep_stop=False)
    assert shown == written.shown == whole_text(tokenizer, [5, 6], ids, {}, skip_special_tokens=True, keep_stop=False)
    assert shown == text


def test_a_character_is_shown_once_it_is_whole(tokenizer: Tokenizer):
    written = Text(tokenizer, [], skip_special_tokens=True)
    first, *rest = pieces(tokenizer, "\u00e9")
    assert written.plus([*pieces(tokenizer, "a b"), first]) == "a "  # words that end before the cut
    assert written.plus(rest) == "b\u00e9"


def test_a_character_that_never_became_whole_is_shown_as_that_in_the_end(tokenizer: Tokenizer):
    assert Text(tokenizer, [], skip_special_tokens=True).end(pieces(tokenizer, "\u00e9")[:1], None, keep_stop=False) == "\ufffd"


@pytest.mark.parametrize(("keep", "expected"), [(False, "one "), (True, "one two")])
def test_a_stop_string_is_cut_off_with_what_follows_it(tokenizer: Tokenizer, *, keep: bool, expected: str):
    assert whole_text(tokenizer, [], pieces(tokenizer, "one twofold"), {"matched": "two"}, skip_special_tokens=True, keep_stop=keep) == expected


def test_a_stop_token_is_cut_off_and_ids_beyond_the_tokenizer_count_as_its_first(tokenizer: Tokenizer):
    ids = [*pieces(tokenizer, "hi"), 400, pieces(tokenizer, "!")[0]]
    assert whole_text(tokenizer, [], ids, {"matched": ids[-1]}, skip_special_tokens=False, keep_stop=False) == "hi<a>"
    assert whole_text(tokenizer, [], ids, {"matched": ids[-1]}, skip_special_tokens=True, keep_stop=True) == "hi!"
