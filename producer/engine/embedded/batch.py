"""Continuous batching: the requests that are being decoded, row i in slot i. Requests join and leave between decode steps.

    join(newcomers) ── prefill, next token ──► rows 0 .. n-1 ── step() ──► one token each ──► finished rows leave, the last rows take their slots
                                                              ── retract() ──► all leave as they are, to join again later

Synchronous and owned by one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from producer.engine.embedded.lora_rows import Adapter
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import Request
from producer.engine.embedded.sampling import Rows, Sampled, sample

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
LEFT_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
"""Of a request that waits, for its first slot or for one to go on in: SGLang answers it with less than others."""
_NOT_FINITE = {
    "type": "abort",
    "message": "the model's logits are not finite",
    "status_code": 500,
    "err_type": "InternalServerError",
}


class Batch:
    """Invariant: `tokens` holds the newest token of each row, `positions` the index in its slot where that token's key and value go next."""

    def __init__(self, model: SlotModel, *, seed: int) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(seed)
        self.requests: list[Request] = []
        self._generators: list[torch.Generator | None] = []
        self._tokens = torch.zeros(model.slots, dtype=torch.long)
        self._positions = torch.zeros(model.slots, dtype=torch.long)
        self._longest = 0
        self._rows = Rows((), ())

    @property
    def free(self) -> int:
        return self._model.slots - len(self.requests)

    @property
    def used_tokens(self) -> int:
        return sum(request.length for request in list(self.requests))

    @torch.inference_mode()
    def join(self, newcomers: Sequence[Request], version: str) -> list[Request]:
        """Prefill `newcomers` (at most `free`) and sample their next tokens under `version`: the first, or after a retraction the one behind what they
        have. Returns those that are finished already.
        """
        first, now = len(self.requests), time.time()
        ids, source, adapters = _distinct(newcomers)
        self._model.adapt(adapters)
        hidden = self._model.prefill(first, ids, source)
        lengths = torch.tensor([request.length for request in newcomers])
        logits = self._model.logits(hidden[source, lengths - 1])
        for row, request in enumerate(newcomers):
            request.written_by(version)
            if request.started_at:
                continue
            request.started_at = now
            request.stop_ids = frozenset() if request.sampling.ignore_eos else request.sampling.stop_token_ids | self._model.eos_ids
            if request.return_logprob and request.logprob_start >= 0:
                _read_prompt(request, self._model.logits(hidden[source[row], : len(request.ids)]))
        generators = [_own_generator(request) for request in newcomers]
        sampled = sample(logits, Rows([request.sampling for request in newcomers], generators), self._generator)
        self.requests += newcomers
        self._generators += generators
        self._tokens[first : len(self.requests)] = sampled.tokens
        self._positions[first : len(self.requests)] = lengths
        done = self._append(newcomers, first, sampled)
        now = time.time()
        for request in newcomers:
            request.first_token_at = request.first_token_at or now
        return self._leave(done, changed=True)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """One token for every row. Returns the requests that are finished, which have left."""
        n = len(self.requests)
        self._model.adapt([request.adapter for request in self.requests])
        positions = self._positions[:n]
        logits = self._model.logits(self._model.decode(self._tokens[:n], positions, self._longest))
        sampled = sample(logits, self._rows, self._generator)
        self._tokens[:n] = sampled.tokens
        positions += 1
        self._longest += 1
        return self._leave(self._append(self.requests, 0, sampled), changed=False)

    def mark(self, version: str) -> None:
        """From their next token on, the requests are written by `version`."""
        for request in self.requests:
            request.written_by(version)

    def retract(self) -> list[Request]:
        """Take all out with what they have, in their order. Their keys and values are of no more use."""
        left, self.requests, self._generators = self.requests, [], []
        for request in left:
            request.retractions += 1
        self._prepare()
        return left

    def abort(self, chosen: Callable[[str], bool]) -> list[Request]:
        """End the requests whose id is `chosen` with what they have."""
        rows = [row for row, request in enumerate(self.requests) if chosen(request.rid)]
        for row in rows:
            self.requests[row].finish = dict(ABORTED)
        return self._leave(rows, changed=False)

    def _append(self, requests: Sequence[Request], first: int, sampled: Sampled) -> list[int]:
        """Give each request its token; rows (from `first`) of those that are finished by it."""
        done: list[int] = []
        tokens, chosen = sampled.tokens.tolist(), sampled.chosen.tolist()
        for row, (request, token, logprob) in enumerate(zip(requests, tokens, chosen, strict=True)):
            if not math.isfinite(logprob):
                request.finish = dict(_NOT_FINITE)
                done.append(first + row)
                continue
            if not request.sampling.max_new_tokens:
                request.finish = {"type": "length", "length": 0}
                done.append(first + row)
                continue
            request.output.append(token)
            request.logprobs.append(logprob)
            if request.top_logprobs:
                request.tops.append(_top(sampled.logprobs[row], request.top_logprobs))
            if request.sampling.stop and (matched := self._stop_string(request)) is not None:
                request.finish = {"type": "stop", "matched": matched}
            elif token in request.stop_ids:
                request.finish = {"type": "stop", "matched": token}
            elif len(request.output) >= request.sampling.max_new_tokens:
                request.finish = {"type": "length", "length": len(request.output)}
            else:
                continue
            done.append(first + row)
        return done

    def _stop_string(self, request: Request) -> str | None:
        """A stop string within the newest tokens, as many as the longest takes when the tokenizer writes it, and one more. As in SGLang, special tokens count
        as what they are called, and what was sampled in smaller pieces than that may be missed.
        """
        tail = self._tail(request)
        return next((text for text in request.sampling.stop if text in tail), None)

    def _tail(self, request: Request) -> str:
        tail: str = self._model.tokenizer.decode(request.output[-request.sampling.stop_tokens - 1 :], skip_special_tokens=False)
        return tail

    def streamed(self) -> list[tuple[Request, int]]:
        """The requests that are read while they are written, each with how many of its tokens may be shown: none that a stop string may begin with."""
        streams = [request for request in self.requests if request.stream]
        for request in streams:
            if not request.sampling.stop or not self._may_stop(request):
                request.shown = len(request.output)
        return [(request, request.shown) for request in streams]

    def _may_stop(self, request: Request) -> bool:
        tail = self._tail(request)
        return any(tail.endswith(stop[:length]) for stop in request.sampling.stop for length in range(1, len(stop) + 1))

    def _leave(self, rows: list[int], *, changed: bool) -> list[Request]:
        """Take `rows` (ascending) out; rows from the end fill the holes."""
        if not rows:
            if changed:
                self._prepare()
            return []
        left = [self.requests[row] for row in rows]
        for row, request in zip(rows, left, strict=True):
            if request.finish == _NOT_FINITE:
                self._model.cache.scrub(row)
        n, kept = len(self.requests), len(self.requests) - len(rows)
        gone = set(rows)
        holes = [row for row in rows if row < kept]
        tail = [row for row in range(kept, n) if row not in gone]
        if holes:
            source, target = torch.tensor(tail), torch.tensor(holes)
            self._model.cache.move(source, target, self._longest_of(tail))
            self._tokens[target] = self._tokens[source]
            self._positions[target] = self._positions[source]
            for here, there in zip(tail, holes, strict=True):
                self.requests[there], self._generators[there] = self.requests[here], self._generators[here]
        del self.requests[kept:], self._generators[kept:]
        self._prepare()
        return left

    def _longest_of(self, rows: list[int]) -> int:
        return max(self.requests[row].length for row in rows)

    def _prepare(self) -> None:
        self._longest = self._longest_of(list(range(len(self.requests)))) if self.requests else 0
        self._rows = Rows([request.sampling for request in self.requests], self._generators)


