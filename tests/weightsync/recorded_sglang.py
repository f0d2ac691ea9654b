"""A server that answers, and breaks, as SGLang 0.5.17 and 0.5.23 were recorded to: what kills it kills it here too.

It has no weights. Requests of more than eight tokens run until a test lets them; their tokens are counted by `decode`. What it remembers of prompts it
remembers under the version that computed it, so that a request which rests on older keys and values is known: `stale`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FLUSH_REFUSED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. Retract or finish them, then call /flush_cache."
)
NO_SESSION = "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
SHORT = 8


@dataclass(eq=False)
class Running:
    """A request that is being decoded."""

    rid: str
    ids: tuple[int, ...]
    salt: str
    spans: list[list[Any]] = field(default_factory=list)
    """[version, start, end]"""
    cached: int = 0
    retractions: int = 0
    finish: asyncio.Future[dict[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def tokens(self) -> int:
        return int(self.spans[-1][2]) if self.spans else 0


class RecordedSGLang:
    """One server. `release`: "0.5.17" or "0.5.23"."""

    def __init__(
        self,
        boot_nonce: str,
        release: str,
        *,
        radix: bool = True,
        overlap: bool = True,
        dp_size: int = 1,
        pp_size: int = 1,
        keys: tuple[str, str] = ("", ""),
    ) -> None:
        self.pp_size = pp_size
        self.boot_nonce, self.release, self.radix, self.overlap, self.dp_size = boot_nonce, release, radix, overlap, dp_size
        self.api_key, self.admin_key = keys
        self.old = release == "0.5.17"
        self.tokenizer_version = self.version = f"boot:{boot_nonce}"
        """What `/model_info` says, and what tokens are called."""
        self.paused = ""
        self.session = False
        self.bytes_come = True
        self.hung = False
        self.dead = ""
        """What ended it."""
        self.stale: list[str] = []
        """Requests that used keys and values of older weights than those they began, or began again, with."""
        self.running: dict[str, Running] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.url = ""
        self._cache: dict[tuple[str, tuple[int, ...]], str] = {}
        self._going = asyncio.Event()
        self._going.set()
        self._closed = asyncio.Event()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RecordedSGLang]:
        app = web.Application()
        both: dict[str, Callable[[dict[str, Any]], Awaitable[web.Response]]] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/update_weights_from_distributed": self._distributed,
            "/update_weight_version": self._rename,
            "/init_weights_update_group": self._group,
        }
        new = {"/begin_weight_update": self._begin, "/end_weight_update": self._end}
        for path, handler in (both if self.old else both | new).items():
            app.router.add_post(path, self._handle(handler))
        for path, handler in ({"/model_info": self._info, "/server_info": self._settings} | ({} if self.old else {"/ready": self._ready})).items():
            app.router.add_get(path, self._handle(handler))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self._closed.set()
            self._end_running("the test is over")
            await runner.cleanup()

    def decode(self, tokens: int, *, version: str = "") -> None:
        """Every running request gets so many tokens more, unless the server is paused. `version`: what they are called, if not what is served."""
        for one in self.running.values():
            if not self.paused:
                self._write(one, tokens, version or self.version)

    def finish(self) -> None:
        for one in list(self.running.values()):
            self._finish(one, {"type": "length", "length": one.tokens})

    def _handle(self, handler: Callable[[dict[str, Any]], Awaitable[web.Response]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json() if request.can_read_body else {}
            self.calls.append((request.path, body))
            user = request.path in ("/generate", "/model_info", "/server_info")
            key = self.api_key if user else self.admin_key or self.api_key
            if key and request.path != "/ready" and request.headers.get("Authorization") != f"Bearer {key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            if not self.dead:
                answer = await handler(body)
            if self.dead:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            return answer

        return handle

    # generation

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        await self._going.wait()
        if self.hung:
            await self._closed.wait()
        one = Running(body["rid"], tuple(body["input_ids"]), body.get("extra_key", ""))
        self.running[one.rid] = one
        one.cached = self._prefill(one)
        if (most := body["sampling_params"]["max_new_tokens"]) <= SHORT:
            self._write(one, most, self.version)
            self._finish(one, {"type": "length", "length": most})
        finish = await one.finish
        ids = [3] * one.tokens
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": finish,
            "weight_version": self.version,
            "num_retractions": one.retractions,
            "cached_tokens": one.cached,
            "output_token_logprobs": [[-0.5, 3, None]] * one.tokens,
        }
        if not self.old:
            meta["weight_versions"] = [{"version": version, "start": start, "end": end} for version, start, end in one.spans]
        return web.json_response({"text": "a" * one.tokens, "output_ids": ids, "meta_info": meta})

    def _prefill(self, one: Running) -> int:
        """How many tokens came from the cache."""
        if not self.radix:
            return 0
        computed = self._cache.setdefault((one.salt, one.ids), self.version)
        if computed != self.version:
            self.stale.append(one.rid)
        return len(one.ids) - 1

    def _write(self, one: Running, tokens: int, version: str) -> None:
        if one.spans and one.spans[-1][0] == version:
            one.spans[-1][2] += tokens
        elif tokens:
            one.spans.append([version, one.tokens, one.tokens + tokens])

    def _finish(self, one: Running, finish: dict[str, Any]) -> None:
        self.running.pop(one.rid, None)
        if not one.finish.done():
            one.finish.set_result(finish)

    def _end_running(self, message: str, prefix: str = "") -> None:
        for one in list(self.running.values()):
            if one.rid.startswith(prefix):
                self._finish(one, {"type": "abort", "message": message, "status_code": None, "err_type": None})

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        self.paused = body.get("mode", "abort")
        self._going.clear()
        if self.paused == "abort":
            self._end_running("Aborted")
        if self.paused == "retract":
            for one in self.running.values():
                one.retractions += 1
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        if self.paused == "retract":
            for one in self.running.values():
                self._prefill(one)
        self.paused = ""
        self._going.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all") or body.get("rid"):
            self._end_running("Aborted", "" if body.get("abort_all") else body["rid"])
        return web.Response()

    async def _flush(self, _: dict[str, Any]) -> web.Response:
        if self.running and (self.old or self.paused != "retract"):
            return web.Response(text="Flush cache failed.\n", status=400)
        self._cache.clear()
        return web.Response(text="Cache flushed.\n")

    # updates

    async def _update(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests", False):
            self._end_running("Aborted")
        while self.running and not self.paused:
            await asyncio.wait([one.finish for one in self.running.values()])
        return self._loaded(body, "Succeeded to update model weights.")

    def _loaded(self, body: dict[str, Any], message: str) -> web.Response:
        version = body.get("weight_version")
        self.version = version or self.version
        if body.get("flush_cache", True):
            if self.running and self.old:
                self.dead = "AssertionError: Cache flush failed after updating weights"
                self._end_running(self.dead)
                return web.Response()
            if self.running and self.paused == "in_place":
                return web.json_response({"success": False, "message": FLUSH_REFUSED, "num_paused_requests": 0}, status=400)
            self._cache.clear()
        self.tokenizer_version = version or self.tokenizer_version
        return web.json_response({"success": True, "message": f"{message} Weight version updated to {version}."})

    async def _group(self, _: dict[str, Any]) -> web.Response:
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _distributed(self, body: dict[str, Any]) -> web.Response:
        if not self.old and not self.session:
            return web.json_response({"success": False, "message": NO_SESSION.replace("tensor", "distributed")}, status=400)
        if self.dp_size > 1:
            self.dead = "AssertionError: dp_size must be 1"
            return web.Response()
        self.hung = not self.bytes_come
        return self._loaded(body, "Succeeded to update parameter online.")

    async def _rename(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests", True):
            self._end_running("Aborted")
        self.version = self.tokenizer_version = body["new_version"]
        return web.json_response({"success": True, "message": f"Weight version updated to {self.version}", "new_version": self.version})

    async def _begin(self, _: dict[str, Any]) -> web.Response:
        opened, self.session = not self.session, True
        message = "Success" if opened else "A weight update session is already open"
        return web.json_response({"success": opened, "message": message}, status=200 if opened else 400)

    async def _end(self, _: dict[str, Any]) -> web.Response:
        closed, self.session = self.session, False
        return web.json_response({"success": closed, "message": "Success" if closed else "No weight update session is open"}, status=200 if closed else 400)

    async def _ready(self, _: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _info(self, _: dict[str, Any]) -> web.Response:
        return web.json_response({"weight_version": self.tokenizer_version})

    async def _settings(self, _: dict[str, Any]) -> web.Response:
        about = {"version": self.release, "disable_radix_cache": not self.radix, "disable_overlap_schedule": not self.overlap}
        return web.json_response(about | {"tp_size": 1, "dp_size": self.dp_size, "pp_size": self.pp_size, "dtype": "auto"})
