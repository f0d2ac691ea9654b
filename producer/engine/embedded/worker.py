"""The thread that owns the model: it admits, decodes, and obeys commands between two decode steps.

consumes: requests and commands from one inbox; produces: finished requests, delivered to the event loop once a step, not once a token
waits for: the inbox, when there is nothing to decode or generation is paused

    RUNNING ── pause(abort): all requests end as aborted ──► PAUSED ── continue ──► RUNNING
            ── pause(in_place): requests keep their slots ─►

Requests that arrive while paused wait in the queue. An update that comes without a pause lets the running requests finish first and admits none meanwhile, as
SGLang does.

A probe (`Request.probe`) waits at the head of the queue for the next slot: until it is answered a finished update is not acked, and the engine is routed as
the version it no longer serves. SGLang has no such rule. There a probe is an ordinary request, first come, first served; with `--enable-priority-scheduling` a
request with a `priority` goes first, and without it that key is ignored. Its own health checks (ids that begin with HEALTH_CHECK) generate nothing while it is
busy, so the id of a probe must not begin so.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from producer.engine.embedded import weights
from producer.engine.embedded.batch import ABORTED, Batch
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import Request
from protocol.errors import RollstreamError

_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or finish them, then call /flush_cache."
)
_ADMIT_WAIT_STEPS = 3
"""Newcomers that would be a small prefill wait this many decode steps at most for company: a prefill costs as much as a decode step."""


class EngineFault(RollstreamError):
    """The engine's own thread ended; nothing can be generated any more."""


@dataclass(slots=True)
class Counters:
    """Written by the worker's thread, read by any: single numbers, each right by itself."""

    running: int = 0
    queued: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    updates: int = 0
    load_s: float = 0.0
    """Seconds the newest weights took to copy."""
    decode_steps: int = 0
    prefills: int = 0


