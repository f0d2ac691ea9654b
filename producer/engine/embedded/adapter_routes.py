"""The routes of adapters, in SGLang's shapes."""

from __future__ import annotations

from aiohttp import web

from producer.engine.embedded.adapters import Adapters
from producer.engine.embedded.http import Routes, accept_only, read_object, reply, text
from producer.engine.embedded.model import SlotModel


class AdapterRoutes:
    def __init__(self, adapters: Adapters, model: SlotModel) -> None:
        self._adapters, self._model = adapters, model

    def gets(self) -> Routes:
        return {"/v1/models": self._list}

    def posts(self) -> Routes:
        return {"/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload}

    async def _list(self, _: web.Request) -> web.Response:
        base = self._model.path
        models = [{"id": base, "object": "model", "owned_by": "rollstream", "root": base, "parent": None, "max_model_len": self._model.max_length}]
        for name, path in self._adapters.loaded.items():
            models.append({"id": name, "object": "model", "owned_by": "rollstream", "root": path, "parent": base, "max_model_len": None})
        return reply({"object": "list", "data": models})

    async def _load(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        accept_only(body, {"pinned": (None, False)})
        return self._told(await self._adapters.load(text(body, "lora_name"), text(body, "lora_path")))

    async def _unload(self, http: web.Request) -> web.Response:
        return self._told(await self._adapters.unload(text(await read_object(http), "lora_name")))

    def _told(self, problem: str | None) -> web.Response:
        loaded = None if problem is not None and self._adapters.limits is None else self._adapters.loaded
        return reply({"success": problem is None, "error_message": problem or "", "loaded_adapters": loaded}, 200 if problem is None else 400)
