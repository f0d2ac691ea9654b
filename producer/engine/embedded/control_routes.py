"""The routes that stop, continue and end generation."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from typing import Protocol

from aiohttp import web

from producer.engine.embedded.http import Routes, flag, optional_text, read_object, reply
from producer.engine.embedded.memory import TAGS
from producer.engine.embedded.request import BadBody
from producer.engine.embedded.worker import Worker

_MODES = ("abort", "in_place", "retract")
_FLUSHED = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"


class Door(Protocol):
    """Where requests come in. Those that come while it is shut wait before it, and no abort reaches them there."""

    def shut(self) -> None: ...

    def open(self) -> None: ...

    def knows(self, rid: str) -> bool:
        """A request of exactly this id came in and is not answered yet."""

    async def until_idle(self) -> None:
        """Return when every request is answered."""


class ControlRoutes:
    def __init__(self, worker: Worker, door: Door) -> None:
        self._worker, self._door = worker, door

    def gets(self) -> Routes:
        return {"/flush_cache": self._flush}

    def posts(self) -> Routes:
        return {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await read_object(http)).get("mode", "abort")
        if mode not in _MODES:
            raise BadBody(f"unknown pause mode {mode!r:.40}: use one of {', '.join(_MODES)}")
        self._door.shut()
        await self._worker.pause(mode)
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await read_object(http)
        self._door.open()
        await self._worker.resume()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        """An id that no request has ends none; that of a request ends all whose ids begin with it."""
        body = await read_object(http)
        rid, everything = optional_text(body, "rid") or "", flag(body, "abort_all", default=False)
        if everything or (rid and self._door.knows(rid)):
            await self._worker.abort(None if everything else rid)
        return web.Response()

    async def _flush(self, http: web.Request) -> web.Response:
        flushed = await self._flush_within(_seconds(http.query.get("timeout", "0")))
        return web.Response(text=_FLUSHED if flushed else "Flush cache failed.\n", status=200 if flushed else 400)

    async def _release(self, http: web.Request) -> web.Response:
        """As SGLang with its memory saver, where it would die of what is refused here."""
        tags = _tags(await read_object(http))
        return _occupation(await self._worker.release_memory(TAGS if tags is None else tags))

    async def _resume(self, http: web.Request) -> web.Response:
        tags = _tags(await read_object(http))
        return _occupation(await self._worker.resume_memory(TAGS if tags is None else tags))

    async def _flush_within(self, patience_s: float) -> bool:
        end = time.monotonic() + patience_s
        while not await self._worker.flush():
            left = end - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._door.until_idle()
        return True


def _tags(body: Mapping[str, object]) -> list[str] | None:
    """None: all."""
    tags = body.get("tags")
    if tags is not None and not (isinstance(tags, list) and set(tags) <= set(TAGS)):
        raise BadBody(f"tags must be a list of {', '.join(TAGS)}, got {tags!r:.60}")
    return tags


def _occupation(problem: str | None) -> web.Response:
    if problem is not None:
        raise BadBody(problem)
    return web.Response(body=b"null", content_type="application/json")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds < 0 or not math.isfinite(seconds):
        raise BadBody(f"timeout must be a number of at least 0, got {text!r:.40}")
    return seconds
