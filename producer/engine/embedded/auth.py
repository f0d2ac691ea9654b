"""Who may ask what: SGLang's `api_key` and `admin_api_key`.

Liveness, readiness and metrics stay open, so that probes need no secret. What generates or tells takes the first key, if there is one. What pauses, aborts or
changes weights takes the second, and only that; where there is none, the first.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Middleware

from producer.engine.embedded.http import Handler, reply

_OPEN = ("/health", "/ready", "/metrics")


def guard(api_key: str, admin_key: str, admin_paths: Collection[str]) -> Middleware:
    """Answers 401 to a request without the `Authorization: Bearer <key>` that its path takes; an empty key lets everybody in."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = admin_key or api_key if request.path in admin_paths else api_key
        if key and request.method != "OPTIONS" and not request.path.startswith(_OPEN) and not _bears(request.headers.get("Authorization", ""), key):
            return reply({"error": "Unauthorized"}, 401)
        return await handler(request)

    return check


def _bears(header: str, key: str) -> bool:
    scheme, _, token = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(errors="surrogateescape"), key.encode())
