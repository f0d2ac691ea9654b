"""The thread that owns the model: it admits, decodes, and obeys commands between two decode steps.

consumes: requests and commands from one inbox; produces: finished requests and the progress of those that are streamed, once a step, not once a token
waits for: the inbox, when there is nothing to decode or generation is paused

    RUNNING ── pause(abort): all requests end as aborted ──► PAUSED ── continue ──► RUNNING
            ── pause(in_place): requests keep their slots ─►
            ── pause(retract): requests wait, first in the queue, and are computed anew from prompt and output ─►

Requests that arrive while paused wait in the queue. An update that comes without a pause lets the running requests finish first and admits none meanwhile, as
SGLang does. A pause may follow another: retract after in_place takes the slots back.

With a token clock (`pace_s`) a decode step begins every `pace_s` seconds at most, so that engines that share a CPU go on at rates of their own; commands are
obeyed between the steps as ever.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from producer.engine.embedded import weights
from producer.engine.embedded.batch import LEFT_WAITING, Batch
from producer.engine.embedded.memory import Memory
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import Request
from producer.engine.embedded.text import whole_text
from producer.engine.hosted import EngineFault
from protocol.priority import give_way

_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or finish them, then call /flush_cache."
)
_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill, or one request: many long contexts at once, as after a retraction, would keep commands waiting for seconds."""
_ADMIT_WAIT_STEPS = 3
"""Newcomers that would be a small prefill wait this many decode steps at most for company: a prefill costs as much as a decode step."""


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
    load_source: str = "disk"
    retracted: int = 0
    """Requests that wait to be computed anew."""
    decode_steps: int = 0
    prefills: int = 0


