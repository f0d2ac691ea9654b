"""Reading bodies and writing answers: what every route of the embedded engine shares."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from producer.engine.embedded.request import BadBody, BadRequest
from producer.engine.hosted import EngineFault

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Routes: TypeAlias = dict[str, Handler]


def with_errors(handler: Handler) -> Handler:
    """What cannot be served as asked is a 400, an engine without its thread a 500; both have SGLang's shape."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except BadRequest as problem:
            return reply(problem.body, 400)
        except EngineFault as problem:
            return error(str(problem), 500)

    return handle


@web.middleware
async def without_route(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No such path, or no such method there, in SGLang's shape. An old engine is known by what it lacks."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as missing:
        return reply({"detail": missing.reason}, missing.status)


def parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        raise BadBody(f"the body is not JSON: {problem}") from problem


async def read_object(http: web.Request, *, required: bool = True) -> dict[str, Any]:
    """The body as an object; where none is `required`, no body is an empty one. Raises: `BadBody`."""
    raw = await http.read()
    body = parsed(raw) if required or raw.strip() else {}
    if not isinstance(body, dict):
        raise BadBody(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def text(body: dict[str, Any], key: str, default: str | None = None) -> str:
    """Raises: `BadBody` when it is missing and has no default, or is no string."""
    value = body.get(key, default)
    if not isinstance(value, str):
        raise BadBody(f"{key} must be a string, got {value!r:.40}")
    return value


def optional_text(body: dict[str, Any], key: str) -> str | None:
    return None if body.get(key) is None else text(body, key)


def flag(body: dict[str, Any], key: str, *, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise BadBody(f"{key} must be true or false, got {value!r:.40}")
    return value


def integer(body: dict[str, Any], key: str) -> int:
    value = body.get(key)
    if type(value) is not int:
        raise BadBody(f"{key} must be an integer, got {value!r:.40}")
    return value


def accept_only(body: dict[str, Any], accepted: dict[str, tuple[Any, ...]]) -> None:
    """Raises: `BadRequest` for a key that asks for what this engine lacks."""
    for key, values in accepted.items():
        if body.get(key, values[0]) not in values:
            raise BadRequest(f"{key}={body[key]!r:.40} is not supported by the embedded engine")


def reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error(message: str, status: int) -> web.Response:
    return reply({"error": {"message": message}}, status)


def outcome(message: str, *, success: bool, **more: Any) -> web.Response:
    """The answer of a control call: 200, or 400 with the reason."""
    return reply({"success": success, "message": message} | more, 200 if success else 400)
