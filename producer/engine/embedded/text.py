"""The text of a response, token by token, as SGLang's detokenizer writes it: pure.

The newest tokens are decoded behind a few before them, and what those add is the new text. While it ends in the middle of a character only whole words of it
are shown, and the rest waits for the next token; the end of a response waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_BEFORE = 5
"""Tokens of the prompt that the first ones of the response are decoded behind."""
_CUT = "\ufffd"
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
"""Each is a word of its own."""


class Text:
    """What a response says so far. Invariant: `shown` only grows."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._ids = self._known(prompt[-_BEFORE:])
        self._surround, self._read = 0, len(self._ids)
        self._settled = ""
        self._sent = 0
        """Characters of `_settled` and what follows it that were shown."""
        self.shown = ""

    def plus(self, ids: Sequence[int]) -> str:
        """What `ids` add."""
        self._ids += self._known(ids)
        new, pending = self._new(self._ids), self._sent - len(self._settled)
        if new and not new.endswith(_CUT):
            self._settled += new
            self._surround, self._read, self._sent = self._read, len(self._ids), len(self._settled)
        else:
            new = _whole_words(new)
            self._sent = len(self._settled) + len(new)
        return self._show(new[pending:])

    def end(self, ids: Sequence[int], matched: int | str | None, *, keep_stop: bool) -> str:
        """What `ids` add as the last ones. What `matched` is cut off, unless it is to be kept; what follows it in the same token is cut off in any case."""
        self._ids += self._known(ids)
        new = self._new(self._ids[:-1] if isinstance(matched, int) and not keep_stop else self._ids)
        whole = self._settled + new
        if isinstance(matched, str) and (at := whole.find(matched)) >= 0:
            whole = whole[: at + len(matched) if keep_stop else at]
        return self._show(whole[self._sent :])

    def _show(self, piece: str) -> str:
        self.shown += piece
        return piece

    def _new(self, ids: list[int]) -> str:
        before = self._decode(self._ids[self._surround : self._read])
        return self._decode(ids[self._surround :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""
        return text

    def _known(self, ids: Sequence[int]) -> list[int]:
        """A model may have more ids than its tokenizer has tokens."""
        return [token if token < self._size else 0 for token in ids]


def whole_text(
    tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], finish: dict[str, Any], *, skip_special_tokens: bool, keep_stop: bool
) -> str:
    """The text of a finished response."""
    return Text(tokenizer, prompt, skip_special_tokens=skip_special_tokens).end(output, finish.get("matched"), keep_stop=keep_stop)


def _whole_words(text: str) -> str:
    if text.endswith("\n") or (text and _is_ideograph(text[-1])):
        return text
    if len(text) > 1 and _is_ideograph(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_ideograph(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in _IDEOGRAPHS)