@dataclass(frozen=True, slots=True)
class _Command:
    act: Callable[[], Any]
    reply: asyncio.Future[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    staged: weights.Staged | None
    """None: nothing is changed; its moment is what was waited for."""
    version: str | None
    flush: bool
    abort_all: bool
    reply: asyncio.Future[Any]


class Worker:
    """Start it with `start(loop)`, end it with `stop()`. Every other method is called from the event loop.

    Invariant: only the thread touches model, batch and queue. While no update is under way, parameters may be read by any thread.

    `pace_s` (0: as fast as it can) and `apply_delay_factor` (weights take so many times as long to apply) are for benchmarks and tests.
    """

    def __init__(
        self,
        model: SlotModel,
        *,
        version: str,
        seed: int,
        deliver: Callable[[list[Request]], None],
        progress: Callable[[list[tuple[Request, int]]], None],
        on_failure: Callable[[], None],
        pace_s: float = 0.0,
        apply_delay_factor: float = 1.0,
    ) -> None:
        self.model = model
        self.memory = Memory(model)
        self.version = version
        """What the next token is written by."""
        self.counters = Counters()
        self.paused = False
        self.failure: BaseException | None = None
        self._deliver, self._progress, self._on_failure = deliver, progress, on_failure
        self._pace_s, self._apply_delay_factor = pace_s, apply_delay_factor
        self._next_step = 0.0
        self._replies: set[asyncio.Future[Any]] = set()
        self._batch = Batch(model, seed=seed)
        self._waiting: deque[Request] = deque()
        self._waited_steps = 0
        self._updates: deque[_Update] = deque()
        self._inbox: queue.SimpleQueue[Sequence[Request] | _Command | _Update | None] = queue.SimpleQueue()
        self._paused_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine:decode", daemon=True)

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
        """Returns once no token is being computed. `mode`: abort, retract or in_place."""
        await self._command(lambda: self._do_pause(mode))

    async def resume(self) -> None:
        await self._command(self._do_resume)

    async def abort(self, rids: str | None) -> None:
        """End requests whose id starts with `rids`; None: all."""
        await self._command(lambda: self._do_abort(_every if rids is None else lambda rid: rid.startswith(rids)))

    def cancel(self, rids: Sequence[str]) -> None:
        """As `abort` for exactly these ids, and nobody waits for it."""
        gone = frozenset(rids)
        self._inbox.put(_Command(lambda: self._do_abort(lambda rid: rid in gone), None))

    @property
    def used_tokens(self) -> int:
        """Tokens in the KV cache, by the last finished step."""
        return self._batch.used_tokens

    async def flush(self) -> bool:
        """Forget the cache; False when requests are running, or wait and could run."""
        flushed: bool = await self._command(lambda: (self.paused or not self._waiting) and self._do_flush())
        return flushed

    async def release_memory(self, tags: Collection[str]) -> str | None:
        """Give memory back while paused; what went wrong, or None. Requests that were being decoded must have been retracted or aborted."""
        problem: str | None = await self._command(lambda: self._do_release(tags))
        return problem

    async def resume_memory(self, tags: Collection[str]) -> str | None:
        problem: str | None = await self._command(lambda: self.memory.resume(tags))
        return problem

    async def flush_after_update(self) -> str | None:
        """Forget the cache after weights were taken in; what went wrong, or None."""
        return None if await self._command(self._do_flush) else _NOT_FLUSHED

    async def update(self, staged: weights.Staged, version: str | None, *, flush: bool, abort_all: bool) -> str | None:
        """Put new weights in. Returns what went wrong, or None. Without a pause it waits for the running requests."""
        reply = self._reply()
        self._inbox.put(_Update(staged=staged, version=version, flush=flush, abort_all=abort_all, reply=reply))
        problem: str | None = await reply
        return problem

    async def quiet(self) -> None:
        """Return when nothing is computed: while paused at once, else when the running requests are over; those that wait stay where they are until then."""
        reply = self._reply()
        self._inbox.put(_Update(staged=None, version=None, flush=False, abort_all=False, reply=reply))
        await reply

    async def rename(self, version: str, *, abort_all: bool) -> None:
        """From the next token on, the weights go by `version`."""
        await self._command(lambda: self._do_rename(version, abort_all=abort_all))

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

    def _run(self) -> None:
        try:
            give_way()
            while self._read_inbox():
                self._update_if_possible()
                if not self.paused and self._due():
                    self._work()
        except BaseException as problem:  # noqa: BLE001 - a dead worker must be noticed by the loop, whatever killed it
            self.failure = problem
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._fail)

    def _read_inbox(self) -> bool:
        """Take all that is there; wait for one item while there is nothing else to do. False: stop."""
        wait = self._patience()
        while True:
            try:
                item = self._inbox.get(block=wait != 0, timeout=wait)
            except queue.Empty:
                return True
            wait = 0
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

    def _patience(self) -> float | None:
        """Seconds until there is something to do; None: not before something comes."""
        if self._updates and (self.paused or not self._batch.requests):
            return 0
        if self.paused or not (self._waiting or self._batch.requests):
            return None
        return max(0.0, self._next_step - time.monotonic()) if self._pace_s else 0

    def _due(self) -> bool:
        """Whether the clock allows a step now. One that comes late does not delay the next; those that a pause cost are not made up for."""
        if not self._pace_s or not (self._waiting or self._batch.requests):
            return True
        now = time.monotonic()
        if now < self._next_step:
            return False
        self._next_step = self._pace_s + (self._next_step if now - self._next_step < self._pace_s else now)
        return True

    def _work(self) -> None:
        started = time.perf_counter()
        finished: list[Request] = []
        if self._admissible():
            newcomers = self._newcomers()
            count = len(newcomers)
            self.counters.retracted -= sum(request.retractions > 0 for request in newcomers)
            prefilled = sum(request.length for request in newcomers)
            finished += self._batch.join(newcomers, self.version)
            self._waited_steps = 0
            self.counters.prefills += 1
            self.counters.prompt_tokens += prefilled
            self.counters.generated_tokens += count
        if self._batch.requests:
            self.counters.generated_tokens += len(self._batch.requests)
            self.counters.decode_steps += 1
            self._waited_steps += 1
            finished += self._batch.step()
        if streamed := self._batch.streamed():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._progress, streamed)
        self._finish(finished)
        self.counters.busy_s += time.perf_counter() - started

    def _admissible(self) -> bool:
        waiting, running = len(self._waiting), len(self._batch.requests)
        if not waiting or self._updates or not self._batch.free:
            return False
        return not running or waiting * 4 >= running or self._waited_steps >= _ADMIT_WAIT_STEPS

    def _newcomers(self) -> list[Request]:
        """The first of those that wait, as many as slots and one prefill allow."""
        taken: list[Request] = []
        distinct: set[tuple[int, ...]] = set()
        width = 0
        while self._waiting and len(taken) < self._batch.free:
            candidate = self._waiting[0]
            distinct.add(tuple(candidate.context))
            width = max(width, candidate.length)
            if taken and len(distinct) * width > _PREFILL_TOKENS:
                break
            taken.append(self._waiting.popleft())
        return taken

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
            sampling = request.sampling
            if not request.stream:
                request.text = whole_text(
                    tokenizer,
                    request.ids,
                    request.output,
                    request.finish,
                    skip_special_tokens=sampling.skip_special_tokens,
                    keep_stop=sampling.no_stop_trim,
                )
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, finished)

    def _update_if_possible(self) -> None:
        if not self._updates or (self._batch.requests and not self.paused):
            return
        update = self._updates.popleft()
        if update.staged is None:
            self._answer(update.reply, None)
            return
        started = time.perf_counter()
        weights.apply(self.model.model, update.staged)
        time.sleep((self._apply_delay_factor - 1.0) * (time.perf_counter() - started))
        if update.staged.path:
            self.model.path = update.staged.path
        if update.version is not None:
            self._do_rename(update.version, abort_all=False)
        self.counters.load_s, self.counters.load_source = time.perf_counter() - started, update.staged.source
        self.counters.updates += 1
        self._answer(update.reply, _NOT_FLUSHED if update.flush and not self._do_flush() else None)

    def _do_pause(self, mode: str) -> None:
        if mode == "abort":
            self._do_abort(_every)
        if mode == "retract":
            retracted = self._batch.retract()
            self._waiting.extendleft(reversed(retracted))
            self.counters.retracted += len(retracted)
            self.counters.running, self.counters.queued = 0, len(self._waiting)
        if not self.paused:
            self.paused, self._paused_at = True, time.perf_counter()

    def _do_resume(self) -> None:
        if self.paused:
            self.paused = False
            self.counters.paused_s += time.perf_counter() - self._paused_at

    def _do_rename(self, version: str, *, abort_all: bool) -> None:
        if abort_all:
            self._do_abort(_every)
        self.version = version
        self._batch.mark(version)

    def _do_abort(self, chosen: Callable[[str], bool]) -> None:
        finished = self._batch.abort(chosen)
        kept: deque[Request] = deque()
        for request in self._waiting:
            if chosen(request.rid):
                request.finish = dict(LEFT_WAITING)
                finished.append(request)
                self.counters.retracted -= request.retractions > 0
            else:
                kept.append(request)
        self._waiting = kept
        self._finish(finished)

    def _do_release(self, tags: Collection[str]) -> str | None:
        if self._batch.requests or not self.paused:
            return "memory is released only while generation is paused and nothing is being decoded"
        return self.memory.release(tags)

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
