"""A server that gives answers as they were recorded from SGLang 0.5.23, or, where their name says so, from 0.5.17.

The answers are shortened to a few tokens, tensors and settings, without timings; versions are called as this project calls them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

ANSWERS: Mapping[str, dict[str, Any]] = json.loads(Path(__file__).with_name("answers.json").read_text())


class Replay:
    """`answers`: by path, the names of the recorded answers it gives in order; the last one again and again."""

    def __init__(self, answers: Mapping[str, str | list[str]]) -> None:
        self._answers = {path: [names] if isinstance(names, str) else list(names) for path, names in answers.items()}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.content_types: list[str] = []
        """Of requests that have a body."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Replay]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.can_read_body:
            self.content_types.append(request.headers.get("Content-Type", ""))
        self.asked.append((request.path, await request.json() if request.can_read_body else {}))
        names = self._answers.get(request.path)
        if names is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        recorded = ANSWERS[names[0]]
        if len(names) > 1:
            names.pop(0)
        if "events" in recorded:
            lines = [f"data: {json.dumps(event)}\n\n" for event in recorded["events"]] + ["data: [DONE]\n\n"]
            return web.Response(text="".join(lines), content_type="text/event-stream")
        if isinstance(recorded["body"], str):
            return web.Response(text=recorded["body"], status=recorded["status"])
        return web.json_response(recorded["body"], status=recorded["status"])
