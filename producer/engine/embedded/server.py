"""The embedded engine's HTTP server: SGLang's native subset over one `Worker`.

    async with EmbeddedEngine(load(path, slots=256, max_length=128), weight_version="boot:…", host="127.0.0.1", port=0, seed=7) as engine:
        engine.url

Errors of a request have SGLang's shape, `{"error": {"message": …}}` with status 400; answers of control calls have its fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import orjson
from aiohttp import web

from producer.engine.embedded import metrics, weights
from producer.engine.embedded.answer import answer
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import BadRequest, Limits, Request, parse
from producer.engine.embedded.worker import Counters, EngineFault, Worker
from protocol.errors import ConfigError, ManifestError

_MAX_BODY_BYTES = 256 << 20
_HEALTH_S = 20.0
_CLOSE_S = 1.0
_FLUSHED = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"
_DISK_KEYS = {"load_format": (None, "auto", "safetensors"), "manifest": (None,), "keep_pause": (False,)}


class _Call:
    """One HTTP call and the requests it waits for."""

    __slots__ = ("done", "left")

    def __init__(self, count: int) -> None:
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EmbeddedEngine:
    """Serves `model` while the context is open.

    Raises: `ConfigError` on entering when the address is taken.
    """

    def __init__(
        self, model: SlotModel, *, weight_version: str = "default", host: str = "127.0.0.1", port: int = 0, seed: int = 0, max_queued: int = 8192
    ) -> None:
        self._worker = Worker(model, version=weight_version, seed=seed, deliver=self._deliver, on_failure=self._fail)
        self._model = model
        self._limits = Limits(context_length=model.max_length, vocabulary=model.geometry.vocabulary, tokenizer=model.tokenizer)
        self._host, self._port, self._seed, self._max_queued = host, port, seed, max_queued
        self._live: dict[str, Request] = {}
        self._failed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._updating = asyncio.Lock()
        self._registry = metrics.registry(self._worker, model.path)
        self._model_path = model.path
        self._version = weight_version
        """What `/model_info` says: moves only when an update succeeds as a whole."""
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
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
        gets: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/metrics": self._metrics,
            "/flush_cache": self._flush,
        }
        for path, handler in gets.items():
            app.router.add_get(path, handler)
        posts: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update_from_disk,
        }
        for path, handler in posts.items():
            app.router.add_post(path, _with_errors(handler))

    # -- generation ----------------------------------------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.Response:
        received = time.time()
        requests, listed = parse(_json(await http.read()), self._limits)
        if self._worker.failure is not None:
            return _error(self._fault(), 500)
        if len(self._live) + len(requests) > self._max_queued + self._model.slots and not all(request.probe for request in requests):
            return _error("The request queue is full.", 503)
        await self._run(requests, received)
        failed = next((r.finish for r in requests if r.finish is not None and r.finish.get("status_code")), None)
        if failed is not None:
            return _error(str(failed["message"]), int(failed["status_code"]))
        answers = [answer(request, self._model.tokenizer) for request in requests]
        return _reply(answers if listed else answers[0])

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

    # -- control -------------------------------------------------------------------------------------------------------------------------------

    async def _pause(self, http: web.Request) -> web.Response:
        mode = _object(await http.read()).get("mode", "abort")
        if mode == "retract":
            raise BadRequest("pause mode retract is not supported by the embedded engine: use in_place or abort")
        if mode not in ("abort", "in_place"):
            raise BadRequest(f"unknown pause mode {mode!r:.40}: use in_place or abort")
        await self._worker.pause(mode)
        return _reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        _object(await http.read())
        await self._worker.resume()
        return _reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = _object(await http.read())
        rid, everything = body.get("rid", ""), body.get("abort_all", False)
        if not isinstance(rid, str) or not isinstance(everything, bool):
            raise BadRequest("rid must be a string, abort_all true or false")
        if rid or everything:
            await self._worker.abort(None if everything else rid)
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        flushed = await self._worker.flush()
        return web.Response(text=_FLUSHED if flushed else "Flush cache failed.\n", status=200 if flushed else 400)

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        body = _object(await http.read())
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not (version is None or isinstance(version, str)):
            raise BadRequest("model_path must be a string, weight_version a string or null")
        for key, accepted in _DISK_KEYS.items():
            if body.get(key, accepted[0]) not in accepted:
                raise BadRequest(f"{key}={body[key]!r:.40} is not supported by the embedded engine")
        async with self._updating:
            try:
                staged = await asyncio.to_thread(weights.stage, path, self._model.model)
            except ManifestError as problem:
                return _updated(f"Failed to update weights: {problem}. The old weights stay in service.", success=False)
            problem_text = await self._worker.update(
                staged, version, flush=bool(body.get("flush_cache", True)), abort_all=bool(body.get("abort_all_requests", False))
            )
            if problem_text is not None:
                return _updated(problem_text, success=False)
            self._model_path = path
            self._version = version if version is not None else self._version
        return _updated("Succeeded to update model weights." + (f" Weight version updated to {version}." if version is not None else ""), success=True)

    # -- what it is and how it is --------------------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._worker.failure is None else 503)

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

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._worker.paused or self._worker.failure is not None else 200)

    async def _model_info(self, _: web.Request) -> web.Response:
        geometry = self._model.geometry
        return _reply({
            "model_path": self._model_path,
            "served_model_name": self._model_path,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": self._version,
            "load_format": "auto",
            "model_type": geometry.model_type,
            "architectures": list(geometry.architectures),
            "has_image_understanding": False,
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
        })  # fmt: skip

    async def _server_info(self, _: web.Request) -> web.Response:
        model, counters = self._model, self._worker.counters
        return _reply({
            "version": "embedded",
            "model_path": self._model_path,
            "tokenizer_path": self._model_path,
            "weight_version": self._version,
            "host": self._host,
            "port": int(self.url.rpartition(":")[2]),
            "device": "cpu",
            "random_seed": self._seed,
            "context_length": model.max_length,
            "max_running_requests": model.slots,
            "max_queued_requests": self._max_queued,
            "max_total_num_tokens": model.slots * model.max_length,
            "internal_states": [{
                "num_running_reqs": counters.running,
                "num_queue_reqs": counters.queued,
                "busy_s": counters.busy_s,
                "paused_s": counters.paused_s,
                "generated_tokens": counters.generated_tokens,
                "decode_steps": counters.decode_steps,
                "prefills": counters.prefills,
                "updates": counters.updates,
            }],
        })  # fmt: skip

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(self._registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _with_errors(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(http: web.Request) -> web.Response:
        try:
            return await handler(http)
        except BadRequest as problem:
            return _error(str(problem), 400)
        except EngineFault as problem:
            return _error(str(problem), 500)

    return handle


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        raise BadRequest(f"the body is not JSON: {problem}") from problem


def _object(raw: bytes) -> dict[str, Any]:
    body = _json(raw) if raw.strip() else {}
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def _reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(message: str, status: int) -> web.Response:
    return _reply({"error": {"message": message}}, status)


def _updated(message: str, *, success: bool) -> web.Response:
    return _reply({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)
