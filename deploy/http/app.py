"""The HTTP application: every answer is read from Redis when it is asked for, so it may run anywhere and there may be many.

| path | answers |
| --- | --- |
| `/metrics` | Prometheus text |
| `/v1/staleness` | staleness of trained tokens, of READY tokens, publish lag |
| `/v1/buffer` | the ledger: groups by state, limits, bytes, checkpoints |
| `/v1/engines`, `/v1/producers`, `/v1/trainers` | who is here, with what they report |
| `/v1/launchers` | `rollstream up` on one machine: how many producers and engines are wanted, and which run |
| `/v1/weights` | the weight pointer and who serves what |
| `/v1/journal` | the steps that can be replayed, what is spilled, who reads them |
| `/v1/watchdog` | which edge is blocked, since when, why, and what to do; also where there is no run |
| `/v1/bias` | what became of every sampled token, by length and age |
| `/v1/evals` | the newest evaluations: phase, set, version, reward |
| `/healthz` | this process runs |
| `/readyz` | and Redis answers; the body names the stalls of the run |

A stalled run changes no status code: a probe that fails would have this process restarted or taken out of service, which mends no run and hides the reason.
Alarms watch `rollstream_stalled`, or `stalled` of `/v1/watchdog`.

Errors are JSON with `error` and `what_to_do`: 404 no such path or no such run, 405 wrong method, 503 Redis does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel
from redis.exceptions import RedisError

from deploy.config import ReaderConfig, bind, reader_url
from deploy.http import bodies, evals, metrics
from deploy.snapshot import Picture, PictureSource, picture_source
from protocol.errors import ConfigError, RollstreamError

_ANSWER_S = 10.0
_V1: dict[str, Callable[[Picture], BaseModel]] = {
    "/v1/staleness": bodies.staleness,
    "/v1/buffer": bodies.buffer,
    "/v1/engines": bodies.engines,
    "/v1/producers": bodies.producers,
    "/v1/trainers": bodies.trainers,
    "/v1/launchers": bodies.launchers,
    "/v1/weights": bodies.weights,
    "/v1/journal": bodies.journal,
    "/v1/bias": bodies.bias_of,
    "/v1/evals": evals.evals,
}
PATHS = (*_V1, "/v1/watchdog", "/metrics", "/healthz", "/readyz")


def announcement(listener: socket.socket) -> str:
    """Where the service listens, as a line for people."""
    host, port = listener.getsockname()[:2]
    return f"listening on http://{f'[{host}]' if ':' in host else host}:{port}: {' '.join(sorted(PATHS))}\n"


def make_app(source: PictureSource) -> web.Application:
    app = web.Application(middlewares=[_errors])

    def answer(body_of: Callable[[Picture], BaseModel]) -> Handler:
        async def handler(_: web.Request) -> web.Response:
            picture = await source.picture()
            if picture.ledger is None:
                return _problem(404, f"run {picture.run!r} is not in this Redis", "start its trainer with --new, or correct run.name or redis.url")
            return _json(200, body_of(picture))

        return handler

    for path, body_of in _V1.items():
        app.router.add_get(path, answer(body_of))

    async def prometheus(_: web.Request) -> web.Response:
        picture: Picture | None = None
        with contextlib.suppress(RollstreamError, RedisError, OSError):
            picture = await source.picture()
        return web.Response(body=metrics.exposition(picture, source.run), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        await source.ping()
        picture = await source.picture()
        return web.json_response({"status": "ready", "stalls": [stall.sentence(picture.at) for stall in picture.stalls]})

    async def watchdog(_: web.Request) -> web.Response:
        return _json(200, bodies.watchdog(await source.picture()))

    app.router.add_get("/v1/watchdog", watchdog)
    app.router.add_get("/metrics", prometheus)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await handler(request)
    except web.HTTPNotFound:
        return _problem(404, f"no such path: {request.path}", f"use one of {', '.join(PATHS)}")
    except web.HTTPMethodNotAllowed:
        return _problem(405, f"{request.method} is not allowed here", "use GET")
    except (RollstreamError, RedisError, OSError, TimeoutError) as problem:
        return _problem(503, f"Redis does not answer ({str(problem) or type(problem).__name__})", "look at the Redis server; asking again later is right")


def _json(status: int, body: BaseModel) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(body.model_dump()), content_type="application/json")


def _problem(status: int, error: str, what_to_do: str) -> web.Response:
    return _json(status, bodies.Problem(error=error, what_to_do=what_to_do))


@contextlib.asynccontextmanager
async def running(source: PictureSource, listener: socket.socket) -> AsyncIterator[None]:
    """The service answers on `listener` while the context is open. The listener stays the caller's to close."""
    runner = web.AppRunner(make_app(source), access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()


async def serve_app(source: PictureSource, listener: socket.socket) -> None:
    """Answer for ever; cancelled at the end."""
    async with running(source, listener):
        await asyncio.get_running_loop().create_future()


async def serve(config: ReaderConfig, stop: asyncio.Event) -> None:
    """`rollstream serve`: answer until `stop`. Raises: `ConfigError` when the port is taken."""
    url = reader_url(config.run, config.redis)
    if (listener := bind(config.http)) is None:
        raise ConfigError("http.port 0: `rollstream serve` needs a port")
    try:
        async with (
            picture_source(url, config.run.name, folder=config.run.folder, patience_s=config.run.stall_seconds, transport=config.weights.transport) as source,
            running(source, listener),
        ):
            sys.stdout.write(announcement(listener))
            sys.stdout.flush()
            await stop.wait()
    finally:
        listener.close()
