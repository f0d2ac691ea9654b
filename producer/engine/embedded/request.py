"""What may be asked of `/generate`: the body is read strictly, and turned into one `Request` a response.

A key of SGLang's that the engine lacks is refused unless it asks for what happens anyway (`"return_hidden_states": false`); a key that SGLang does not know
either is ignored, as there. What is wrong is said in the shape that SGLang has for it: see the kinds of `BadRequest`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from tokenizers import Tokenizer

Json: TypeAlias = Mapping[str, Any]

_DEFAULT_NEW_TOKENS = 128
_PROBES = ("probe-", "HEALTH_CHECK_")
"""How the ids of requests begin that ask whether the engine decodes, and with what: a reconciler's proof of an update, and `/health_generate`."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "token_ids_logprob": (None, []),
    "return_hidden_states": (False,),
    "return_sampling_mask": (False,),
    "return_entropy": (False,),
    "return_indexer_topk": (False,),
    "session_id": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "watermark": (None,),
    "kv_hints": (None,),
}
"""Keys of SGLang that the engine lacks, and the values that ask for nothing."""
_SAMPLING_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,),
    "min_p": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "logit_bias": (None, {}),
    "custom_params": (None,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (None, 1),
}
_SAMPLING_KEYS = frozenset({
    "temperature", "top_p", "top_k", "max_new_tokens", "n", "stop", "stop_token_ids", "ignore_eos", "sampling_seed", "skip_special_tokens", "no_stop_trim",
})  # fmt: skip
_MOST_STOPS = 32
_AS_MANY_AS_FIT = -1
"""`max_new_tokens` of a request that sets no limit, until its prompt is known."""


class BadRequest(ValueError):
    """The request cannot be served as asked; the message goes to the client with status 400."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self)}}


class BadBody(BadRequest):
    """It has not even the form of a request: there, SGLang's web framework says so before SGLang sees it."""

    @property
    def body(self) -> dict[str, Any]:
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}


