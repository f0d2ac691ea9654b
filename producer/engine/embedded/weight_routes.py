"""The routes that change or check weights, as SGLang 0.5.21 and newer has them."""

from __future__ import annotations

import hashlib
from typing import Any

from aiohttp import web

from producer.engine.embedded.groups import RANK, WORLD_SIZE, GroupFailed
from producer.engine.embedded.http import Routes, accept_only, flag, integer, optional_text, outcome, read_object, text
from producer.engine.embedded.request import BadBody
from producer.engine.embedded.updates import Updates

_GROUP = "weight_update_group"
_DISK: dict[str, tuple[Any, ...]] = {"load_format": (None, "auto", "safetensors"), "manifest": (None,), "keep_pause": (False,)}
_SELECTOR: dict[str, tuple[Any, ...]] = {"selector": ("all", "target")}
_LAYOUT = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}


class WeightRoutes:
    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    def gets(self) -> Routes:
        return {"/weights_checker": self._check}

    def posts(self) -> Routes:
        return {
            "/update_weights_from_disk": self._from_disk,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._from_distributed,
            "/end_weight_update": self._end,
            "/update_weight_version": self._rename,
            "/weights_checker": self._check,
        }

    async def _from_disk(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        path, version = text(body, "model_path"), optional_text(body, "weight_version")
        accept_only(body, _DISK)
        problem = await self._updates.from_disk(path, version, **_options(body))
        return outcome(problem or "Succeeded to update model weights." + _named(version), success=problem is None, num_paused_requests=0)

    async def _init_group(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        host, name, backend = text(body, "master_address"), text(body, "group_name", _GROUP), text(body, "backend", "nccl")
        port, rank, world_size = integer(body, "master_port"), integer(body, "rank_offset"), integer(body, "world_size")
        wrong = ""
        if backend != "gloo":
            wrong = f"backend {backend}: the embedded engine has gloo"
        elif (rank, world_size) != (RANK, WORLD_SIZE):
            wrong = f"rank_offset {rank} of world_size {world_size}: a group of the embedded engine is its sender, 0, and itself, {RANK}, of {WORLD_SIZE}"
        elif not name or not host or not 0 < port < 65536:
            wrong = f"group {name!r:.60} at {host!r:.60}:{port}: expected a name, an address and a port"
        try:
            if not wrong:
                await self._updates.groups.join(name, host, port)
        except GroupFailed as problem:
            wrong = str(problem)
        return outcome(f"Failed to initialize custom process group: {wrong}." if wrong else "Succeeded to initialize custom process group.", success=not wrong)

    async def _destroy_group(self, http: web.Request) -> web.Response:
        there = self._updates.groups.drop(text(await read_object(http), "group_name", _GROUP))
        return outcome("Succeeded to destroy custom process group." if there else "The group to be destroyed does not exist.", success=there)

    async def _begin(self, http: web.Request) -> web.Response:
        accept_only(await read_object(http), _SELECTOR)
        problem = await self._updates.begin()
        return outcome(problem or "Success", success=problem is None)

    async def _end(self, http: web.Request) -> web.Response:
        await read_object(http)
        problem = await self._updates.end()
        return outcome(problem or "Success", success=problem is None)

    async def _from_distributed(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        names, dtypes, shapes = (_list(body, key) for key in ("names", "dtypes", "shapes"))
        if not all(isinstance(one, str) for one in names + dtypes):
            raise BadBody("names and dtypes must be lists of strings")
        if not all(isinstance(shape, list) and all(type(extent) is int for extent in shape) for shape in shapes):
            raise BadBody("shapes must be a list of lists of integers")
        accept_only(body, _SELECTOR | {"load_format": (None, "flattened_bucket")})
        version = optional_text(body, "weight_version")
        problem = await self._updates.from_group(
            text(body, "group_name", _GROUP), names, dtypes, shapes, flat=body.get("load_format") is not None, version=version, **_options(body)
        )
        return outcome(problem or "Succeeded to update parameter online." + _named(version), success=problem is None)

    async def _rename(self, http: web.Request) -> web.Response:
        body = await read_object(http)
        version = text(body, "new_version")
        await self._updates.rename(version, abort_all=flag(body, "abort_all_requests", default=True))
        return outcome(f"Weight version updated to {version}", success=True, new_version=version)

    async def _check(self, http: web.Request) -> web.Response:
        body = await read_object(http, required=False)
        accept_only(body, _SELECTOR | {"skip_tensor_list": (None, [])})
        if (action := body.get("action", "checksum")) != "checksum":
            return outcome(f"Unsupported action={action!r:.40}", success=False)
        found = await self._updates.checksums()
        whole = hashlib.sha256("".join(name + found[name] for name in sorted(found)).encode()).hexdigest()
        rank = {"checksums": found, "per_gpu_checksum": whole, "parallelism_info": [_LAYOUT]}
        return outcome("Success.", success=True, ranks=[rank], per_engine_checksum=hashlib.sha256(whole.encode()).hexdigest())


def _options(body: dict[str, Any]) -> dict[str, bool]:
    return {"flush": flag(body, "flush_cache", default=True), "abort_all": flag(body, "abort_all_requests", default=False)}


def _list(body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise BadBody(f"{key} must be a list, got {value!r:.40}")
    return value


def _named(version: str | None) -> str:
    return "" if version is None else f" Weight version updated to {version}."
