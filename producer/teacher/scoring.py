"""What a teacher is asked over SGLang's `/generate`, and what of its answer is believed. Pure.

A rollout is scored by prefill alone: nothing is written (`max_new_tokens` 0), and `logprob_start_len` s makes the server tell the logprobs of the tokens after
s, whose own entry comes first and has none. They are at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from protocol.arrays import FloatArray
from protocol.errors import ConfigError
from protocol.messages import Rollout

_PROBED = 256
"""Tokens of the vocabulary that a server is asked for, evenly spread."""
_ASKED = 32
"""Of these in one request, which any context can hold."""
_LEAST_LOGPROB = -1e6
"""Servers give the smallest float for a token that cannot be; float32 arithmetic on that would end in infinities."""
_LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by this much, from rounding."""


class BadAnswer(Exception):
    """The server answered something that must not be trained on."""


def sampled_range(rollout: Rollout) -> tuple[int, int]:
    """From the first token that the policy sampled to the one after the last; (0, 0) where it sampled none, or where nothing comes before."""
    (sampled,) = np.nonzero(rollout.mask)
    return (int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) and sampled[0] else (0, 0)


def asked(rollout: Rollout) -> dict[str, Any]:
    """The request that scores it. What follows the last sampled token is left out, and so are logprobs of the prompt."""
    start, end = sampled_range(rollout)
    return _asked(rollout.tokens[:end].tolist(), start=start - 1)


def scored(rollout: Rollout, answer: object) -> FloatArray:
    """[T] float32, nats: the teacher's logprob of each token that the policy sampled, given all before it; 0 elsewhere. Raises: `BadAnswer`."""
    start, end = sampled_range(rollout)
    entries = _entries(answer, rollout.tokens[start - 1 : end].tolist())[1:]
    values = [entry[0] for entry in entries]
    for token, value in zip(rollout.tokens[start:end].tolist(), values, strict=True):
        if type(value) not in (int, float) or not math.isfinite(value) or value > _LOGPROB_SLACK:
            raise BadAnswer(f"the logprob of token {token} is {value!r}")
    told = np.zeros(len(rollout.tokens), dtype=np.float32)
    told[start:end] = np.maximum(np.array(values, dtype=np.float64), _LEAST_LOGPROB)
    told[rollout.mask == 0] = 0.0
    return told


def probes(texts: Mapping[int, str]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Requests that make a server say what it calls these tokens, and the tokens of each."""
    tokens = list(texts)
    for first in range(0, len(tokens), _ASKED):
        ids = tokens[first : first + _ASKED]
        yield _asked(ids, start=0) | {"return_text_in_logprobs": True}, ids


def check_vocabulary(url: str, texts: Mapping[int, str], ids: Sequence[int], answer: object) -> None:
    """White space does not count: some tokenizers clean it up as they decode. Raises: `ConfigError` for another vocabulary; `BadAnswer`."""
    for token, entry in zip(ids, _entries(answer, list(ids)), strict=True):
        if not isinstance(said := entry[2] if len(entry) > 2 else None, str):
            raise ConfigError(f"teacher.urls {url}: does not say what its tokens are called, so its vocabulary cannot be checked; start it with its tokenizer")
        if "".join(said.split()) != "".join(texts[token].split()):
            raise ConfigError(
                f"teacher.urls {url}: token {token} is {said!r} there and {texts[token]!r} in model.path: a teacher needs the vocabulary of the policy; "
                "use one of the same family"
            )


def spread(size: int) -> list[int]:
    """Up to 256 ids of a vocabulary of that size, the first and the last among them.

    >>> spread(3), len(spread(150_000)), spread(150_000)[-1]
    ([0, 1, 2], 256, 149999)
    """
    return sorted({round(place) for place in np.linspace(0, size - 1, min(size, _PROBED)).tolist()}) if size else []


def _asked(ids: list[int], *, start: int) -> dict[str, Any]:
    params = {"max_new_tokens": 0, "temperature": 1.0}
    return {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}


def _entries(answer: object, ids: Sequence[int]) -> Sequence[Sequence[Any]]:
    """The (logprob, token, text) of these tokens, the first without logprob. Raises: `BadAnswer`."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    found = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
    if not isinstance(found, list) or not all(isinstance(entry, list) and len(entry) > 1 for entry in found):
        raise BadAnswer("its answer has no meta_info.input_token_logprobs: is it a server with SGLang's API?")
    if [entry[1] for entry in found] != list(ids):
        raise BadAnswer(f"it tells logprobs of {len(found)} tokens that are not the {len(ids)} it was asked for")
    return found