@dataclass(frozen=True, slots=True)
class _Command:
    act: Callable[[], Any]
    reply: asyncio.Future[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    staged: weights.Staged
    version: str | None
    flush: bool
    abort_all: bool
    reply: asyncio.Future[Any]


class Worker:
    """Start it with `start(loop)`, end it with `stop()`. Every other method is called from the event loop.

    Invariant: only the thread touches model, batch and queue.
    """

    def __init__(self, model: SlotModel, *, version: str, seed: int, deliver: Callable[[list[Request]], None], on_failure: Callable[[], None]) -> None:
        self.model = model
        self.version = version
        """What the next token is written by."""
        self.counters = Counters()
        self.paused = False
        self.failure: BaseException | None = None
        self._deliver, self._on_failure = deliver, on_failure
        self._replies: set[asyncio.Future[Any]] = set()
        self._batch = Batch(model, seed=seed)
        self._waiting: deque[Request] = deque()
        self._waited_steps = 0
        self._updates: deque[_Update] = deque()
        self._inbox: queue.SimpleQueue[Sequence[Request] | _Command | _Update | None] = queue.SimpleQueue()
        self._paused_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine:decode", daemon=True)

    # -- from the event loop -------------------------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; what was not finished stays unfinished."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, requests: Sequence[Request]) -> None:
        self._inbox.put(requests)

    async def pause(self, mode: str) -> None:
        """Returns once no token is being computed. `mode`: abort or in_place."""
        await self._command(lambda: self._do_pause(mode))

    async def resume(self) -> None:
        await self._command(self._do_resume)

    async def abort(self, rids: str | None) -> None:
        """End requests whose id starts with `rids`; None: all."""
        await self._command(lambda: self._do_abort(lambda rid: rids is None or rid.startswith(rids)))

    def cancel(self, rids: Sequence[str]) -> None:
        """As `abort` for exactly these ids, and nobody waits for it."""
        gone = frozenset(rids)
        self._inbox.put(_Command(lambda: self._do_abort(lambda rid: rid in gone), None))

    @property
    def used_tokens(self) -> int:
        """Tokens in the KV cache, by the last finished step."""
        return self._batch.used_tokens

    async def flush(self) -> bool:
        """Forget the cache; False when requests are running or queued."""
        flushed: bool = await self._command(self._do_flush)
        return flushed

    async def update(self, staged: weights.Staged, version: str | None, *, flush: bool, abort_all: bool) -> str | None:
        """Put new weights in. Returns what went wrong, or None. Without a pause it waits for the running requests."""
        reply = self._reply()
        self._inbox.put(_Update(staged=staged, version=version, flush=flush, abort_all=abort_all, reply=reply))
        problem: str | None = await reply
        return problem

    async def _command(self, act: Callable[[], Any]) -> Any:
        reply = self._reply()
        self._inbox.put(_Command(act, reply))
        return await reply

    def _reply(self) -> asyncio.Future[Any]:
        if self.failure is not None:
            raise EngineFault(f"the engine's decoding thread ended: {self.failure}")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)
        return reply

    def _fail(self) -> None:
        """On the loop, after the thread ended by itself: nobody waits for it in vain."""
        for reply in list(self._replies):
            if not reply.done():
                reply.set_exception(EngineFault(f"the engine's decoding thread ended: {self.failure}"))
        self._on_failure()

    # -- the thread ----------------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._read_inbox():
                self._update_if_possible()
                if not self.paused:
                    self._work()
        except BaseException as problem:  # noqa: BLE001 - a dead worker must be noticed by the loop, whatever killed it
            self.failure = problem
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail)

    def _read_inbox(self) -> bool:
        """Take all that is there; block for one item if there is nothing else to do. False: stop."""
        block = self.paused or not (self._waiting or self._batch.requests)
        if block and self._updates:
            block = False
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, _Command):
                value = item.act()
                if item.reply is not None:
                    self._answer(item.reply, value)
            elif isinstance(item, _Update):
                self._updates.append(item)
                if item.abort_all:
                    self._do_abort(_every)
            else:
                for request in item:
                    if request.probe:
                        self._waiting.appendleft(request)
                    else:
                        self._waiting.append(request)
                self.counters.queued = len(self._waiting)

    def _work(self) -> None:
        started = time.perf_counter()
        finished: list[Request] = []
        if self._admissible():
            count = min(len(self._waiting), self._batch.free)
            newcomers = [self._waiting.popleft() for _ in range(count)]
            finished += self._batch.join(newcomers, self.version)
            self._waited_steps = 0
            self.counters.prefills += 1
            self.counters.prompt_tokens += sum(len(request.ids) for request in newcomers)
            self.counters.generated_tokens += count
        if self._batch.requests:
            self.counters.generated_tokens += len(self._batch.requests)
            self.counters.decode_steps += 1
            self._waited_steps += 1
            finished += self._batch.step()
        self._finish(finished)
        self.counters.busy_s += time.perf_counter() - started

    def _admissible(self) -> bool:
        waiting, running = len(self._waiting), len(self._batch.requests)
        if not waiting or self._updates or not self._batch.free:
            return False
        return not running or waiting * 4 >= running or self._waited_steps >= _ADMIT_WAIT_STEPS

    def _finish(self, finished: list[Request]) -> None:
        counters = self.counters
        counters.running, counters.queued = len(self._batch.requests), len(self._waiting)
        if not finished:
            return
        counters.requests += len(finished)
        now, tokenizer = time.time(), self.model.tokenizer
        for request in finished:
            request.finished_at, request.version = now, self.version
            assert request.finish is not None
            if request.finish["type"] == "abort":
                counters.aborted += 1
            request.text = _text(request, tokenizer)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, finished)

    def _update_if_possible(self) -> None:
        if not self._updates or (self._batch.requests and not self.paused):
            return
        update = self._updates.popleft()
        started = time.perf_counter()
        weights.apply(self.model.model, update.staged)
        self.model.path = update.staged.path
        if update.version is not None:
            self.version = update.version
            self._batch.mark(update.version)
        self.counters.load_s = time.perf_counter() - started
        self.counters.updates += 1
        self._answer(update.reply, _NOT_FLUSHED if update.flush and not self._do_flush() else None)

    def _do_pause(self, mode: str) -> None:
        if mode == "abort":
            self._do_abort(_every)
        if not self.paused:
            self.paused, self._paused_at = True, time.perf_counter()

    def _do_resume(self) -> None:
        if self.paused:
            self.paused = False
            self.counters.paused_s += time.perf_counter() - self._paused_at

    def _do_abort(self, chosen: Callable[[str], bool]) -> None:
        finished = self._batch.abort(chosen)
        kept: deque[Request] = deque()
        for request in self._waiting:
            if chosen(request.rid):
                request.finish = dict(ABORTED)
                finished.append(request)
            else:
                kept.append(request)
        self._waiting = kept
        self._finish(finished)

    def _do_flush(self) -> bool:
        if self._batch.requests:
            return False
        self.model.cache.clear()
        return True

    def _answer(self, reply: asyncio.Future[Any], value: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(_resolve, reply, value)


def _every(_: str) -> bool:
    return True


def _resolve(reply: asyncio.Future[Any], value: Any) -> None:
    if not reply.done():
        reply.set_result(value)


def _text(request: Request, tokenizer: Any) -> str:
    """The response as text; what ended it is not part of it, unless asked for."""
    output, sampling = request.output, request.sampling
    matched = request.finish.get("matched") if request.finish is not None else None
    trim = not sampling.no_stop_trim
    if trim and isinstance(matched, int):
        output = output[:-1]
    text: str = tokenizer.decode(output, skip_special_tokens=sampling.skip_special_tokens) if output else ""
    if trim and isinstance(matched, str) and (at := text.find(matched)) >= 0:
        return text[:at]
    return text