class BadSampling(BadRequest):
    """A field of `sampling_params` is unknown or of the wrong type."""

    @property
    def body(self) -> dict[str, Any]:
        return {"error": str(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine can serve."""

    context_length: int
    """Prompt and response together."""
    vocabulary: int
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one response is sampled; names and defaults are SGLang's. Temperature 0 is greedy; `max_new_tokens` 0 reads the prompt and writes nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = _DEFAULT_NEW_TOKENS
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_tokens: int = 0
    """Tokens of the longest stop string as the tokenizer writes it: among so many of the newest, and one more, it is looked for."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Nothing but the softmax at temperature 1 decides: no row of its own needs work."""
        return self.temperature == 1 and self.top_p >= 1 and self.top_k == -1 and self.sampling_seed is None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One response: what was asked, and what the engine has made of it so far. Owned by the worker's thread until it is finished."""

    rid: str
    ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    text_in_logprobs: bool = False
    prompt_ids_wanted: bool = False
    stream: bool = False
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, end-of-sequence included unless ignored."""

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[tuple[float | None, int]] = field(default_factory=list)
    input_tops: list[list[tuple[float, int]] | None] = field(default_factory=list)
    breaks: list[tuple[int, str]] = field(default_factory=list)
    """(index of output, version): from this token on, this version wrote."""
    finish: dict[str, Any] | None = None
    shown: int = 0
    """Tokens that a stream may show so far: what comes behind them may be the beginning of a stop string."""
    text: str = ""
    version: str = ""
    """Served when it finished."""
    retractions: int = 0
    """Times its keys and values were dropped, to be computed anew from prompt and output."""
    noise: Any = None
    """The generator of a seeded request, which goes on where it was after a retraction."""
    shared_prompt: int = 0
    """Tokens of the prompt whose keys and values another request of the same prefill computed."""
    received_at: float = field(default_factory=time.time)
    queued_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    call: Any = None
    """The HTTP call that waits for it."""
    lora_path: str | None = None
    """The adapter that it asks for."""
    adapter: Any = None
    """That adapter, `lora_rows.Adapter`, from when the request is let in until it is answered."""

    @property
    def context(self) -> list[int]:
        """Every token whose key and value the next one needs."""
        return self.ids + self.output if self.output else self.ids

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.output)

    def written_by(self, version: str) -> None:
        """From the next token on, `version` writes."""
        while self.breaks and self.breaks[-1][0] == len(self.output):
            self.breaks.pop()
        if not self.breaks or self.breaks[-1][1] != version:
            self.breaks.append((len(self.output), version))

    @property
    def probe(self) -> bool:
        """Whether it asks for a sign of life: it is served before all that wait, and a full queue does not refuse it."""
        return self.rid.startswith(_PROBES)


def parse(body: Any, limits: Limits) -> tuple[list[Request], bool]:
    """The requests of one body, and whether the answer is a list. Raises: `BadRequest`."""
    if not isinstance(body, dict):
        raise BadBody(f"the body must be a JSON object, got {type(body).__name__}")
    options = _options(body)
    for key in body.keys() & _NEUTRAL.keys():
        _refuse(key, body[key], _NEUTRAL, "")
    prompts, listed = _prompts(body, limits)
    rids, params = _rids(body.get("rid"), len(prompts), listed), _params(body.get("sampling_params"), len(prompts), limits)
    requests: list[Request] = []
    for ids, rid, asked in zip(prompts, rids, params, strict=True):
        bounded = asked.max_new_tokens != _AS_MANY_AS_FIT
        sampling = asked if bounded else replace(asked, max_new_tokens=max(0, limits.context_length - len(ids)))
        _check_length(ids, sampling, limits)
        start = options["logprob_start"]
        if start > len(ids):
            raise BadRequest(f"logprob_start_len={start} is higher than the number of input tokens, {len(ids)}. Please use a smaller logprob_start_len.")
        for _ in range(sampling.n):  # as in SGLang, samples of one prompt have ids of their own
            own = rid if rid is not None and sampling.n == 1 else uuid.uuid4().hex
            requests.append(Request(rid=own, ids=ids, sampling=sampling, **options))
    if twice := sorted(rid for rid, count in Counter(request.rid for request in requests).items() if count > 1):
        raise BadRequest(f"Duplicate request IDs detected within the request: {twice}")
    return requests, listed or len(requests) > 1


def _refuse(key: str, value: Any, neutral: Mapping[str, tuple[Any, ...]], where: str) -> None:
    if not any(type(value) is type(item) and value == item for item in neutral[key]):
        raise BadRequest(f"{where}{key} is not supported by the embedded engine (got {value!r:.60})")


def _prompts(body: Json, limits: Limits) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        listed = isinstance(text, list)
        texts: list[Any] = text if listed else [text]
        if not texts or not all(isinstance(item, str) for item in texts):
            raise BadRequest("text must be a string or a list of strings")
        prompts: list[Any] = [list(limits.tokenizer.encode(item).ids) for item in texts]
    else:
        if not isinstance(ids, list):
            raise BadBody("input_ids must be a list of token ids, or a list of such lists")
        if not ids:
            raise BadRequest("input_ids cannot be empty.")
        listed = isinstance(ids[0], list)
        prompts = ids if listed else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt:
            raise BadRequest("a prompt has no tokens")
        if not all(type(token) is int and 0 <= token < limits.vocabulary for token in prompt):
            raise BadRequest(f"input_ids must be integers from 0 to {limits.vocabulary - 1}, the size of the vocabulary")
    return prompts, listed


def _rids(rid: Any, count: int, listed: bool) -> list[str | None]:
    if rid is None:
        return [None] * count
    if isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(count)] if listed else [rid]
    if isinstance(rid, list) and len(rid) == count and all(isinstance(item, str) for item in rid):
        return cast("list[str | None]", rid)
    raise BadBody(f"rid must be a string, or a list of {count} strings")


def _params(value: Any, count: int, limits: Limits) -> list[SamplingParams]:
    if isinstance(value, list):
        if len(value) != count:
            raise BadRequest(f"sampling_params has {len(value)} entries for {count} prompts")
        return [_sampling(item, limits) for item in value]
    return [_sampling(value, limits)] * count


def _sampling(value: Any, limits: Limits) -> SamplingParams:
    if value is None:
        return SamplingParams()
    if not isinstance(value, dict):
        raise BadBody(f"sampling_params must be an object, got {type(value).__name__}")
    for key in value.keys() - _SAMPLING_KEYS:
        if key not in _SAMPLING_NEUTRAL:
            raise BadSampling(f"unknown field `{key}`")
        _refuse(key, value[key], _SAMPLING_NEUTRAL, "sampling_params.")
    temperature, top_p = _number(value, "temperature", 1.0), _number(value, "top_p", 1.0)
    if temperature < 0 or not math.isfinite(temperature):
        raise BadRequest(f"temperature must be a non-negative finite number, got {temperature}.")
    if not 0 < top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {top_p}.")
    top_k = _integer(value, "top_k", -1)
    if top_k < 1 and top_k != -1:
        raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    stop, unbounded = _stop(value.get("stop")), value.get("max_new_tokens", 0) is None
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=_AS_MANY_AS_FIT if unbounded else _at_least(_integer(value, "max_new_tokens", _DEFAULT_NEW_TOKENS), "max_new_tokens", 0),
        n=_at_least(_integer(value, "n", 1), "n", 1),
        stop=stop,
        stop_tokens=max((len(limits.tokenizer.encode(text, add_special_tokens=False)) for text in stop), default=0),
        stop_token_ids=frozenset(_ids(value.get("stop_token_ids"))),
        ignore_eos=_flag(value, "ignore_eos", default=False),
        sampling_seed=None if value.get("sampling_seed") is None else _at_least(_integer(value, "sampling_seed", 0), "sampling_seed", 0),
        skip_special_tokens=_flag(value, "skip_special_tokens", default=True),
        no_stop_trim=_flag(value, "no_stop_trim", default=False),
    )


def _options(body: Json) -> dict[str, Any]:
    return {
        "return_logprob": _flag(body, "return_logprob", default=False, kind=BadBody),
        "logprob_start": _at_least(_integer(body, "logprob_start_len", -1, kind=BadBody), "logprob_start_len", -1),
        "top_logprobs": _at_least(_integer(body, "top_logprobs_num", 0, kind=BadBody), "top_logprobs_num", 0),
        "text_in_logprobs": _flag(body, "return_text_in_logprobs", default=False, kind=BadBody),
        "prompt_ids_wanted": _flag(body, "return_prompt_token_ids", default=False, kind=BadBody),
        "stream": _flag(body, "stream", default=False, kind=BadBody),
        "lora_path": _adapter_name(body.get("lora_path")),
    }


def _adapter_name(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadBody(f"lora_path must be the name of one adapter, got {value!r:.40}")
    return value or None


def _check_length(ids: list[int], sampling: SamplingParams, limits: Limits) -> None:
    asked, context = sampling.max_new_tokens, limits.context_length
    if len(ids) >= context:
        raise BadRequest(f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens).")
    if len(ids) + asked > context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of {len(ids) + asked} tokens: "
            f"{len(ids)} tokens from the input messages and {asked} tokens for the completion. "
            "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
        )


def _number(value: Json, key: str, default: float) -> float:
    found = value.get(key)
    if found is None:
        return default
    if type(found) not in (int, float):
        raise BadSampling(f"{key} must be a number, got {found!r:.40}")
    return float(found)


def _integer(value: Json, key: str, default: int, *, kind: type[BadRequest] = BadSampling) -> int:
    found = value.get(key)
    if found is None:
        return default
    if type(found) is not int:
        raise kind(f"{key} must be an integer, got {found!r:.40}")
    return found


def _at_least(value: int, key: str, low: int) -> int:
    if value < low:
        raise BadRequest(f"{key} must be at least {low}, got {value}.")
    return value


def _flag(value: Json, key: str, *, default: bool, kind: type[BadRequest] = BadSampling) -> bool:
    found = value.get(key)
    if found is None:
        return default
    if type(found) is not bool:
        raise kind(f"{key} must be true or false, got {found!r:.40}")
    return found


def _stop(value: Any) -> tuple[str, ...]:
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise BadSampling("stop must be a string or a list of strings, none of them empty")
    if len(strings) > _MOST_STOPS:
        raise BadRequest(f"at most {_MOST_STOPS} stop strings are allowed, got {len(strings)}")
    return tuple(strings)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise BadSampling("stop_token_ids must be a list of integers")
    return value
