"""The embedded engine's HTTP server: SGLang's native subset over one `Worker`.

    async with EmbeddedEngine(load(path, slots=256, max_length=128), weight_version="boot:…", host="127.0.0.1", port=0, seed=7) as engine:
        engine.url

Errors of a request have SGLang's shape, `{"error": {"message": …}}` with status 400; answers of control calls have its fields.
"""

from __future__ import annotations

import asyncio
import time
from typing import Self

from aiohttp import web

from producer.engine.embedded.answer import answer
from producer.engine.embedded.auth import guard
from producer.engine.embedded.control_routes import ControlRoutes
from producer.engine.embedded.http import Routes, error, parsed, reply, with_errors
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import BadRequest, Limits, Request, parse
from producer.engine.embedded.status_routes import Settings, StatusRoutes
from producer.engine.embedded.updates import Updates
from producer.engine.embedded.weight_routes import WeightRoutes
from producer.engine.embedded.worker import Counters, EngineFault, Worker
from protocol.errors import ConfigError

_MAX_BODY_BYTES = 256 << 20
_HEALTH_S = 20.0
_CLOSE_S = 1.0


class _Call:
    """One HTTP call and the requests it waits for."""

    __slots__ = ("done", "left")

    def __init__(self, count: int) -> None:
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EmbeddedEngine:
    """Serves `model` while the context is open.

    `api_key`, if any, must be borne by whoever asks for more than health and metrics. The peers of a process group, and a bucket that is to come through one,
    are waited for `group_timeout_s`. For benchmarks and tests: with `pace_s` a decode step begins every so many seconds at most, and weights take
    `apply_delay_factor` times as long to load.

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
        group_timeout_s: float = 30.0,
        pace_s: float = 0.0,
        apply_delay_factor: float = 1.0,
    ) -> None:
        self._worker = Worker(
            model,
            version=weight_version,
            seed=seed,
            deliver=self._deliver,
            on_failure=self._fail,
            pace_s=pace_s,
            apply_delay_factor=apply_delay_factor,
        )
        self._updates = Updates(self._worker, model, version=weight_version, group_timeout_s=group_timeout_s, apply_delay_factor=apply_delay_factor)
        self._model = model
        self._limits = Limits(context_length=model.max_length, vocabulary=model.geometry.vocabulary, tokenizer=model.tokenizer)
        self._host, self._port, self._max_queued, self._api_key = host, port, max_queued, api_key
        self._status = StatusRoutes(self._worker, model, self._updates, Settings(host=host, seed=seed, max_queued=max_queued))
        self._live: dict[str, Request] = {}
        self._failed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[guard(self._api_key)])
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

    async def until_idle(self) -> None:
        await self._idle.wait()

    async def failed(self) -> None:
        """Never returns. Raises: `EngineFault` when the decoding thread ends by itself."""
        await self._failed.wait()
        raise EngineFault("the engine's decoding thread ended") from self._worker.failure

    def _route(self, app: web.Application) -> None:
        control, changes = ControlRoutes(self._worker), WeightRoutes(self._updates)
        gets: Routes = {"/health_generate": self._health_generate} | self._status.gets() | control.gets() | changes.gets()
        for path, handler in gets.items():
            app.router.add_get(path, with_errors(handler))
        posts: Routes = {"/generate": self._generate} | control.posts() | changes.posts()
        for path, handler in posts.items():
            app.router.add_post(path, with_errors(handler))

    async def _generate(self, http: web.Request) -> web.Response:
        received = time.time()
        requests, listed = parse(parsed(await http.read()), self._limits)
        if self._worker.failure is not None:
            return error(self._fault(), 500)
        if len(self._live) + len(requests) > self._max_queued + self._model.slots and not all(request.probe for request in requests):
            return error("The request queue is full.", 503)
        await self._run(requests, received)
        failed = next((r.finish for r in requests if r.finish is not None and r.finish.get("status_code")), None)
        if failed is not None:
            return error(str(failed["message"]), int(failed["status_code"]))
        answers = [answer(request, self._model.tokenizer) for request in requests]
        return reply(answers if listed else answers[0])

    async def _run(self, requests: list[Request], received: float) -> None:
        """Returns when all are finished. If the caller goes away, they are aborted."""
        call = _Call(len(requests))
        taken: list[str] = []
        try:
            for request in requests:
                if request.rid in self._live:
                    raise BadRequest(f"Duplicate request ID detected: {request.rid}")
                self._live[request.rid] = request
                taken.append(request.rid)
                request.call, request.received_at, request.queued_at = call, received, time.time()
            self._idle.clear()
            self._worker.submit(requests)
            await call.done
        except asyncio.CancelledError:
            self._worker.cancel(taken)
            raise
        finally:
            for rid in taken:
                del self._live[rid]
            if not self._live:
                self._idle.set()

    def _deliver(self, finished: list[Request]) -> None:
        for request in finished:
            call: _Call = request.call
            call.left -= 1
            if not call.left and not call.done.done():
                call.done.set_result(None)

    def _fail(self) -> None:
        self._failed.set()
        for request in self._live.values():
            request.finish = {"type": "abort", "message": self._fault(), "status_code": 500, "err_type": "InternalServerError"}
            call: _Call = request.call
            if not call.done.done():
                call.done.set_result(None)

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
