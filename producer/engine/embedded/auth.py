"""Who may ask: SGLang's `api_key`. Liveness, readiness and metrics stay open, so that probes need no secret."""

from __future__ import annotations

import hmac

from aiohttp import web
from aiohttp.typedefs import Middleware

from producer.engine.embedded.http import Handler, reply

_OPEN = ("/health", "/ready", "/metrics")


def guard(api_key: str) -> Middleware:
    """Answers 401 to a request without `Authorization: Bearer <api_key>`; an empty key lets everybody in."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.method != "OPTIONS" and not request.path.startswith(_OPEN) and not _bears(request.headers.get("Authorization", ""), api_key):
            return reply({"error": "Unauthorized"}, 401)
        return await handler(request)

    return check


def _bears(header: str, api_key: str) -> bool:
    scheme, _, token = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(errors="surrogateescape"), api_key.encode())
