"""The embedded engine's HTTP server: SGLang's native subset over one `Worker`.

    async with EmbeddedEngine(load(path, slots=256, max_length=128), weight_version="boot:…", host="127.0.0.1", port=0, seed=7) as engine:
        engine.url

Errors of a request have SGLang's shapes, mostly `{"error": {"message": …}}`, with status 400; answers of control calls have its fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Self

from aiohttp import web

from producer.engine.embedded.adapter_routes import AdapterRoutes
from producer.engine.embedded.adapters import Adapters
from producer.engine.embedded.answer import answer
from producer.engine.embedded.auth import guard
from producer.engine.embedded.control_routes import ControlRoutes
from producer.engine.embedded.http import Routes, error, parsed, reply, with_errors, without_route
from producer.engine.embedded.lora_rows import LoraLimits
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import BadBody, BadRequest, Limits, Request, parse
from producer.engine.embedded.status_routes import Settings, StatusRoutes
from producer.engine.embedded.stream import DONE, Events, error_event
from producer.engine.embedded.updates import Updates
from producer.engine.embedded.weight_routes import WeightRoutes
from producer.engine.embedded.worker import Counters, Worker
from producer.engine.hosted import EngineFault
from protocol.errors import ConfigError

_MAX_BODY_BYTES = 256 << 20
_HEALTH_S = 20.0
_CLOSE_S = 1.0


class _QueueFull(Exception):
    """As many requests wait as may."""


class _Call:
    """One HTTP call and the requests it waits for. `events`: those of a stream, by request."""

    __slots__ = ("done", "events", "left", "news")

    def __init__(self, count: int, events: dict[Request, Events] | None = None) -> None:
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = events or {}
        self.news = asyncio.Event()

    def finished(self, request: Request) -> None:
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)
        if (events := self.events.get(request)) is not None:
            events.over()
            self.news.set()


class EmbeddedEngine:
    """Serves `model` while the context is open.

    `api_key`, if any, must be borne by whoever asks for more than health and metrics, and `admin_key` instead of it by whoever pauses or changes weights. The
    peers of a process group, and a bucket that is to come through one, are waited for `group_timeout_s`. Streams are cumulative, or `incremental`. For
    benchmarks and tests: with `pace_s` a decode step begins every so many seconds at most, and weights take `apply_delay_factor` times as long to load.

    Raises: `ConfigError` on entering when the address is taken.
    """

    def __init__(
        self,
        model: SlotModel,
        *,
        weight_version: str = "default",
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        max_queued: int = 8192,
        api_key: str = "",
        admin_key: str = "",
        incremental: bool = False,
        group_timeout_s: float = 30.0,
        pace_s: float = 0.0,
        apply_delay_factor: float = 1.0,
        lora: LoraLimits | None = None,
    ) -> None:
        self._worker = Worker(
            model,
            version=weight_version,
            seed=seed,
            deliver=self._deliver,
            progress=self._progress,
            on_failure=self._fail,
            pace_s=pace_s,
            apply_delay_factor=apply_delay_factor,
        )
        self._updates = Updates(self._worker, model, version=weight_version, group_timeout_s=group_timeout_s, apply_delay_factor=apply_delay_factor)
        self._model, self._adapters = model, Adapters(model, lora)
        self._limits = Limits(context_length=model.max_length, vocabulary=model.geometry.vocabulary, tokenizer=model.tokenizer)
        self._host, self._port, self._max_queued, self._incremental = host, port, max_queued, incremental
        self._keys = (api_key, admin_key)
        self._control, self._changes = ControlRoutes(self._worker, self), WeightRoutes(self._updates)
        self._adapter_routes = AdapterRoutes(self._adapters, model)
        self._status = StatusRoutes(self._worker, model, self._updates, Settings(host=host, seed=seed, max_queued=max_queued, lora=lora))
        self._live: dict[str, Request] = {}
        self._inside: set[Request] = set()
        """Those of them that were let in: they decode, or wait for a slot."""
        self._failed = asyncio.Event()
        self._idle, self._door = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._door.set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        admin_paths = frozenset(self._control.posts() | self._changes.posts() | self._adapter_routes.posts())
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[guard(*self._keys, admin_paths), without_route])
        self._route(app)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, backlog=1024).start()
        except OSError as problem:
            await runner.cleanup()
            raise ConfigError(
                f"engine.port: cannot listen on {self._host}:{self._port} ({problem.strerror or problem}); "
                "end the process that has it, choose another engine.port, or use 0 for a free one"
            ) from problem
        self._runner = runner
        port = runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}"
        self._worker.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._worker.failure is None:
            await self._worker.abort(None)
        await self._updates.close()
        await self._adapters.close()
        self._worker.stop()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def counters(self) -> Counters:
        return self._worker.counters

    @property
    def idle(self) -> bool:
        """No request is running or waiting."""
        return not self._live

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, by the last finished step."""
        return self._worker.used_tokens / (self._model.slots * self._model.max_length)

    async def until_idle(self) -> None:
        await self._idle.wait()

    def shut(self) -> None:
        """Requests that come from here on wait outside."""
        self._door.clear()

    def open(self) -> None:
        self._door.set()

    def knows(self, rid: str) -> bool:
        return rid in self._live

    async def failed(self) -> None:
        """Never returns. Raises: `EngineFault` when the decoding thread ends by itself."""
        await self._failed.wait()
        raise EngineFault("the engine's decoding thread ended") from self._worker.failure

    def _route(self, app: web.Application) -> None:
        control, changes, adapters = self._control, self._changes, self._adapter_routes
        gets: Routes = {"/health_generate": self._health_generate} | self._status.gets() | control.gets() | changes.gets() | adapters.gets()
        for path, handler in gets.items():
            app.router.add_get(path, with_errors(handler))
        posts: Routes = {"/generate": self._generate} | control.posts() | changes.posts() | adapters.posts()
        for path, handler in posts.items():
            app.router.add_post(path, with_errors(handler))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        received, body = time.time(), parsed(await http.read())
        try:
            requests, listed = parse(body, self._limits)
        except BadRequest as problem:
            if isinstance(problem, BadBody) or body.get("stream") is not True:
                raise
            return await _streamed(http, _only(error_event(str(problem), 400)))
        if requests[0].stream:
            return await _streamed(http, self._events(requests, received, listed=listed))
        try:
            await self._run(requests, received)
        except _QueueFull as problem:
            return error(str(problem), 503)
        failed = next((r.finish for r in requests if r.finish is not None and r.finish.get("status_code")), None)
        if failed is not None:
            return error(str(failed["message"]), int(failed["status_code"]))
        answers = [answer(request, self._model.tokenizer) for request in requests]
        return reply(answers if listed else answers[0])

    async def _run(self, requests: list[Request], received: float) -> None:
        """Returns when all are finished."""
        async with self._under_way(requests, _Call(len(requests)), received) as call:
            await call.done

    async def _events(self, requests: list[Request], received: float, *, listed: bool) -> AsyncIterator[bytes]:
        """The stream of one call, but for its end."""
        tokenizer, incremental = self._model.tokenizer, self._incremental
        events = [Events(request, tokenizer, incremental=incremental, index=i if listed else None) for i, request in enumerate(requests)]
        try:
            async with self._under_way(requests, _Call(len(requests), dict(zip(requests, events, strict=True))), received) as call:
                while events:
                    await call.news.wait()
                    call.news.clear()
                    for one in events:
                        if (piece := one.next()) is not None:
                            yield piece
                    events = [one for one in events if not one.ended]
        except BadRequest as problem:
            yield error_event(str(problem), 400)
        except _QueueFull as problem:
            yield error_event(str(problem), 503)
        except EngineFault as problem:
            yield error_event(str(problem), 500)

    @contextlib.asynccontextmanager
    async def _under_way(self, requests: list[Request], call: _Call, received: float) -> AsyncIterator[_Call]:
        """They are let in, and decoded. What is not finished on leaving is aborted: its caller went away.

        Raises: `BadRequest`, `_QueueFull`, `EngineFault`.
        """
        taken: list[Request] = []
        try:
            for request in requests:
                if request.rid in self._live:
                    raise BadRequest(f"Duplicate request ID detected: {request.rid}")
                self._live[request.rid] = request
                taken.append(request)
                request.call, request.received_at = call, received
            self._idle.clear()
            await self._adapters.acquire(requests)
            while not self._door.is_set():
                await self._door.wait()
            self._let_in(requests)
            yield call
        finally:
            if left := [request.rid for request in taken if request.finish is None]:
                self._worker.cancel(left)
            self._inside.difference_update(taken)
            self._adapters.release(taken)
            for request in taken:
                del self._live[request.rid]
            if not self._live:
                self._idle.set()

    def _let_in(self, requests: list[Request]) -> None:
        if self._worker.failure is not None:
            raise EngineFault(self._fault())
        if len(self._inside) + len(requests) > self._max_queued + self._model.slots and not all(request.probe for request in requests):
            raise _QueueFull("The request queue is full.")
        self._inside.update(requests)
        now = time.time()
        for request in requests:
            request.queued_at = now
        self._worker.submit(requests)

    def _deliver(self, finished: list[Request]) -> None:
        for request in finished:
            call: _Call = request.call
            call.finished(request)

    def _progress(self, streamed: list[tuple[Request, int]]) -> None:
        for request, shown in streamed:
            call: _Call = request.call
            call.events[request].reached(shown, self._updates.version)
            call.news.set()

    def _fail(self) -> None:
        self._failed.set()
        self._door.set()
        now = time.time()
        for request in self._live.values():
            request.finish = {"type": "abort", "message": self._fault(), "status_code": 500, "err_type": "InternalServerError"}
            request.finished_at = now
            call: _Call = request.call
            call.finished(request)

    def _fault(self) -> str:
        return f"the engine's decoding thread ended: {self._worker.failure}"

    async def _health_generate(self, _: web.Request) -> web.Response:
        """Generates one token; 503 when none came in time, as while paused."""
        probe, _listed = parse(
            {"input_ids": [0], "rid": f"HEALTH_CHECK_{time.time()}", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, self._limits
        )
        try:
            async with asyncio.timeout(_HEALTH_S):
                await self._run(probe, time.time())
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200 if self._worker.failure is None else 503)


async def _streamed(http: web.Request, pieces: AsyncIterator[bytes]) -> web.StreamResponse:
    """Send `pieces` as they come, and the mark of the end. A reader that goes away ends them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(http)
    with contextlib.suppress(ConnectionResetError):
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]  # both are generators
            async for piece in pieces:
                await response.write(piece)
        await response.write(DONE)
    return response


async def _only(piece: bytes) -> AsyncIterator[bytes]:
    yield piece
