"""Finished requests as `/generate` answers them: SGLang's fields, in SGLang's order."""

from __future__ import annotations

import time
from typing import Any

from tokenizers import Tokenizer

from producer.engine.embedded.request import Request


def answer(request: Request, tokenizer: Tokenizer) -> dict[str, Any]:
    """One response. Timings are Unix seconds or seconds."""
    finished, first = request.finished_at, request.first_token_at
    generated = len(request.output)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.ids),
        "weight_version": request.version,
        "num_retractions": request.retractions,
        "storage_prefetch_wait": 0.0,
        "storage_staging_wait": 0.0,
        "forward_entry_time": request.started_at or None,
        "prefill_finished_time": first or None,
        "queue_time": max(0.0, (request.started_at or finished) - request.queued_at),
    }
    if request.return_logprob:
        _logprobs(meta, request, tokenizer)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": generated,
        "cached_tokens": request.shared_prompt,
        "weight_versions": spans(request),
        "cached_tokens_details": {"device": request.shared_prompt, "host": 0} if request.shared_prompt else None,
        "dp_rank": None,
        "e2e_latency": finished - request.received_at,
        "request_received_ts": request.received_at,
        "first_token_latency": max(0.0, (first or finished) - request.received_at),
        "api_server_dispatch_finish_ts": request.queued_at,
        "request_finished_ts": finished,
        "decode_throughput": generated / max(finished - (first or finished), 1e-6) if generated > 1 else 0.0,
        "response_sent_to_client_ts": time.time(),
    }
    body = {"text": request.text, "output_ids": request.output, "meta_info": meta}
    if request.prompt_ids_wanted:
        body["prompt_token_ids"] = request.ids
    return body


def spans(request: Request) -> list[dict[str, Any]]:
    """Which version wrote which tokens: contiguous from 0, none empty."""
    starts = [start for start, _ in request.breaks] + [len(request.output)]
    return [{"version": version, "start": start, "end": starts[i + 1]} for i, (start, version) in enumerate(request.breaks) if starts[i + 1] > start]


def _logprobs(meta: dict[str, Any], request: Request, tokenizer: Tokenizer) -> None:
    def entry(logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, tokenizer.decode([token], skip_special_tokens=False) if request.text_in_logprobs else None]

    meta["input_token_logprobs"] = [entry(logprob, token) for logprob, token in request.input_logprobs]
    meta["output_token_logprobs"] = [entry(logprob, token) for logprob, token in zip(request.logprobs, request.output, strict=True)]
    meta["output_token_logprobs_length"] = len(request.output)
    if request.top_logprobs:
        meta["input_top_logprobs"] = [None if tops is None else [entry(*top) for top in tops] for tops in request.input_tops]
        meta["output_top_logprobs"] = [[entry(*top) for top in tops] for tops in request.tops]
