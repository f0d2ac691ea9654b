"""A host's word to the router of SGLang in front of the fleet: behind it is, of this run's engines, whoever is routable, and nobody else.

consumes: wake-ups `engines`   produces: the router's list of workers   waits for: news of the engine, or time

The router takes engines by `POST /workers` and lets go of them by `DELETE /workers/{id}`; it keeps its list in memory alone, so it is looked at again and
again. Each host puts its own engine there; what an engine of the run has left behind that could not take leave, any of them takes out.
Its own health checks are off for what we put there: they take an engine that is paused for dead, and who may be asked is for the registry to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import aiohttp
import orjson

from protocol.wakeups import Topic, Wakeups

_LOG = logging.getLogger(__name__)
_LOOK_S = 5.0
_ANSWER_S = 3.0
_GONE = 404
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError)


class Router:
    """Knows one engine by its URL. The session belongs to the caller."""

    def __init__(self, session: aiohttp.ClientSession, router_url: str, engine_url: str, *, model: str, api_key: str = "") -> None:
        """`model`: what the engines behind it have in common; else it would go by the folder of the version that each has loaded last."""
        self._session, self._router, self._engine = session, router_url.rstrip("/"), engine_url
        self._model, self._key = model, api_key
        self._trouble = ""

    async def follow(self, routable: Callable[[], Awaitable[Collection[str]]], wakeups: Wakeups) -> None:
        """Keep the router's list right, for ever. `routable`: URLs of the engines that may be asked now."""
        while True:
            mark = wakeups.mark(Topic.ENGINES)
            await self.tell(await routable())
            await wakeups.wait(Topic.ENGINES, since=mark, timeout_s=_LOOK_S)

    async def tell(self, routable: Collection[str]) -> None:
        """Have our engine in the router's list if it is `routable`, and none of the run's that is not. A router that does not do it is told of once, and asked
        again later.
        """
        try:
            there = await self._workers()
            if self._engine in routable and self._engine not in there.values():
                mine = {"url": self._engine, "model_id": self._model, "disable_health_check": True}
                await self._ask("POST", "/workers", mine | ({"api_key": self._key} if self._key else {}))
            await self._remove(worker for worker, url in there.items() if url not in routable)
            trouble = ""
        except _FAILURES as problem:
            trouble = str(problem) or type(problem).__name__
        if trouble and not self._trouble:
            _LOG.warning("the router at %s does not take engine %s: %s", self._router, self._engine, trouble)
        self._trouble = trouble

    async def leave(self) -> None:
        """Bounded, and never fails: who leaves is out of the registry anyhow."""
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(_ANSWER_S):
                await self._remove(worker for worker, url in (await self._workers()).items() if url == self._engine)

    async def _workers(self) -> dict[str, str]:
        """URLs by id, of engines of this run, and ours whoever has put it there."""
        found = (await self._ask("GET", "/workers"))["workers"]
        urls = {worker["id"]: worker["url"].rstrip("/") for worker in found if worker.get("model_id") == self._model}
        return urls | {worker["id"]: self._engine for worker in found if worker["url"].rstrip("/") == self._engine}

    async def _remove(self, workers: Iterable[str]) -> None:
        for worker in workers:
            await self._ask("DELETE", f"/workers/{worker}")

    async def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        data = None if body is None else orjson.dumps(body)
        async with self._session.request(method, self._router + path, data=data, headers=headers, timeout=timeout) as answer:
            text = await answer.read()
            if answer.status >= 400 and not (method == "DELETE" and answer.status == _GONE):
                raise ValueError(f"{method} {path} was answered with {answer.status}: {text[:200].decode(errors='replace')}")
            return orjson.loads(text) if method == "GET" else None
