"""The adapters an engine has loaded, and the requests that are on each: on the event loop.

    load ──► there ── acquire ─► a request is on it ─► release
              └── unload: nobody new; waits for those that are on it ──► gone ── acquire ─► loaded again from where it lay

As in SGLang, loads and unloads come one at a time, so that a load waits for an unload that waits; and a name that was unloaded is loaded again by whoever
asks for it while its folder is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from producer.engine.embedded.lora_rows import Adapter, LoraLimits, read_adapter
from producer.engine.embedded.model import SlotModel
from producer.engine.embedded.request import BadRequest, Request
from protocol.errors import ManifestError

NOT_ENABLED = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."


class Adapters:
    """Of one engine. `limits` None: it has no LoRA."""

    def __init__(self, model: SlotModel, limits: LoraLimits | None) -> None:
        self._model, self.limits = model, limits
        self._there: dict[str, Adapter] = {}
        self._paths: dict[str, str] = {}
        self._users: dict[Adapter, int] = {}
        self._changing = asyncio.Lock()
        self._freed = asyncio.Event()
        self._followed: set[asyncio.Task[str | None]] = set()

    @property
    def loaded(self) -> dict[str, str]:
        """Path by name."""
        return {name: adapter.path for name, adapter in self._there.items()}

    async def load(self, name: str, path: str) -> str | None:
        """What went wrong, or None. It goes on when the caller goes away."""
        return await self._follow(self._load(name, path))

    async def unload(self, name: str) -> str | None:
        return await self._follow(self._unload(name))

    async def acquire(self, requests: Iterable[Request]) -> None:
        """Each is on the adapter that it names until `release`. Raises: `BadRequest` for one that was never loaded."""
        for request in requests:
            if (name := request.lora_path) is None:
                continue
            if self.limits is None:
                raise BadRequest(
                    f"LoRA adapter '{name}' was requested, but LoRA is not enabled. Please launch the server with --enable-lora flag and preload adapters "
                    "using --lora-paths or /load_lora_adapter endpoint."
                )
            if name not in self._there:
                await self._load_again(name)
            adapter = self._there[name]
            self._users[adapter] = self._users.get(adapter, 0) + 1
            request.adapter = adapter

    def release(self, requests: Iterable[Request]) -> None:
        """They are answered. The thread that decodes may compute them for a step more: an adapter that is unloaded is only forgotten."""
        for request in requests:
            if request.adapter is not None:
                self._users[request.adapter] -= 1
        self._freed.set()

    async def close(self) -> None:
        for task in self._followed:
            task.cancel()
        await asyncio.gather(*self._followed, return_exceptions=True)

    async def _load(self, name: str, path: str) -> str | None:
        async with self._changing:
            if self.limits is None or (rows := self._model.rows) is None:
                return NOT_ENABLED
            if name in self._there:
                return f"Failed to load LoRA adapter {name} because it is already loaded"
            try:
                dtype = next(self._model.model.parameters()).dtype
                self._there[name] = await asyncio.to_thread(read_adapter, name, path, rows, self.limits, dtype)
            except ManifestError as problem:
                return str(problem)
            self._paths[name] = path
            return None

    async def _load_again(self, name: str) -> None:
        if name not in self._paths:
            raise BadRequest(f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {list(self._paths)}.")
        problem = await self.load(name, self._paths[name])
        if name not in self._there:
            raise BadRequest(f"Failed to implicitly load LoRA adapter {name}: {problem}")

    async def _unload(self, name: str) -> str | None:
        async with self._changing:
            if self.limits is None:
                return NOT_ENABLED
            adapter = self._there.pop(name, None)
            if adapter is None:
                return f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._there)}"
            while self._users.get(adapter):
                self._freed.clear()
                await self._freed.wait()
            self._users.pop(adapter, None)
            return None

    async def _follow(self, change: Coroutine[Any, Any, str | None]) -> str | None:
        task = asyncio.create_task(change, name="engine:adapter")
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)
        return await asyncio.shield(task)
