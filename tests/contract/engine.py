"""One engine as a client of the wire sees it. Whatever a test waits for, it sees in the stream of a request, which both kinds of engine have."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import orjson

from weightsync.control import EngineControl

from .served import Setup

PROMPT = [20, 30, 40, 50]
LONG = 1900
"""Tokens of a request that is still decoding when something happens to it: all that fit."""
SOON = 400
"""Tokens of one that is waited for, and is not over before something happens to it."""
PATIENCE_S = 120.0


class Reply(NamedTuple):
    status: int
    body: Any


class Engine:
    def __init__(self, session: aiohttp.ClientSession, url: str, setup: Setup) -> None:
        self.session, self.url, self.setup = session, url, setup
        self.control = EngineControl(session, url, api_key=setup.api_key, admin_key=setup.admin_key)

    async def ask(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, key: str | None = None) -> Reply:
        """`key`: instead of the one that the path takes."""
        data = raw if raw is not None else None if body is None else orjson.dumps(body)
        async with self.session.request(method, self.url + path, data=data, headers=self._headers(path, key), timeout=_WHOLE) as answer:
            content = await answer.read()
            return Reply(answer.status, orjson.loads(content) if answer.content_type == "application/json" and content else content.decode())

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.ask("POST", path, {} if body is None and "raw" not in options else body, **options)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.ask("GET", path, **options)

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = await self.post("/generate", body)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    @contextlib.asynccontextmanager
    async def stream(self, body: dict[str, Any]) -> AsyncIterator[Stream]:
        """The stream of one call; leaving it hangs up."""
        async with self.session.post(
            self.url + "/generate", data=orjson.dumps(body | {"stream": True}), headers=self._headers("/generate", None), timeout=_WHOLE
        ) as answer:
            yield Stream(answer)

    async def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All of one call, to its end."""
        async with self.stream(body) as stream:
            return [event async for event in stream]

    @contextlib.asynccontextmanager
    async def running(self, count: int = 1, *, tokens: int = LONG, seen: int = 5, **options: Any) -> AsyncIterator[list[Running]]:
        """So many requests, each of which has written `seen` tokens. Those that are not over when the context ends are aborted.

        No id may come twice within seconds: SGLang ends whatever has the id of a stream two seconds after that is over.
        """
        async with asyncio.TaskGroup() as tasks:
            started = [Running(self, asking(tokens, **({"rid": uuid.uuid4().hex} | options))) for _ in range(count)]
            for one in started:
                one.task = tasks.create_task(one.follow())
            try:
                for one in started:
                    await one.written(seen)
                yield started
            finally:
                await self.post("/continue_generation")
                if not all(one.task.done() for one in started):
                    await self.post("/abort_request", {"abort_all": True})

    async def version(self) -> str:
        return str((await self.get("/model_info")).body["weight_version"])

    async def checksum(self) -> str:
        status, answer = await self.post("/weights_checker", {"action": "checksum"})
        assert (status, answer["success"]) == (200, True)
        return str(answer["per_engine_checksum"])

    async def decodes(self, count: int, *, before_the_end_of: Running) -> bool:
        """Return once the engine says that it decodes so many requests; False: that one was over before."""
        while not before_the_end_of.task.done():
            lines = str((await self.get("/metrics")).body).splitlines()
            if sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("sglang:num_running_reqs{")) == count:
                return True
            await asyncio.sleep(0.05)
        return False

    async def span_lag(self) -> int:
        """Tokens behind an update in place that the engine itself says may be called too new."""
        return (await self.control.dialect()).span_lag("in_place")

    async def start_over(self, model: str) -> None:
        """Whatever a test left: nothing runs, nothing is paused, no session is open, and the engine serves `model` as 1:0 with an empty cache."""
        await self.post("/continue_generation")
        for _ in range(2):  # the second time for those that a pause had held back
            await self.post("/abort_request", {"abort_all": True})
            assert (await self.post(f"/flush_cache?timeout={PATIENCE_S:g}")).status == 200
        await self.post("/end_weight_update")
        if self.setup.lora.adapters:  # whose base weights stay what they were started with
            for name in await self.control.adapters():
                await self.control.unload_adapter(name, deadline_s=PATIENCE_S)
            return
        status, answer = await self.post("/update_weights_from_disk", {"model_path": model, "weight_version": "1:0", "flush_cache": True})
        assert status == 200, answer

    def _headers(self, path: str, key: str | None) -> dict[str, str]:
        if key is None:
            users = path.split("?", maxsplit=1)[0] in ("/generate", "/model_info", "/server_info", "/get_model_info", "/get_server_info", "/v1/models")
            key = self.setup.api_key if users else self.setup.admin_key
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})


class Stream:
    """The events of one call, as dicts. The mark of the end ends it; without one the stream broke."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        assert (self.answer.status, self.answer.content_type) == (200, "text/event-stream"), await self.answer.text()
        pending = b""
        async for data in self.answer.content.iter_any():
            *lines, pending = (pending + data).split(b"\n")
            for line in filter(None, lines):
                assert line.startswith(b"data: ")
                if line == b"data: [DONE]":
                    return
                yield orjson.loads(line[6:])
        raise AssertionError("the stream ended without its mark")


class Running:
    """A request that is followed while it is written. `answer` is what it would have answered without a stream."""

    task: asyncio.Task[None]

    def __init__(self, engine: Engine, body: dict[str, Any]) -> None:
        self._engine, self.rid = engine, str(body["rid"])
        self._body = body
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        self.last: dict[str, Any] = {}
        self._moved = asyncio.Condition()

    async def follow(self) -> None:
        try:
            async with self._engine.stream(self._body) as stream:
                async for event in stream:
                    await self._take(event)
        finally:
            async with self._moved:
                self._moved.notify_all()

    async def _take(self, event: dict[str, Any]) -> None:
        meta = event["meta_info"]
        if self._engine.setup.incremental:
            self._ids += event["output_ids"]
            self._logprobs += meta.get("output_token_logprobs", [])
        else:
            self._ids, self._logprobs = event["output_ids"], meta.get("output_token_logprobs", [])
        self.last = event
        async with self._moved:
            self._moved.notify_all()

    @property
    def tokens(self) -> int:
        return len(self._ids)

    async def written(self, tokens: int) -> None:
        """Return once so many are there, or all."""
        async with asyncio.timeout(PATIENCE_S), self._moved:
            await self._moved.wait_for(lambda: self.tokens >= tokens or self.task.done())

    async def answer(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait({self.task})
            self.task.result()
        return self.last | {"output_ids": self._ids, "meta_info": self.last["meta_info"] | {"output_token_logprobs": self._logprobs}}


def asking(tokens: int = 4, *, ids: Any = None, sampling: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0} | (sampling or {})
    return {"input_ids": ids or PROMPT, "sampling_params": params, "return_logprob": True} | options


_WHOLE = aiohttp.ClientTimeout(total=300.0)
