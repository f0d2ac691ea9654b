"""An engine by a token clock: it decodes so many requests at once, each gets a token a tick, and some fail. It samples nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web


@dataclass(kw_only=True, eq=False)
class ClockedEngine:
    slots: int
    tick_s: float
    fail_share: float
    seed: int
    version: str = "1:0"
    step: int = 4
    """Tokens of an event."""
    url: str = ""
    requests: int = 0
    failed: int = 0
    generated: int = 0
    """Tokens it wrote, whoever got them."""
    _hows: itertools.cycle[str] = field(default_factory=lambda: itertools.cycle(("drop", "end", "500", "503")))

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._free = asyncio.Semaphore(self.slots)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.requests += 1
        most, start = int(body["sampling_params"]["max_new_tokens"]), len(body["input_ids"])
        how = next(self._hows) if self._chance.random() < self.fail_share else ""
        last = self._chance.randrange(most) if how else most
        self.failed += bool(how)
        async with self._free:
            if how.isdigit():
                return web.json_response({"error": {"message": "staged"}}, status=int(how))
            ids = [position % 7 + 2 for position in range(start, start + last)]
            if not body.get("stream"):
                await self._ticks(last)
                if how:
                    return self._broken(http)
                return web.json_response(self._event(ids, 0, last=True))
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(http)
            for begin in range(0, last, self.step):
                end = min(begin + self.step, last)
                await self._ticks(end - begin)
                await answer.write(b"data: " + json.dumps(self._event(ids[begin:end], begin, last=end == most)).encode() + b"\n\n")
            if how == "drop":
                self._broken(http)
            elif not how:
                await answer.write(b"data: [DONE]\n\n")
            return answer

    async def _ticks(self, tokens: int) -> None:
        await asyncio.sleep(tokens * self.tick_s)
        self.generated += tokens

    @staticmethod
    def _broken(http: web.Request) -> web.Response:
        if http.transport is not None:
            http.transport.close()
        return web.Response()

    def _event(self, ids: list[int], start: int, *, last: bool) -> dict[str, object]:
        total = start + len(ids)
        meta: dict[str, object] = {"weight_version": self.version, "completion_tokens": total, "cached_tokens": 0}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        meta["finish_reason"] = {"type": "length", "length": total} if last else None
        if last:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": total}]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def well(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", well)
        app.router.add_get("/ready", well)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()
