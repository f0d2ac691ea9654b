"""The routes that stop, continue and end generation."""

from __future__ import annotations

from aiohttp import web

from producer.engine.embedded.http import Routes, flag, read_object, reply, text
from producer.engine.embedded.request import BadRequest
from producer.engine.embedded.worker import Worker

_MODES = ("abort", "in_place", "retract")
_FLUSHED = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"


class ControlRoutes:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def gets(self) -> Routes:
        return {"/flush_cache": self._flush}

    def posts(self) -> Routes:
        return {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
        }

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await read_object(http)).get("mode", "abort")
        if mode not in _MODES:
            raise BadRequest(f"unknown pause mode {mode!r:.40}: use one of {', '.join(_MODES)}")
        await self._worker.pause(mode)
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await read_object(http)
        await self._worker.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        rid, everything = text(body, "rid", ""), flag(body, "abort_all", default=False)
        if rid or everything:
            await self._worker.abort(None if everything else rid)
        return web.Response()

    async def _flush(self, _: web.Request) -> web.Response:
        flushed = await self._worker.flush()
        return web.Response(text=_FLUSHED if flushed else "Flush cache failed.\n", status=200 if flushed else 400)
