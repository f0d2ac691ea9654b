"""Requests as `/generate` answers them, whole or as the events of a stream: SGLang's fields, in SGLang's order."""

from __future__ import annotations

import time
from typing import Any

from tokenizers import Tokenizer

from producer.engine.embedded.batch import LEFT_WAITING
from producer.engine.embedded.request import Request


def answer(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """One finished response. Timings are Unix seconds or seconds."""
    return _body(request, request.text, request.output, _last_meta(request, tokenizer, 0))


def last_event(request: Request, tokenizer: Tokenizer, text: str, start: int) -> dict[str, Any]:
    """The event that ends a stream: tokens and their logprobs from `start` on, and all that is said of the whole response."""
    return _body(request, text, request.output[start:], _last_meta(request, tokenizer, start))


def event(request: Request, tokenizer: Tokenizer, text: str, *, start: int, end: int, version: str) -> dict[str, Any]:
    """An event before the last one: tokens `start` to `end`. `version`: what the engine says that it serves."""
    meta = _head(request, version, finish=None)
    if request.return_logprob:
        _logprobs(meta, request, tokenizer, start, end)
    meta |= {"reasoning_tokens": 0, "completion_tokens": end, "cached_tokens": request.shared_prompt}
    meta |= {"cached_tokens_details": _cached(request), "dp_rank": None}
    return _body(request, text, request.output[start:end], meta)


def spans(request: Request) -> list[dict[str, Any]]:
    """Which version wrote which tokens: contiguous from 0, none empty, but for the one of a response without a token."""
    written = len(request.output)
    if not written:
        return [{"version": request.version, "start": 0, "end": 0}]
    starts = [start for start, _ in request.breaks] + [written]
    return [{"version": version, "start": start, "end": starts[i + 1]} for i, (start, version) in enumerate(request.breaks) if starts[i + 1] > start]


def _body(request: Request, text: str, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
    body = {"text": text, "output_ids": ids, "meta_info": meta}
    if request.prompt_ids_wanted:
        body["prompt_token_ids"] = request.ids
    return body


def _head(request: Request, version: str, *, finish: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.ids),
        "weight_version": version,
        "num_retractions": request.retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": request.started_at or None,
        "prefill_finished_time": request.first_token_at or None,
        "queue_time": max(0.0, (request.started_at or request.finished_at) - request.queued_at),
    }


def _last_meta(request: Request, tokenizer: Tokenizer, start: int) -> dict[str, Any]:
    if request.finish == LEFT_WAITING:
        return _left_waiting(request, tokenizer, start)
    finished, first, generated = request.finished_at, request.first_token_at, len(request.output)
    meta = _head(request, request.version, finish=request.finish)
    if request.return_logprob:
        _logprobs(meta, request, tokenizer, start, generated)
    return meta | {
        "reasoning_tokens": 0,
        "completion_tokens": generated,
        "cached_tokens": request.shared_prompt,
        "weight_versions": spans(request),
        "cached_tokens_details": _cached(request),
        "dp_rank": None,
        "e2e_latency": finished - request.received_at,
        "request_received_ts": request.received_at,
        "first_token_latency": max(0.0, (first or finished) - request.received_at),
        "api_server_dispatch_finish_ts": request.queued_at,
        "request_finished_ts": finished,
        "decode_throughput": generated / max(finished - (first or finished), 1e-6) if generated > 1 else 0.0,
        "response_sent_to_client_ts": time.time(),
    }


def _left_waiting(request: Request, tokenizer: Tokenizer, start: int) -> dict[str, Any]:
    """What SGLang still knows of a request that was aborted while it waited for a slot, be it for its first or to go on after a retraction."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "weight_version": request.version,
        "e2e_latency": request.finished_at - request.received_at,
        "weight_versions": spans(request),
    }
    if request.return_logprob:
        _logprobs(meta, request, tokenizer, start, len(request.output))
    return meta | {"completion_tokens": len(request.output), "response_sent_to_client_ts": time.time()}


def _cached(request: Request) -> dict[str, int] | None:
    return {"device": request.shared_prompt, "host": 0} if request.shared_prompt else None


def _logprobs(meta: dict[str, Any], request: Request, tokenizer: Tokenizer, start: int, end: int) -> None:
    """Those of the prompt whole, of the output from `start` to `end`; the length is that of the output so far."""

    def entry(logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, tokenizer.decode([token], skip_special_tokens=False) if request.text_in_logprobs else None]

    written = zip(request.logprobs[start:end], request.output[start:end], strict=True)
    meta["input_token_logprobs"] = [entry(logprob, token) for logprob, token in request.input_logprobs]
    meta["output_token_logprobs"] = [entry(logprob, token) for logprob, token in written]
    meta["output_token_logprobs_length"] = end
    if request.top_logprobs:
        meta["input_top_logprobs"] = [None if tops is None else [entry(*top) for top in tops] for tops in request.input_tops]
        meta["output_top_logprobs"] = [[entry(*top) for top in tops] for tops in request.tops[start:end]]
