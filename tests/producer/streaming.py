"""An engine that streams over real HTTP and goes wrong on demand, in this process or in one of its own: `python -m tests.producer.streaming`.

What it writes depends only on where in the sequence it stands, so that a response which several of them wrote is the one that one would have written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from protocol.messages import EngineState, EngineStatus
from protocol.versions import Version


def written(position: int) -> int:
    """The token at `position` of prompt and response."""
    return position % 7 + 2


def response(prompt: list[int], tokens: int) -> list[int]:
    return [written(position) for position in range(len(prompt), len(prompt) + tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ill:
    """How one request goes wrong."""

    after: int = 0
    """Tokens it writes before that."""
    how: str = "drop"
    """drop: the connection; end: the stream; hang: for ever; error: an event that says so; or a status, before any token."""


@dataclass(eq=False)
class StreamingEngine:
    version: str = "1:0"
    step: int = 1
    """Tokens of an event."""
    behave: Callable[[dict[str, Any]], Ill | None] = lambda _: None
    ready: int = 200
    """What `/ready` answers."""
    kind: str = "embedded"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    generated: int = 0
    """Tokens it sampled, sent or not."""
    wrote: asyncio.Event = field(default_factory=asyncio.Event)
    looks: int = 0
    aborted: list[str] = field(default_factory=list)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = json.loads(await http.read())
        self.requests.append(body)
        ill = self.behave(body)
        if ill is not None and ill.how.isdigit():
            return web.json_response({"error": {"message": "staged"}}, status=int(ill.how))
        prompt, most = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids = response(prompt, most if ill is None else min(ill.after, most))
        self.generated += len(ids)
        if not body.get("stream"):
            if ill is not None:
                await self._fail(http, ill, None)
            return web.json_response(self._event(ids, 0, most, last=True))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        for start in range(0, len(ids), self.step):
            end = min(start + self.step, len(ids))
            await self._send(answer, self._event(ids[start:end], start, most, last=end == most))
            self.wrote.set()
        if ill is not None and ill.after < most:
            await self._fail(http, ill, answer)
        else:
            await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _fail(self, http: web.Request, ill: Ill, answer: web.StreamResponse | None) -> None:
        if ill.how == "hang":
            await asyncio.Event().wait()
        elif ill.how == "error" and answer is not None:
            await self._send(answer, {"error": {"message": "staged", "code": 500}})
        elif ill.how == "drop" or answer is None:
            await asyncio.sleep(0)
            assert http.transport is not None
            http.transport.close()

    @staticmethod
    async def _send(answer: web.StreamResponse, event: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _event(self, ids: list[int], start: int, most: int, *, last: bool) -> dict[str, Any]:
        total = start + len(ids)
        meta: dict[str, Any] = {"weight_version": self.version, "completion_tokens": total, "cached_tokens": 0}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        meta["finish_reason"] = {"type": "length", "length": most} if last else None
        if last:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": total}]
        return {"text": "", "output_ids": ids, "meta_info": meta}

    async def tell(self, _: web.Request) -> web.StreamResponse:
        self.looks += 1
        return web.Response(status=self.ready)

    async def abort(self, http: web.Request) -> web.StreamResponse:
        self.aborted.append((await http.json())["rid"])
        return web.Response()

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[StreamingEngine]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_get("/ready", self.tell)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()


async def register(registry: Any, name: str, url: str, *, version: str = "1:0", nonce: str = "boot:1", **fields: Any) -> None:
    """The engine at `url` is routable at `version`."""
    status = EngineStatus(engine_id=name, boot_nonce=nonce, url=url, state=EngineState.STARTING, **({"kind": "embedded"} | fields))
    await registry.beat(status, ttl_s=600.0)
    await registry.ack(name, nonce, Version.parse(version))


@contextlib.asynccontextmanager
async def process(tokens: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An engine in a process of its own, and its URL: each request gets so many tokens and then waits."""
    running = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.producer.streaming", str(tokens), stdout=asyncio.subprocess.PIPE)
    try:
        assert running.stdout is not None
        yield running, (await running.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()
        await running.wait()


async def main() -> None:
    tokens = int(sys.argv[1])
    async with StreamingEngine(behave=lambda _: Ill(after=tokens, how="hang")).serving() as engine:
        print(engine.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