def _distinct(newcomers: Sequence[Request]) -> tuple[Tensor, Tensor, list[Adapter | None]]:
    """The distinct contexts, right-padded, for each newcomer the row of its own, and the adapter of each row: siblings of a group are computed once."""
    seen: dict[tuple[Adapter | None, tuple[int, ...]], int] = {}
    source: list[int] = []
    for request in newcomers:
        key = request.adapter, tuple(request.context)
        if key in seen and not request.started_at:
            request.shared_prompt = len(key[1]) - 1
        source.append(seen.setdefault(key, len(seen)))
    width = max(len(prompt) for _, prompt in seen)
    ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for _, prompt in seen])
    return ids, torch.tensor(source), [adapter for adapter, _ in seen]


def _own_generator(request: Request) -> torch.Generator | None:
    seed = request.sampling.sampling_seed
    if seed is not None and request.noise is None:
        request.noise = torch.Generator().manual_seed(seed)
    own: torch.Generator | None = request.noise
    return own


def _top(logprobs: Tensor, count: int) -> list[tuple[float, int]]:
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return list(zip(values.tolist(), ids.tolist(), strict=True))


def _read_prompt(request: Request, logits: Tensor) -> None:
    """Logprobs of the prompt from `logprob_start` on; the first has none. They are at temperature 1.

    Shapes: logits [P, V].
    """
    start = request.logprob_start
    if start >= len(request.ids):
        return
    logprobs = torch.log_softmax(logits[start:-1], dim=-1)
    following = request.ids[start + 1 :]
    chosen = logprobs.gather(1, torch.tensor(following, dtype=torch.long)[:, None])[:, 0].tolist()
    request.input_logprobs = [(None, request.ids[start]), *zip(chosen, following, strict=True)]
    if request.top_logprobs:
        request.input_tops = [None, *(_top(row, request.top_logprobs) for row in logprobs)]
